"""Ends a process whose GPU waits for a rank that will never come.

Streams wait for peers' flags, and nothing wakes them: no exception reaches a host that waits for
such a stream. So a thread looks after the other ranks of the host. Once one has ended or given up,
what was enqueued before has some time to get done without it; if it does not, the process says
which rank and which call it was, and ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

from bmt_burst import transport

_EVERY = 1.0  # seconds between looks
_REMEMBERED = 1024  # calls
_EXIT_CODE = 1


class Event(Protocol):
    """A place in the current stream."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """Whether all that was enqueued before it is done."""


class Watch:
    """Watches for as long as it is referred to.

    find_lost_rank  returns the error of a rank that takes no further part, None if all do
    event           makes an event
    """

    def __init__(
        self, find_lost_rank: Callable[[], RuntimeError | None], event: Callable[[], Event]
    ):
        self.find_lost_rank, self.event = find_lost_rank, event
        self.calls: deque[tuple[str, Event]] = deque(maxlen=_REMEMBERED)
        threading.Thread(
            target=_run, args=(weakref.ref(self),), name="bmt_burst watch", daemon=True
        ).start()

    def note_enqueued(self, doing: str) -> None:
        """Says that all of what this rank was `doing` has been enqueued on the current stream."""
        event = self.event()
        event.record()
        self.calls.append((doing, event))

    def find_stuck_call(self) -> str | None:
        """The first call that is not done, or None."""
        while self.calls and self.calls[0][1].query():
            self.calls.popleft()
        return self.calls[0][0] if self.calls else None


def _run(watch: weakref.ref[Watch]) -> None:
    # when the call that is not done was first found so beside a lost rank
    since, before = time.monotonic(), None
    while alive := watch():
        lost = alive.find_lost_rank()
        # events are not to be asked while others may be capturing
        doing = alive.find_stuck_call() if lost else None
        del alive
        if doing != before:
            since, before = time.monotonic(), doing
        if doing and time.monotonic() - since > min(30.0, transport.AGREEMENT_TIMEOUT / 2):
            message = (
                f"bmt_burst: {lost}; the GPU of this process waits for it in {doing}, for ever"
            )
            print(message, file=sys.stderr, flush=True)
            os._exit(_EXIT_CODE)
        time.sleep(_EVERY)
