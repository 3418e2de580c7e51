"""The schedule: the block that a rank attends to at each hop, and the rank that sends it.

Ranks form a grid of `outer` hosts with `inner` ranks each: rank = host * inner + place. With outer
= 1 this is the single ring. Otherwise it is the double ring. In round n, each rank begins with the
block of the rank at its own place on the n-th host after it, its *root*. That rank sent the root
directly while the previous round was computed. At hop h a rank attends to the root of the place h
before it, and sends its own root to the place h after it.

No rank forwards a block. So no hop waits for another, several hops can be one exchange, and only
tokens that the receiver needs are sent. Results take the same way back: first to the rank that
began the round with the block, which adds up its host's share, then to the block's owner. So one
partial sum per round and block crosses between hosts.

Try `print(Schedule(inner=3, outer=2))`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A ring of `inner` ranks in each of `outer` hosts. Raises ValueError if either is below 1."""

    inner: int
    outer: int = 1

    def __post_init__(self) -> None:
        if self.inner < 1 or self.outer < 1:
            raise ValueError(
                f"expected inner and outer of at least 1, got {self.inner} and {self.outer}"
            )

    @property
    def size(self) -> int:
        return self.inner * self.outer

    def ranks(self, host: int) -> range:
        """Return the ranks of a host."""
        return range(host * self.inner, (host + 1) * self.inner)

    def host_of_round(self, host: int, round_: int) -> int:
        """Return the host with the blocks that the ranks of `host` attend to in a round."""
        return (host + round_) % self.outer

    def block(self, rank: int, round_: int, hop: int) -> int:
        """Return the owner of the block of a hop. Raises ValueError for a rank out of range."""
        if not 0 <= rank < self.size:
            raise ValueError(f"expected a rank from 0 to {self.size - 1}, got {rank}")
        host, place = divmod(rank, self.inner)
        return self.host_of_round(host, round_) * self.inner + (place - hop) % self.inner

    def __str__(self) -> str:
        columns = "columns: hops, round by round; entries: owner of the block"
        lines = [f"{self.outer} x {self.inner} ranks; {columns}"]
        for rank in range(self.size):
            blocks = [
                self.block(rank, n, hop) for n in range(self.outer) for hop in range(self.inner)
            ]
            lines.append(f"rank {rank:>3}: " + " ".join(f"{block:>3}" for block in blocks))
        return "\n".join(lines)
