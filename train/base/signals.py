"""What ends a process from outside: signals, and its parent's death. Needs no torch, so it is there
before that is.
"""

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
NOTED = "stopping after this step; Ctrl-C once more ends the run now"

_PR_SET_PDEATHSIG = 1
# seconds in which an interrupt that comes again is the same: it may reach a process by several ways
_SAME = 0.5


def has_launcher() -> bool:
    """Whether this process is a rank that pretrain.py --processes started."""
    return LAUNCHER in os.environ


class StopSignal:
    """Notes SIGINT, SIGTERM and SIGHUP instead of dying of them.

    received   there was one; `noted` was called
    insisted   a SIGINT came after it; `insist` was called

    Both are called in a thread of their own, at once: Python runs handlers in the main thread,
    which may be in a step for minutes. A launcher's ranks leave SIGINT, which a terminal sends to
    all of them, to the launcher. What nohup lets a process ignore stays ignored.
    """

    def __init__(
        self, noted: Callable[[], None] = lambda: None, insist: Callable[[], None] = lambda: None
    ):
        self.received = self.insisted = False
        self._noted, self._insist, self._terminals = noted, insist, terminals()
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signals = [signal.SIGTERM] if has_launcher() else [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        for signum in signals:
            signal.signal(signum, lambda *_: None)
        threading.Thread(
            target=self._listen, args=(reader, signals), name="signals", daemon=True
        ).start()

    def _listen(self, reader: socket.socket, signals: list[int]) -> None:
        first = 0.0
        while arrived := reader.recv(1):
            signum, now = arrived[0], time.monotonic()
            if signum == signal.SIGHUP:
                leave_terminal(self._terminals)
            if signum in signals and not self.received:
                self.received, first = True, now
                self._noted()
            elif signum == signal.SIGINT and signum in signals and now - first > _SAME:
                self.insisted = True
                self._insist()


class Interrupts:
    """Lets SIGINT raise KeyboardInterrupt, as Python does, and remembers it.

    Python ignores what is raised in callbacks, such as those of garbage collection: then `check`
    raises it again. What nohup lets a process ignore stays ignored.
    """

    def __init__(self):
        self._came = False
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)

    def check(self) -> None:
        if self._came:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Checks for the last time: those that come later change nothing."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.check()

    def _note(self, *_: object) -> None:
        self._came = True
        raise KeyboardInterrupt


def die_with_parent() -> None:
    """If its launcher or torchrun's agent is killed outright, Linux kills this rank too, from now
    on.
    """
    launcher = os.environ.get(LAUNCHER)
    if sys.platform != "linux" or not (launcher or "TORCHELASTIC_RUN_ID" in os.environ):
        return
    parent = int(launcher) if launcher else os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the launcher is gone")
