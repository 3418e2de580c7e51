"""Ends a run that hangs, with every rank's stacks.

A rank that waits for another, or for a GPU that never finishes, waits for ever. So each rank must show signs of life;
after `timeout` seconds without, its threads' stacks go to a file and to stderr and the process leaves with code 3. A
hang holds up all ranks, so all of them leave theirs.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

EXIT_CODE = 3
_GRACE = 30.0  # seconds after which faulthandler's own thread acts, which needs no lock of the interpreter


class Watchdog:
    """Watches this rank from now on; stacks go to `folder`/rank_NNNNN.txt."""

    def __init__(self, folder: Path, rank: int, timeout: float):
        self.rank, self.timeout = rank, timeout
        self.file = folder / f"rank_{rank:05d}.txt"
        folder.mkdir(parents=True, exist_ok=True)
        self._stream = open(self.file, "a")  # it may hold the stacks of a run that this one goes on from
        self._over = threading.Event()
        self.alive("start")
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def alive(self, doing: str) -> None:
        """A sign of life; `doing` says what comes now."""
        self._doing, self._since = doing, time.monotonic()
        faulthandler.dump_traceback_later(self.timeout + _GRACE, exit=True, file=self._stream)

    def close(self) -> None:
        """Ends the watch; the file goes if nothing was written."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()
        self._stream.close()
        if not self.file.stat().st_size:
            self.file.unlink()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.timeout / 4)):
            waited = time.monotonic() - self._since
            if waited > self.timeout:
                self._bark(waited)

    def _bark(self, waited: float) -> None:
        text = f"rank {self.rank}: no sign of life for {waited:.0f} s in {self._doing}; stacks in {self.file}\n"
        self._stream.write(time.strftime("%F %T "))
        for stream in (self._stream, sys.stderr):
            stream.write(text)
            stream.flush()
            faulthandler.dump_traceback(stream, all_threads=True)
            stream.flush()
        os._exit(EXIT_CODE)
