"""A watch that ends a process if its GPU waits for a rank that is gone or has failed.

Nothing wakes a stream that waits for a peer's flag, nor a host that waits for such a stream. So a
thread watches the other ranks. Once a rank sends no more messages, enqueued work has some seconds
to finish without it. Otherwise the process says so and ends.

Copy engines need it, and graphs that a Decoder replays. Over NCCL, torch's own watchdog ends a
process whose exchange takes longer than the group's timeout, unless a graph makes the exchange.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref

import torch

from ..base.streams import is_capturing
from .sockets import SocketMessenger

_EVERY = 1.0  # seconds between checks
_LONGEST = 30.0  # seconds that work may take without a lost rank, or half of the group's timeout


class Watch:
    """A watch that lasts as long as it is referred to."""

    def __init__(self, messenger: SocketMessenger):
        self.messenger = messenger
        self.doing = ""  # the last call
        self.event: torch.cuda.Event | None = None  # after all its work, once that is enqueued
        threading.Thread(
            target=_run, args=(weakref.ref(self),), name="bmt_burst watch", daemon=True
        ).start()

    def begin_call(self, doing: str) -> None:
        """Note that this rank begins to enqueue work. Its host may wait for its GPU meanwhile."""
        self.doing, self.event = doing, None

    def end_call(self, is_enqueued: bool) -> None:
        """Note that this rank has enqueued all of it on the current stream, or has failed."""
        if is_enqueued and not is_capturing():  # the capture of a graph enqueues nothing
            event = torch.cuda.Event()
            event.record()
            self.event = event
        else:
            self.doing = ""


def _run(watch: weakref.ref[Watch]) -> None:
    since = time.monotonic()  # when the last call was not yet seen to wait for a lost rank
    while alive := watch():
        lost, doing, event = alive.messenger.find_lost_rank(), alive.doing, alive.event
        patience = min(_LONGEST, alive.messenger.timeout / 2)
        # Events must not be queried while others may be capturing a graph: only if a rank is lost.
        if not lost or not doing or (event and event.query()):
            since = time.monotonic()
        del alive
        if time.monotonic() - since > patience:
            waits = f"the GPU of this process waits for it in {doing}, forever"
            print(f"bmt_burst: {lost}; {waits}", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(_EVERY)
