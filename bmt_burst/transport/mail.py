"""Short messages between the ranks of a group: the base of all ways to carry them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class Mail(ABC):
    """The messages of rank `rank`. By default it learns nothing about the other ranks.

    broken  why this rank cannot go on with the others, once that is known
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.broken: RuntimeError | None = None

    @abstractmethod
    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in rank order."""

    def fail_if_broken(self) -> None:
        """Raise the error that made these messages unusable, if any."""
        if self.broken:
            raise type(self.broken)(f"{self.broken}; its group is unusable")

    def give_up(self, words: bytes, place: bytes = b"") -> RuntimeError | None:
        """Give up as Transport.give_up does. Ranks may go on only if all are at the same `place`
        in the call.
        """
        self.leave(words)
        return None

    def leave(self, words: bytes) -> None:
        """Make these messages unusable, for the reason `words`."""
        if not self.broken:
            self.broken = RuntimeError(
                f"rank {self.rank} of the group, this one, gave up {words.decode()}"
            )

    def find_lost_rank(self) -> RuntimeError | None:
        """Return the error of a rank that is known to take no further part, if any."""
        return None

    def find_obstacle(self) -> Exception | None:
        """Return why work that this rank has begun may wait forever for another rank, if so."""
        return self.find_lost_rank() or self.broken

    def set_timeout(self, seconds: float) -> None:  # noqa: B027 - the carrier has its own
        """Set how many seconds to wait for other ranks."""


class UnopenedMail(Mail):
    """Messages of a group that has not gathered any yet."""

    def gather(self, message: bytes) -> list[bytes]:
        raise AssertionError("a rank gathers messages before it knows how")


class RemoteMail(Mail):
    """Messages between hosts, which `carry` gathers."""

    def __init__(self, rank: int, carry: Callable[[bytes], list[bytes]]):
        super().__init__(rank)
        self._carry = carry

    def gather(self, message: bytes) -> list[bytes]:
        self.fail_if_broken()
        return self._carry(message)
