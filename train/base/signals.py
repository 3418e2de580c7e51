"""Signals, and the death of the parent process. It needs no torch, whose import takes seconds."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from train.base.files import leave_terminal, terminals

LAUNCHER = "BMT_BURST_LAUNCHER"  # environment variable of a rank: its launcher's process id
INTERRUPTED = 128 + signal.SIGINT  # exit code of a run that was ended at once
# Signals that ask a run to stop, besides Ctrl-C. Slurm sends the last two before a time limit, if
# --signal says so.
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_PR_SET_PDEATHSIG = 1
# Seconds within which a second interrupt counts as the first one. A process may get one twice.
_SAME = 0.5
_NO_SIGNAL = b"\0"


def has_launcher() -> bool:
    """Whether pretrain.py --processes started this process as a rank."""
    return LAUNCHER in os.environ


def describe_stop(signum: int) -> str:
    """Return a line about a signal that stops a run, and how to end the run now."""
    if signum == signal.SIGINT:
        return "stopping after this step; press Ctrl-C again to end the run now"
    name = signal.Signals(signum).name
    return f"stopping after this step, on {name}; SIGINT (Ctrl-C) ends the run now"


class StopSignal:
    """A flag that SIGINT and the signals of STOPPING set instead of ending the process.

    received   a signal arrived, and `noted` was called with it
    insisted   a SIGINT arrived after it, and `insist` was called

    A thread calls both at once, since Python's handlers wait for the main thread, which may be
    busy for minutes. Under a launcher, which handles it, ranks ignore SIGINT, and under nohup
    SIGHUP.
    """

    def __init__(
        self,
        noted: Callable[[int], None] = lambda signum: None,
        insist: Callable[[], None] = lambda: None,
    ):
        self.received = self.insisted = False
        self._noted, self._insist, self._terminals = noted, insist, terminals()
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signals = [*STOPPING] if has_launcher() else [signal.SIGINT, *STOPPING]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            signals.remove(signal.SIGHUP)
        for signum in signals:
            signal.signal(signum, lambda *_: None)
        self._signals = signals
        self._thread = threading.Thread(
            target=self._listen, args=(reader, signals), name="signals", daemon=True
        )
        self._thread.start()

    def close(self) -> bool:
        """Let signals end the process again. Return whether one was received before."""
        for signum in self._signals:
            signal.signal(signum, signal.SIG_DFL)
        self._writer.send(_NO_SIGNAL)  # after those that arrived
        self._thread.join()
        return self.received

    def _listen(self, reader: socket.socket, signals: list[int]) -> None:
        first = 0.0
        while (arrived := reader.recv(1)) != _NO_SIGNAL:
            signum, now = arrived[0], time.monotonic()
            if signum == signal.SIGHUP:
                leave_terminal(self._terminals)
            if signum in signals and not self.received:
                self.received, first = True, now
                self._noted(signum)
            elif signum == signal.SIGINT and signum in signals and now - first > _SAME:
                self.insisted = True
                self._insist()


class Interrupts:
    """A handler of SIGINT. It raises KeyboardInterrupt, as usual, and remembers the signal.

    Python drops exceptions that are raised in callbacks, for example of garbage collection. `check`
    raises such an exception again. SIGINT stays ignored where it already is, as under nohup.
    """

    def __init__(self):
        self._received = False
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._note)

    def check(self) -> None:
        if self._received:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Check for the last time. Ignore all later interrupts."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.check()

    def _note(self, *_: object) -> None:
        self._received = True
        raise KeyboardInterrupt


def has_agent() -> bool:
    """Whether torchrun started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ and not has_launcher()


def begin_script(agent_dies: signal.Signals = signal.SIGKILL) -> None:
    """Let Ctrl-C end this process without a traceback, and let Linux kill it if its launcher is
    killed. If torchrun's agent dies, as of SIGUSR1 from Slurm, send it `agent_dies`, so that it can
    still save. Scripts call this before they import torch, which takes seconds.
    """
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform != "linux" or not (has_agent() or has_launcher()):
        return
    parent, signum = os.getppid(), agent_dies
    if has_launcher():
        parent, signum = int(os.environ[LAUNCHER]), signal.SIGKILL
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")
