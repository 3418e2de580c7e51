"""A watchdog that ends a run that hangs, with the stacks of every rank. While a run starts, it
prints what takes long.

After `timeout` seconds without a sign of life, it writes the stacks of all threads to stderr and,
once there is one, to a file. Then it ends the process with code 3, as on all ranks that hang.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from train.base.files import leave_reason, print_error

EXIT_CODE = 3
_TICK = 1.0  # seconds between checks, at most
_SILENT = 3.0  # seconds after which rank 0 prints what it does
# Seconds until faulthandler acts too. Its thread does not need the interpreter's lock.
_GRACE = 30.0


@contextmanager
def telling(doing: str) -> Iterator[None]:
    """Return a context that prints what this process does if it takes long."""
    timer = threading.Timer(_SILENT, print_error, [f"{doing}: {_SILENT:.0f} s so far"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Watchdog:
    """A thread that watches this rank from now on.

    doing        what the rank does now, for messages
    last_words   the end of a message: the last good checkpoint, and how to resume
    program      the name of the script
    """

    def __init__(self, rank: int, timeout: float, program: str = "pretrain.py"):
        self.rank, self.timeout, self.program = rank, timeout, program
        self.last_words = ""
        self._file: TextIO | None = None
        self._over = threading.Event()
        self.doing, self._began = "", 0.0
        self._told = "" if rank == 0 else None  # what was printed last, None: no more is printed
        self.alive("start")
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def write_to(self, folder: Path) -> None:
        """Also write stacks to `folder`/rank_NNNNN.txt, after those of an earlier run."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"rank_{self.rank:05d}.txt", "a")
        self.alive(self.doing)

    def alive(self, doing: str) -> None:
        """Give a sign of life. `doing` is what the rank does next."""
        if self._over.is_set():
            return
        self._since = time.monotonic()
        if doing != self.doing:
            self.doing, self._began = doing, self._since
        faulthandler.dump_traceback_later(
            self.timeout + _GRACE, exit=True, file=self._file or sys.stderr
        )

    def quiet(self) -> None:
        """Print no more what the rank does, since the run prints its progress."""
        self._told = None

    def close(self) -> None:
        """Stop watching. Remove the file if it is empty."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()
        if self._file:
            empty = not os.fstat(self._file.fileno()).st_size
            self._file.close()
            if empty:
                Path(self._file.name).unlink(missing_ok=True)
            self._file = None

    def _watch(self) -> None:
        while not self._over.wait(min(_TICK, self.timeout / 4)):
            waited = time.monotonic() - self._since
            if waited > self.timeout:
                self._end_run(waited)
            seconds = time.monotonic() - self._began
            if self._told not in (None, self.doing) and seconds > _SILENT:
                self._told = self.doing
                print_error(f"{self.doing}: {seconds:.0f} s so far")

    def _end_run(self, waited: float) -> None:
        where = f"; stacks in {self._file.name}" if self._file else ""
        what = f"rank {self.rank}: no sign of life for {waited:.0f} s in {self.doing}{where}"
        text = "; ".join(filter(None, (f"{time.strftime('%F %T')} {what}", self.last_words))) + "\n"
        leave_reason(f"{self.program}: {text.strip()}")
        for stream in (self._file, sys.stderr) if self._file else (sys.stderr,):
            stream.write(text)
            stream.flush()
            faulthandler.dump_traceback(stream, all_threads=True)
            stream.flush()
        time.sleep(2 * _TICK)  # let other ranks report first: they lose contact when this one ends
        os._exit(EXIT_CODE)
