"""Records of a run: broken lines, full disks, terminals that are gone, and wandb."""

import io
import json
import os
import sys
import threading
import time

import pytest
from matplotlib.figure import Figure

from tests.runs import read_records, train
from train.base import ranks
from train.base.files import printing
from train.base.folders import lock
from train.loop.metrics import Metrics
from train.settings.config import TrainConfig

GOOD = [{"step": step, "loss": 1.0 / step, "samples": step * 4} for step in range(1, 5)]


BROKEN = [
    *(b'{"step": 3, "loss": 0.', b"", b"\xff\xfe\x80 not UTF-8", b"3", b'{"loss": 1.0}'),
    *(b'{"step": true}', b'{"step": 2.5, "loss": 1.0}', b'{"step": 2, "loss": "low"}'),
    *(b'{"step": 2, "loss": ' + b"9" * digits + b"}" for digits in (400, 5000)),
    b"[" * 100_000,
]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("place", [0, 4])
def test_a_broken_line_is_dropped_and_reported(tmp_path, capsys, broken, place):
    lines = [json.dumps(record).encode() for record in GOOD]
    lines.insert(place, broken)
    end = b"" if broken and place == 4 else b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + end)
    metrics = Metrics(tmp_path, 4, 10)
    metrics.record(5, loss=0.2)
    metrics.progress(5)
    assert [record["step"] for record in metrics.records] == [1, 2, 3, 4, 5]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [*GOOD, {"step": 5, "loss": 0.2}]
    assert (tmp_path / "metrics.jsonl.dropped").read_bytes() == broken + b"\n"
    dropped = f"metrics.jsonl: line {place + 1} is not a record, and is dropped"
    assert dropped in capsys.readouterr().err


def test_a_value_that_was_not_finite_is_no_obstacle(tmp_path):
    metrics = Metrics(tmp_path, 0, 100)
    for step in range(1, 50):
        metrics.record(step, loss=float("nan") if step % 2 else 1.0, val_loss=float("inf"))
    metrics.close()
    again = Metrics(tmp_path, 49, 100)
    again.record(50, loss=2.0)
    again.progress(50)
    again.close()
    assert (tmp_path / "metrics.jsonl").read_text().count("null") == 25 + 49
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is full")
def test_a_full_disk_is_named(tmp_path):
    metrics = Metrics(tmp_path, 0, 10)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, metrics._file.fileno())
    os.close(full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/metrics.jsonl'"):
        metrics.record(1, loss=1.0)
    (tmp_path / ".lock").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"'{tmp_path}/.lock'"):
        lock(tmp_path)


def test_a_disk_that_is_full_for_tensorboard_is_named_without_a_traceback(tmp_path, capsys):
    metrics = Metrics(tmp_path, 0, 10)
    worker = metrics._board.file_writer.event_writer._async_writer._worker

    def full(_data):
        raise OSError(28, "No space left on device")

    worker._record_writer.write = full
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/tensorboard'"):
        for step in range(1, 100):
            metrics.record(step, loss=1.0)
            worker.join(1.0)
    assert "Traceback" not in capsys.readouterr().err
    threading.excepthook = threading.__excepthook__


def lines_of(metrics: Metrics, steps: range, capsys, monkeypatch) -> list[str]:
    """Return the lines printed for steps of two seconds. The first one takes a minute more."""
    metrics._began = now = 1000.0  # a whole number, so that differences are exact
    for step in steps:
        now += 2 + 60 * (step == steps[0])
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        metrics.record(step, loss=1.0, lr=1e-3, tokens_per_s=1234.5, tokens=100 * step)
        metrics.progress(step)
    return capsys.readouterr().out.splitlines()


