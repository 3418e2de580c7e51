"""Runs of pretrain.py that are stopped, interrupted and killed, with real processes."""

# ruff: noqa: F811 - folder is a fixture

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.launcher import (
    ROOT,
    children,
    draw_no_curves,
    forkserver,
    run_as_main,
    run_script,
    wait_until_ended,
)
from tests.runs import records
from tests.test_train import command, curve, folder, train  # noqa: F401
from train.base.folders import lock
from train.base.signals import STOPPING
from train.checkpoints import checkpoint
from train.run import launch

pytestmark = pytest.mark.slow


def test_a_folder_has_one_run_at_a_time(folder):
    first = start(command(folder, "shared", steps=100_000))
    wait_for_steps(folder / "shared", 3, first)
    before = (folder / "shared/metrics.jsonl").read_text()
    printed = train(folder, "shared", code=2, processes=2, resume="auto")
    assert f"{folder}/shared is in use by process {first.pid} on " in printed
    assert (folder / "shared/metrics.jsonl").read_text().startswith(before)
    os.kill(first.pid, signal.SIGHUP)
    ended = first.communicate()[0]
    assert "stopping after this step, on SIGHUP; SIGINT (Ctrl-C) ends the run now\n" in ended
    assert "to resume, run the same command with --resume auto" in ended
    assert first.returncode == 0


def test_a_signal_ends_the_run_in_order(folder):
    """Once for all, though a terminal and Slurm send it to the launcher and to the ranks, and other
    launchers send it twice.
    """
    name = "signal"
    run = start(command(folder, name, processes=2, sp_size=2, steps=100_000))
    wait_for_steps(folder / name, 3, run)
    for _ in range(2):
        os.killpg(run.pid, signal.SIGINT)
    printed, _ = run.communicate()
    assert run.returncode == 0, printed
    assert printed.count("stopping after this step; press Ctrl-C again to end the run now") == 1
    steps = len(curve(folder, name))
    assert (
        f"stopped after step {steps}; to resume, run the same command with --resume auto" in printed
    )
    assert checkpoint.newest(folder / name) == folder / name / f"step_{steps:08d}"


def test_an_interrupt_ends_imports_without_a_traceback(tmp_path):
    interrupt = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    for module in ("torch", "tqdm"):
        (tmp_path / f"{module}.py").write_text(interrupt)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for script in ("pretrain", "plan", "generate", "evaluate", "export", "prepare_data"):
        line = [sys.executable, ROOT / f"train/{script}.py"]
        done = subprocess.run(line, env=environment, capture_output=True, timeout=50)
        assert (done.returncode, done.stderr) == (-signal.SIGINT, b""), script


def test_a_second_interrupt_ends_the_run_now(folder):
    """In a step that takes minutes, from which Python's own handlers would not be called."""
    name = "insisted"
    last = folder / name / "step_00000002"
    train(folder, name, steps=2)
    long = {"steps": 30, "batch_size": 100_000, "resume": "auto"}
    run = start(command(folder, name, processes=2, sp_size=2, **long))
    printed = read_until(run, "resumed after step 2")
    time.sleep(2)  # until it is in the step
    os.killpg(run.pid, signal.SIGINT)
    printed += read_until(run, "stopping after this step")
    time.sleep(1)
    assert run.poll() is None
    os.killpg(run.pid, signal.SIGINT)
    printed += run.communicate()[0]
    assert run.returncode == 130, printed
    assert printed.count("stopping after this step") == 1
    assert (
        f"the last good checkpoint is {last}; to resume from it, run the same command with "
        "--resume auto" in printed
    )
    assert "Traceback" not in printed


class Started:
    """A Python script in its own process group, used like subprocess.Popen.

    It and the ranks that it launches are forked from a process that has imported torch, because
    importing takes seconds. `stopped_rank` stops itself with SIGSTOP when it starts.
    """

    def __init__(self, line: list[str], stopped_rank: int | None = None):
        reader, writer = multiprocessing.Pipe(duplex=False)
        self._process = forkserver().Process(
            target=_main_of_group, args=(line, writer, stopped_rank)
        )
        self._process.start()
        writer.close()
        self._reader, self.pid = reader, self._process.pid
        self.stdout = os.fdopen(os.dup(reader.fileno()), errors="replace")

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float = 600) -> tuple[str, None]:
        """Wait for the end and return the output. After `timeout` seconds all are killed."""
        patience = threading.Timer(timeout, os.killpg, (self.pid, signal.SIGKILL))
        patience.start()
        printed = self.stdout.read()
        self._process.join()
        patience.cancel()
        self._reader.close()
        return printed, None


class ForkedRank(multiprocessing.get_context("fork").Process):
    """A rank, in place of the subprocess.Popen of a launcher."""

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        preexec_fn: Callable[[], None],
        stopped_rank: int | None = None,
    ):
        arguments = command[1:], env, preexec_fn, env["RANK"] == str(stopped_rank)
        super().__init__(target=_main_of_rank, args=arguments)
        self.start()

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> None:
        self.join()


def _main_of_group(line: list[str], writer: Connection, stopped_rank: int | None) -> None:
    os.setpgid(0, 0)
    for descriptor in (1, 2):
        os.dup2(writer.fileno(), descriptor)
    writer.close()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    draw_no_curves()
    launch.subprocess = SimpleNamespace(Popen=partial(ForkedRank, stopped_rank=stopped_rank))
    if stopped_rank is not None:  # it does not end on its own
        launch._GRACE = 0.1
    run_as_main(line)


