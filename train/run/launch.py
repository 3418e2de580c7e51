"""The launcher that starts the ranks of a run on this machine, as torchrun does.

After the first signal, ranks get the time that they need to save. A second Ctrl-C kills them. If a
rank fails, the others are stopped, and all start again if restarts are left.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from train.base import ranks
from train.base.files import print_error
from train.base.signals import INTERRUPTED, LAUNCHER, STOPPING, StopSignal, describe_stop
from train.checkpoints import checkpoint
from train.run.replacement import make_store
from train.run.watchdog import EXIT_CODE

_GRACE = 5.0  # seconds in which ranks may end on their own after one has failed
_TICK = 0.05  # seconds between checks of the ranks
_EXPLAINED = 2  # exit code of a rank that printed what is wrong


def launch(
    argv: Sequence[str],
    processes: int,
    outlook: Callable[[], str] | None = None,
    restarts: int = 0,
    root: Path | None = None,
) -> int:
    """Run `python argv...` as ranks 0 to processes - 1. `outlook` returns what the run leaves when
    it ends. Without it there is nothing to save: a signal ends the ranks at once. A restart
    resumes from the checkpoints under `root`; without it, the run resumes on its own.

    Return 0, also after a signal, else the code of the first rank that failed, or 130 after a
    second Ctrl-C. A failure that a rank has explained (code 2) is not followed by a restart.
    """
    stop = StopSignal(lambda signum: print_error(describe_stop(signum) if outlook else "stopping"))
    # ranks print nothing until they have imported torch
    print_error(f"starting {processes} process" + "es" * (processes > 1))
    made, options = 0, list[str]()
    while True:
        code, failure = _run_ranks([*argv, *options], processes, stop, outlook)
        if not failure:
            return code
        if made == restarts or code == _EXPLAINED or stop.received:
            print_error(f"{failure}; the run is over")
            if outlook and code != _EXPLAINED:
                print_error(outlook())
            return _exit_code(code)
        made, options = made + 1, ["--resume", "auto"] if root and checkpoint.listed(root) else []
        print_error(f"{failure}; restart {made} of {restarts}")


def _run_ranks(
    argv: Sequence[str], processes: int, stop: StopSignal, outlook: Callable[[], str] | None
) -> tuple[int, str]:
    """Start the ranks and wait for their end. Return the exit code, and why the run failed."""
    store = _local_store()
    started = [_start(argv, rank, processes, store.port) for rank in range(processes)]
    ended: dict[int, int] = {}  # rank: exit code, in the order in which they ended
    stopping = False
    while len(ended) < processes and not any(ended.values()):
        if stop.received and not stopping:
            stopping = True
            for rank in started:
                rank.terminate()
        if stop.insisted:
            _kill(started)
            print_error(f"ended now; {outlook()}" if outlook else "ended now")
            return INTERRUPTED, ""
        time.sleep(_TICK)
        _note_ended(started, ended)
    if not any(ended.values()):
        return 0, ""
    # a rank that a signal killed did not handle signals yet. It may die before this process looks
    if stop.received and any(-code in STOPPING for code in ended.values()):
        print_error("stopped before training began" if outlook else "stopped")
        _kill(started)
        return 0, ""
    return _stop_others(started, ended)


def _local_store() -> dist.TCPStore:
    """Return the store in which the ranks find each other. Other machines cannot reach it."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    return make_store(host, port, listener.detach())


def _start(argv: Sequence[str], rank: int, processes: int, port: int) -> subprocess.Popen:
    """Start a rank, which ignores Ctrl-C: a terminal sends it to all, and the launcher stops."""
    environment = _environment(rank, processes, port)
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    return subprocess.Popen([sys.executable, *argv], env=environment, preexec_fn=ignore)


def _note_ended(started: list[subprocess.Popen], ended: dict[int, int]) -> None:
    for number, rank in enumerate(started):
        if number not in ended and rank.poll() is not None:
            ended[number] = rank.returncode


def _stop_others(started: list[subprocess.Popen], ended: dict[int, int]) -> tuple[int, str]:
    """Stop the remaining ranks after a failure. Return the code of the rank that failed first, and
    a sentence on it and on the others.
    """
    # ranks that fail for the same reason get time to print it and to write their stacks
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline and len(ended) < len(started):
        time.sleep(_TICK)
        _note_ended(started, ended)
    _kill(started)
    failed = {number: code for number, code in ended.items() if code}
    cause = _find_cause(failed)
    others = [
        f"rank {number} with {_describe_code(code)}"
        for number, code in failed.items()
        if number != cause
    ]
    then = f", then {', '.join(others)}" if others else ""
    return failed[cause], f"rank {cause} ended with {_describe_code(failed[cause])}{then}"


def _find_cause(failed: dict[int, int]) -> int:
    """Return the rank that was killed first, else one that knew the reason, else the first."""
    first = next(iter(failed))
    if failed[first] < 0:
        return first
    knew = [number for number, code in failed.items() if code in (_EXPLAINED, EXIT_CODE)]
    others = [number for number, code in failed.items() if code != ranks.LOST_CONTACT]
    return (knew or others or [first])[0]


def _kill(started: list[subprocess.Popen]) -> None:
    for rank in started:
        rank.kill()
        rank.wait()


def _describe_code(code: int) -> str:
    return f"code {_exit_code(code)}" + (f" ({signal.Signals(-code).name})" if code < 0 else "")


def _exit_code(code: int) -> int:
    """Return the exit code as a shell reports it: 128 + the signal that killed a process."""
    return code if code >= 0 else 128 - code


def _environment(rank: int, processes: int, port: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // processes)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        LAUNCHER: str(os.getpid()),
        # this process has the store, and rank 0 joins it like the others
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
