"""A watch that ends a process if its GPU waits for a rank that is gone or does something else.

Streams wait for peers' flags, and nothing wakes them: a host that waits for such a stream gets no
exception. So a thread watches the other ranks of the host. Once a rank has ended, given up, or made
another call than this one expects, work that was enqueued before has some seconds to finish without
it. If it does not, the process prints the rank and the call, and ends.
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

_EVERY = 1.0  # seconds between looks
_LONGEST = 30.0  # seconds that work may take without a lost rank, at most
_REMEMBERED = 1024  # calls
_EXIT_CODE = 1


class Event(Protocol):
    """A place in the current stream."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """Whether all work that was enqueued before it is done."""


class Watch:
    """A watch that lasts as long as it is referred to.

    find_obstacle  returns why work that has begun may wait forever, if so
    event          makes an event
    timeout        seconds that ranks wait for each other. Work may take half of that, and at most
                   30 s, beside an obstacle.
    """

    def __init__(
        self,
        find_obstacle: Callable[[], Exception | None],
        event: Callable[[], Event],
        timeout: float,
    ):
        self.find_obstacle, self.event = find_obstacle, event
        self.set_timeout(timeout)
        self.calls: deque[tuple[str, Event]] = deque(maxlen=_REMEMBERED)
        self.begun = ""  # the call that the host is enqueueing, if it ran ahead
        threading.Thread(
            target=_run, args=(weakref.ref(self),), name="bmt_burst watch", daemon=True
        ).start()

    def set_timeout(self, seconds: float) -> None:
        self.patience = min(_LONGEST, seconds / 2)

    def note_begun(self, doing: str) -> None:
        """Note that this rank has begun to enqueue a call before it has heard of the others."""
        self.begun = doing

    def note_enqueued(self, doing: str) -> None:
        """Note that this rank has enqueued everything it was `doing` on the current stream."""
        event = self.event()
        event.record()
        self.calls.append((doing, event))
        self.begun = ""

    def note_left(self) -> None:
        """Note that this rank has broken off the call that it was enqueueing."""
        self.begun = ""

    def find_stuck_call(self) -> str:
        """Return the first call that is not done, "" if all are."""
        while self.calls and self.calls[0][1].query():
            self.calls.popleft()
        return self.calls[0][0] if self.calls else self.begun


def _run(watch: weakref.ref[Watch]) -> None:
    # the call that is not done, and the time when it was first seen so beside an obstacle
    since, before = time.monotonic(), ""
    while alive := watch():
        obstacle, patience = alive.find_obstacle(), alive.patience
        # events must not be queried while others may be capturing a graph
        doing = alive.find_stuck_call() if obstacle else ""
        del alive
        if doing != before:
            since, before = time.monotonic(), doing
        if doing and time.monotonic() - since > patience:
            waits = f"the GPU of this process waits for it in {doing}, forever"
            print(f"bmt_burst: {obstacle}; {waits}", file=sys.stderr, flush=True)
            os._exit(_EXIT_CODE)
        time.sleep(_EVERY)