def _main_of_rank(
    line: list[str], env: dict[str, str], prepare: Callable[[], None], stopped: bool
) -> None:
    """Be as a new process is: without the launcher's signal handlers, files and environment."""
    if stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    signal.set_wakeup_fd(-1)
    for signum in STOPPING:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    prepare()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(env)
    run_as_main(line)


def start(arguments: list[str]) -> Started:
    return Started(arguments[1:])


def read_until(run: Started, text: str) -> str:
    """Return the output of a run up to the line with `text`."""
    lines = []
    while not lines or text not in lines[-1]:
        lines.append(run.stdout.readline())
        assert lines[-1], "".join(lines)
    return "".join(lines)


def wait_for_steps(output: Path, steps: int, run: Started) -> None:
    metrics, deadline = output / "metrics.jsonl", time.monotonic() + 600
    while not (metrics.is_file() and metrics.read_text().count("\n") >= steps):
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_run_resumes_where_it_saved(folder):
    """SIGKILL to the launcher kills the ranks. After SIGKILL to a rank all start again. The curve
    is identical.
    """
    options = {"processes": 2, "sp_size": 2, "save_every": 2, "resume": "auto", "steps": 12}
    train(folder, "not-killed", **options)
    run = start(command(folder, "killed", **options))
    wait_for_steps(folder / "killed", 2, run)
    ranks = children(run.pid)
    assert len(ranks) == 2
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    wait_until_ended(ranks)
    run = start(command(folder, "killed", **options, restarts=1))
    wait_for_steps(folder / "killed", 5, run)
    os.kill(children(run.pid)[1], signal.SIGKILL)
    printed, _ = run.communicate()
    assert run.returncode == 0, printed
    ended = "rank 1 ended with code 137 (SIGKILL), then rank 0 with code 4; restart 1 of 1"
    assert ended in printed
    assert printed.count("resumed after step") in (1, 2)
    killed, whole = (curve(folder, x, "loss", "grad_norm") for x in ("killed", "not-killed"))
    assert killed == whole


# Forks runs of one rank: one that is spared, then others that are killed within the time that it
# took, then the last. A machine may be slower by then: as long as nothing was saved they get more
# time.
KILLER = """
import gc, os, random, signal, sys, time
from pathlib import Path
from train import pretrain

kills, spared, killed, *flags = sys.argv[1:]

def forked(output):
    pid = os.fork()
    if pid == 0:
        os._exit(pretrain.main([*flags, "--output", output]))
    return pid

gc.freeze()  # or each fork would visit and copy it all
began = time.monotonic()
assert os.waitpid(forked(spared), 0)[1] == 0
whole = time.monotonic() - began
random.seed(0)
for _ in range(int(kills)):
    pid = forked(killed)
    time.sleep(random.random() * 0.8 * whole)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not any(Path(killed).glob("step_*")):
        whole *= 2
sys.exit(os.waitstatus_to_exitcode(os.waitpid(forked(killed), 0)[1]))
"""


def test_kills_at_random_moments_leave_no_trace_in_the_curve(folder):
    """While it starts, trains, saves or evaluates."""
    options = {"save_every": 1, "resume": "auto", "steps": 10, "eval_sequences": 3, "batch_size": 2}
    options |= {"eval_every": 3, "val_data": folder / "data/train"}
    [_, _, *flags] = command(folder, "killed-often", **options)
    script = folder / "killer.py"
    script.write_text(KILLER)
    folders = folder / "spared", folder / "killed-often"
    code, printed = run_script(None, script, "4", *folders, *flags)
    assert code == 0, printed
    assert "resumed after step" in printed
    for name in ("loss", "val_loss"):
        spared, killed = (records(output, name) for output in folders)
        assert spared == killed


def test_a_failing_rank_ends_the_run(folder):
    """Ranks that share no sequences. Those of the killed run above share them."""
    run = start(command(folder, "failing", processes=2, sp_size=1, steps=100_000))
    wait_for_steps(folder / "failing", 2, run)
    os.kill(children(run.pid)[1], signal.SIGKILL)
    printed, _ = run.communicate()
    assert run.returncode == 137
    assert "rank 1 ended with code 137 (SIGKILL)" in printed
    assert "rank 0 lost contact with another rank" in printed
    assert "there is no good checkpoint" in printed
    assert "Traceback" not in printed


def test_ranks_save_and_end_when_torchruns_agent_dies_of_a_signal(folder):
    """And let go of the folder."""
    [python, *line] = command(folder, "agent", sp_size=2, steps=100_000)
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agent = subprocess.Popen([*launcher, *line], **options, process_group=0)
    wait_for_steps(folder / "agent", 2, agent)
    ranks = children(agent.pid)
    assert len(ranks) == 2
    for pid in (agent.pid, ranks[0]):  # one rank hears only that the agent died
        os.kill(pid, signal.SIGUSR1)
    printed, _ = agent.communicate(timeout=600)
    assert agent.returncode == -signal.SIGUSR1
    wait_until_ended(ranks)
    steps = len(curve(folder, "agent"))
    assert f"stopped after step {steps}; to resume, run the same command" in printed
    assert checkpoint.newest(folder / "agent") == folder / "agent" / f"step_{steps:08d}"
    lock(folder / "agent").close()


def test_a_rank_that_hangs_at_the_start_ends_the_run(folder):
    """Rank 1 stops itself when it starts, so that rank 0 waits for it."""
    options = {"processes": 2, "sp_size": 2, "timeout": 3}
    run = Started(command(folder, "hanging", **options)[1:], stopped_rank=1)
    printed, _ = run.communicate()
    assert run.returncode != 0
    assert "rank 0: no sign of life for" in printed
    assert "in waiting for the other ranks to join" in printed
    assert "init_process_group" in printed  # where it waits
