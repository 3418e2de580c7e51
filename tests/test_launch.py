"""The launcher: its address, restarts, and the rank whose failure it reports."""

import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from bmt_burst.errors import RankFailed, RankGone, RankLate
from tests.refusals import refused_line
from train.base import ranks
from train.base.files import leave_reason
from train.loop.stages import parse_run
from train.run import ending, launch
from train.run.distributed import init_distributed
from train.run.watchdog import EXIT_CODE
from train.settings.config import TrainConfig


def watchdog_of(last_words: str = "") -> SimpleNamespace:
    return SimpleNamespace(program="pretrain.py", doing="step 7", last_words=last_words)


def listeners() -> list[str]:
    """Return the addresses and ports, in hexadecimal, on which this process listens."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_nobody_outside_of_the_machine_reaches_the_store():
    before = set(listeners())
    store = launch._local_store()
    assert set(listeners()) - before == {f"0100007F:{store.port:04X}"}  # 127.0.0.1
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_port_that_another_program_has_is_named(monkeypatch):
    """Where srun or a user starts the ranks, without torchrun's own store."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        place = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(ValueError, match=f"MASTER_PORT {port} of this machine is in use"):
            init_distributed(TrainConfig(device="cpu", timeout=5.0))


def test_a_rank_outside_of_its_world_is_refused_at_once(monkeypatch):
    for values, message in (
        ({"RANK": "2", "WORLD_SIZE": "2"}, "expected RANK below WORLD_SIZE, which is 2, got 2"),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, "expected LOCAL_RANK below LOCAL_WORLD"),
        ({"RANK": ""}, "expected a number in the environment variable RANK, got ''"),
        ({"RANK": "0"}, "RANK is set without WORLD_SIZE, MASTER_ADDR, MASTER_PORT: set them"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "without MASTER_PORT: set them"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=message):
            for name, value in values.items():
                patch.setenv(name, value)
            ranks.check_environment()
    ranks.check_environment()


def test_the_cause_is_the_rank_that_failed_by_itself():
    for failed, cause in (
        ({0: ranks.LOST_CONTACT, 1: -9}, 1),
        ({0: ranks.LOST_CONTACT, 2: 1, 1: ranks.LOST_CONTACT}, 2),
        ({0: 1, 1: 2}, 1),
        ({3: -9, 0: 2}, 3),
        ({0: EXIT_CODE, 1: EXIT_CODE}, 0),
        ({1: ranks.LOST_CONTACT, 0: ranks.LOST_CONTACT}, 1),
    ):
        assert launch._find_cause(failed) == cause


