"""Messengers: they carry short messages between the hosts of a group's ranks.

Transports never let the host wait. What ranks agree on is different: the host needs all ranks'
lines before it goes on, and must learn if one is missing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, Self

from ..errors import RankLate

# Seconds to wait for a rank that does not make a call, over a group without a timeout of its own.
# init_sequence_parallel takes another number.
DEFAULT_TIMEOUT: Final = 120.0
# The longest message of a rank. Ranks send before they receive, so hosts must have buffers for it.
MESSAGE_BYTES: Final = 4096


class Messenger:
    """One rank's end of the messages of a group. By default the rank is alone.

    timeout    seconds that this rank waits for other ranks
    in_use     held by the thread that makes a call
    contested  whether another thread made a call at the same time
    unusable   why this rank cannot go on in the group, if so
    """

    timeout: float = DEFAULT_TIMEOUT
    in_use: threading.RLock
    contested: bool = False
    unusable: RuntimeError | None = None

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        messenger = super().__new__(cls)
        messenger.in_use = threading.RLock()
        return messenger

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in rank order. The host waits for them.

        Raises RankFailed, RankGone or RankLate if a rank does not send its message: then the group
        is unusable, and later calls raise.
        """
        if self.unusable:
            raise type(self.unusable)(f"{self.unusable}; its group is unusable")
        return self._gather(message)

    def _gather(self, message: bytes) -> list[bytes]:
        """Gather messages in a group that is usable."""
        return [message]

    def fail(self, reason: str, place: int) -> RuntimeError | None:
        """Report that this rank failed in the middle of a call. Return the error of another rank
        that failed or ended before, if there is one.

        If all ranks fail within some seconds, at the same `place` of the call, they may go on
        together. Otherwise the group is unusable.
        """
        return None

    def close(self, reason: str) -> None:
        """Report that this rank sends no more messages. The group is unusable."""
        self.unusable = self.unusable or RuntimeError(f"this rank of the group failed: {reason}")


def make_late_error(peers: Sequence[int], seconds: float) -> RankLate:
    """Return the error of a rank that waited `seconds` for `peers` in vain."""
    ranks = f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"
    return RankLate(f"{ranks} of the group did not make this call within {seconds:g} s")