def test_a_log_has_lines_for_some_steps_with_the_time_left(tmp_path, capsys, monkeypatch):
    lines = lines_of(Metrics(tmp_path, 0, 3613, log_every=6), range(1, 14), capsys, monkeypatch)
    values = "loss 1.0000, lr 1.00e-03, 1,234 tokens/s"
    assert lines == [
        # the first step was slow
        f"step 1/3613: {values}, 100 tokens so far, 01:02 elapsed, ETA 62:12:24",
        f"step 6/3613: {values}, 600 tokens so far, 01:12 elapsed, ETA 2:00:14",
        f"step 12/3613: {values}, 1,200 tokens so far, 01:24 elapsed, ETA 2:00:02",
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 13


def test_the_last_step_and_the_first_after_a_resume_have_lines_too(tmp_path, capsys, monkeypatch):
    lines = lines_of(Metrics(tmp_path, 24, 27), range(25, 28), capsys, monkeypatch)
    assert [line.split(":")[0] for line in lines] == ["step 25/27", "step 27/27"]
    assert lines[-1].endswith("2,700 tokens so far, 01:06 elapsed, ETA 00:00")


def test_a_terminal_has_a_bar_with_every_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    assert lines_of(Metrics(tmp_path, 0, 3), range(1, 4), capsys, monkeypatch) == []
    assert "training: 100%" in sys.stderr.getvalue()
    assert "300 tokens so far" in sys.stderr.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_that_is_gone_ends_nothing(monkeypatch):
    left = []
    monkeypatch.setattr("train.base.files.leave_terminal", left.append)
    with printing():
        raise OSError(5, "Input/output error")
    assert left == [(1, 2)]
    with pytest.raises(OSError, match="No space left on device: 'stdout'"), printing():
        raise OSError(28, "No space left on device")


def test_a_curve_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch, capsys):
    def full(_figure, file, **_options):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    metrics = Metrics(tmp_path, 0, 10)
    metrics.draw()
    before = (tmp_path / "loss.png").read_bytes()
    monkeypatch.setattr(Figure, "savefig", full)
    metrics.draw()  # nothing, since there is no more
    assert not capsys.readouterr().out
    metrics.record(1, loss=1.0)
    metrics.draw()
    assert (tmp_path / "loss.png").read_bytes() == before
    assert not list(tmp_path.glob(".*partial"))
    assert "loss.png was not drawn: OSError: [Errno 28] No space" in capsys.readouterr().out


STAND_IN = """
import itertools, json
from types import SimpleNamespace
from pathlib import Path

class Error(Exception): pass
class UsageError(Error): pass
class CommError(Error): pass
class AuthenticationError(CommError): pass
errors = SimpleNamespace(UsageError=UsageError, CommError=CommError,
                         AuthenticationError=AuthenticationError)
LOG = Path(__file__).with_name("log")
FAILS, IDS = {}, itertools.count(1)

def note(**what):
    with open(LOG, "a") as file:
        file.write(json.dumps(what) + chr(10))

def Settings(console):
    return console

def init(mode="online", **options):
    note(init=options | {"mode": mode})
    if error := FAILS.pop(mode, None):
        raise error
    return Run(options["id"] or f"id{next(IDS)}")

def teardown():
    note(teardown=True)

def Run(id):
    return SimpleNamespace(
        id=id,
        define_metric=lambda name, step_metric: note(metric=[name, step_metric]),
        log=lambda values: note(log=values),
        finish=lambda: note(finish=id),
    )
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """The stand-in, and `log`, which returns its calls by their name."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    def log(name):
        calls = map(json.loads, (tmp_path / "site/log").read_text().splitlines())
        return [call[name] for call in calls if name in call]

    wandb.log = log
    yield wandb
    del sys.modules["wandb"]


def test_wandb_gets_every_record_and_a_resumed_run_continues_its_run(settings, tmp_path, wandb):
    run = settings | {"wandb": "mine", "resume": "auto", "save_every": 0}
    evaluated = {"val_data": settings["data"], "eval_every": 2}
    train(run, **evaluated, steps=2, decay_steps=0)
    train(run, **evaluated, steps=4, decay_steps=0)
    [first, second] = wandb.log("init")
    assert (first["project"], first["id"], first["name"]) == ("mine", None, "run")
    assert first["config"]["config"]["seq_len"] == 61
    assert second["id"] == "id1"
    assert wandb.log("log") == read_records(tmp_path / "run")
    assert wandb.log("metric") == [["*", "step"]] * 2
    assert (wandb.log("finish"), len(wandb.log("teardown"))) == (["id1", "id1"], 2)
    train(run | {"wandb": "other"}, steps=5, decay_steps=0)
    assert wandb.log("init")[-1]["id"] is None


def test_wandb_may_be_out_of_reach_but_needs_a_login(settings, tmp_path, wandb, capsys):
    wandb.FAILS["online"] = wandb.CommError("timed out")
    train(settings, wandb="mine")
    assert "wandb cannot be reached, and records offline: timed out" in capsys.readouterr().err
    assert [call["mode"] for call in wandb.log("init")] == ["online", "offline"]
    for kind in (wandb.UsageError, wandb.AuthenticationError):
        wandb.FAILS["online"] = kind("not logged in")
        with pytest.raises(ranks.RankError, match="--wandb mine: not logged in"):
            train(settings, wandb="mine", output=str(tmp_path / kind.__name__))
        assert not (tmp_path / kind.__name__ / "metrics.jsonl").exists()


def test_wandb_that_is_missing_or_refuses_a_name_is_an_error(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ranks.RankError, match=r"--wandb needs .* pip install 'bmt_burst\[wandb\]'"):
        train(settings, wandb="mine")
    assert not (tmp_path / "run").exists()
    for name in ("a/b", "x" * 129):
        with pytest.raises(ValueError, match="--wandb must be a project's name of at most 128"):
            TrainConfig(wandb=name)