@pytest.mark.parametrize(
    "error",
    [
        RankGone("rank 3 of the group has ended, process 12 on here; its group is unusable"),
        RankFailed("rank 3 of the group gave up forward 2: MemoryError"),
        RankLate("a call of unshard: rank 3 of the group did not make this call within 120 s"),
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"),
    ],
)
def test_a_rank_that_lost_another_one_reports_it_in_a_line_and_is_not_the_cause(error, capsys):
    watchdog = watchdog_of("there is no good checkpoint")
    assert ending.explain(error, watchdog) == ranks.LOST_CONTACT
    printed = capsys.readouterr().err
    lost = "rank 0 lost contact with another rank, whose own message may say why; in step"
    assert printed.startswith(f"pretrain.py: {lost}")
    assert printed.endswith(f"{error}; there is no good checkpoint\n")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "rank", "reason", "is_printed", "code"),
    [
        (ranks.RankError("rank 1: no"), "0", "rank 1: no", True, 2),
        (ranks.RankError("rank 1: no"), "1", "rank 1: no", False, 2),
        (FloatingPointError("step 3: nan"), "1", "step 3: nan", False, 2),
        (OSError("disk full"), "1", "rank 1: disk full", True, 2),
        (RuntimeError("rank 3\nat a.cpp"), "1", "rank 1: RuntimeError: rank 3", False, None),
    ],
)
def test_every_rank_leaves_torchrun_the_sentence_that_one_prints(
    error, rank, reason, is_printed, code, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", rank)
    assert ending.explain(error, watchdog_of("go on so")) == code
    sentence = f"pretrain.py: {reason}; go on so"
    assert failure(tmp_path).message["message"] == sentence
    assert (sentence in capsys.readouterr().err) == is_printed


def failure(folder: Path) -> ProcessFailure:
    """Return the contents of a file as torchrun reads it, and remove the file."""
    made = ProcessFailure(0, 1, 2, str(folder / "error.json"))
    (folder / "error.json").unlink()
    return made


def test_a_rank_that_lost_another_one_is_not_torchruns_root_cause(monkeypatch, tmp_path):
    """The first reason stays."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    ending.explain(RankGone("rank 1 of the group has ended"), watchdog_of())
    lost = failure(tmp_path)
    leave_reason("x")
    leave_reason("lost contact", cause=False)
    first = failure(tmp_path)
    assert first.message["message"] == "x" and first.timestamp < lost.timestamp


def test_torchrun_hears_of_wrong_options(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        parse_run(["--help"])
    assert not (tmp_path / "error.json").exists()
    capsys.readouterr()
    for flags in (["--seq-len", "0"], ["--stepz"]):
        printed = refused_line(capsys, parse_run, *flags)
        assert failure(tmp_path).message["message"] == printed


def test_torchrun_never_sees_half_a_file(monkeypatch, tmp_path):
    """It ends the other ranks as soon as one has failed, also while this one writes."""

    def killed(path, text):
        with open(path, "w"):
            raise KeyboardInterrupt

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        leave_reason("x")
    assert not (tmp_path / "error.json").exists()


def test_a_reason_that_cannot_be_written_does_not_hold_up_the_end(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere/error.json"))
    assert ending.explain(ValueError("x"), watchdog_of()) == 2


# A rank that notes its options and ends with the next of some codes. The second start saves.
RANK = """
import os, sys
from pathlib import Path
folder, codes = Path(sys.argv[1]), sys.argv[2].split(",")
with open(folder / "starts", "a") as file:
    file.write(" ".join(sys.argv[3:]) + chr(10))
starts = (folder / "starts").read_text().count(chr(10))
if starts == 2:
    (folder / "step_00000007").mkdir()
code = int(codes[starts - 1])
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


@pytest.fixture
def stop(tmp_path, monkeypatch) -> SimpleNamespace:
    """Return the launcher's signal, which was not received. Write the program of a rank."""
    (tmp_path / "rank.py").write_text(RANK)
    stop = SimpleNamespace(received=False, insisted=False)
    monkeypatch.setattr(launch, "StopSignal", lambda noted: stop)
    return stop


@pytest.mark.parametrize(
    ("codes", "restarts", "ended", "starts", "message"),
    [
        ("1,-9,0", 2, 0, 3, "rank 0 ended with code 137 (SIGKILL); restart 2 of 2"),
        ("1,1,1", 1, 1, 2, "rank 0 ended with code 1; the run is over"),
        ("3,2,0", 5, 2, 2, "rank 0 ended with code 2; the run is over"),
        ("1,0", 0, 1, 1, "rank 0 ended with code 1; the run is over"),
    ],
)
def test_a_failed_run_starts_again_from_its_last_checkpoint(
    tmp_path, stop, capsys, codes, restarts, ended, starts, message
):
    """It does not after an error that was explained, and not more often than it may."""
    line = [str(tmp_path / "rank.py"), str(tmp_path), codes, "--seed", "3"]
    assert launch.launch(line, 1, lambda: "there is none", restarts, tmp_path) == ended
    options = ["--seed 3", "--seed 3", "--seed 3 --resume auto"]
    assert (tmp_path / "starts").read_text().splitlines() == options[:starts]
    printed = capsys.readouterr().err
    assert message in printed
    assert ("there is none" in printed) == (ended not in (0, 2))


def test_a_run_that_was_told_to_stop_does_not_start_again(tmp_path, stop, monkeypatch):
    monkeypatch.setattr(launch, "_find_cause", lambda failed: setattr(stop, "received", True) or 0)
    line = [str(tmp_path / "rank.py"), str(tmp_path), "1,0"]
    assert launch.launch(line, 1, lambda: "", 3, tmp_path) == 1
    assert (tmp_path / "starts").read_text() == "\n"


def test_a_signal_that_killed_a_rank_first_is_no_failure(tmp_path, stop, monkeypatch, capsys):
    """The launcher may notice the rank's end before its own signal."""
    note = launch._note_ended

    def note_late(started, ended):
        note(started, ended)
        stop.received = bool(ended)

    monkeypatch.setattr(launch, "_note_ended", note_late)
    line = [str(tmp_path / "rank.py"), str(tmp_path), str(-signal.SIGUSR2)]
    assert launch.launch(line, 1, lambda: "") == 0
    assert capsys.readouterr().err == "starting 1 process\nstopped before training began\n"
