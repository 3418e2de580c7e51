"""Starts the ranks of a run on this machine.

What torchrun does, without its restarts, and with its signals turned into an orderly end: SIGINT and SIGTERM are passed
on and the ranks are given the time they need to save. If a rank fails, the others are stopped. If the launcher dies, so
do the ranks (on Linux).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist

from train.watchdog import EXIT_CODE

_LAUNCHER = "BMT_BURST_LAUNCHER"  # environment variable: the launcher's process id
_PR_SET_PDEATHSIG = 1
_GRACE = 5.0  # seconds for ranks to end by themselves once one has failed
_EXPLAINED = 2  # exit code of a rank that has said what is wrong


def launch(argv: Sequence[str], processes: int) -> int:
    """Runs `python argv...` as ranks 0 to processes - 1; returns 0, also after a signal, or a failed rank's code."""
    ranks: list[subprocess.Popen] = []
    passed_on: list[int] = []

    def pass_on(signum: int, _frame) -> None:
        passed_on.append(signum)
        for rank in ranks:
            rank.send_signal(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, pass_on)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in range(processes):
        ranks.append(subprocess.Popen([sys.executable, *argv], env=_environment(rank, processes, store.port)))
        if passed_on:  # it came before this rank was there
            ranks[-1].send_signal(passed_on[-1])
    failed = None
    while not failed and any(rank.poll() is None for rank in ranks):
        failed = next((rank for rank in ranks if rank.poll()), None)
        time.sleep(0.1)
    failed = failed or next((rank for rank in ranks if rank.returncode), None)
    if failed is None:
        return 0
    if -failed.returncode in passed_on:  # it could not catch the signal yet
        print("stopped before training began", file=sys.stderr)
        _kill(ranks)
        return 0
    return _stop_others(ranks)


def die_with_launcher() -> None:
    """Called by a rank when it starts: if its launcher is killed outright, Linux kills the rank too."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):
            sys.exit("the launcher is gone")


def _stop_others(ranks: list[subprocess.Popen]) -> int:
    """Stops what still runs after a failure; returns the code of a rank that knew why it failed, else of the first."""
    deadline = time.monotonic() + _GRACE  # ranks that fail for the same reason may still say so, and leave their stacks
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(0.1)
    codes = {number: _exit_code(rank) for number, rank in enumerate(ranks) if rank.poll()}
    _kill(ranks)
    ended = ", ".join(f"rank {number} ended with code {code}" for number, code in codes.items())
    print(f"{ended}; the run is over", file=sys.stderr)
    return next((code for code in (_EXPLAINED, EXIT_CODE) if code in codes.values()), next(iter(codes.values())))


def _kill(ranks: list[subprocess.Popen]) -> None:
    for rank in ranks:
        rank.kill()
        rank.wait()


def _exit_code(rank: subprocess.Popen) -> int:
    """As a shell gives it: 128 + the signal for a process that died of one."""
    return rank.returncode if rank.returncode >= 0 else 128 - rank.returncode


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
        _LAUNCHER: str(os.getpid()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is this process's: rank 0 joins it like the others
    }
