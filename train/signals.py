"""Signals that end a run in order."""

from __future__ import annotations

import signal


class StopSignal:
    """Notes SIGINT and SIGTERM instead of dying of them."""

    def __init__(self):
        self.received = False
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._note)

    def _note(self, _signum, _frame) -> None:
        self.received = True
