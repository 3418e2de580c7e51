"""The schedule: whose block a rank attends to at which hop, and where that comes from.

Ranks lie on a grid of `outer` hosts with `inner` ranks each; rank = host * inner + place. With
outer = 1 this is the single ring. With more, it is the double ring: in round n every rank of a host
opens with the block of the rank at its own place on the n-th host after, its *root*, which came
straight from there while the round before was computed. At hop h a rank attends to the root of the
place h before it, and its own root goes to the place h after it. Nothing is forwarded, so no hop
waits for another, several hops may be one exchange, and only what the receiver looks at is sent.
Gradients go the same way back: to the rank that opened the round with the block, which adds up its
host's share, and from there to the block's owner: one partial sum crosses between hosts per round
and block.

Try `print(Schedule(inner=3, outer=2))`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A ring of `inner` ranks in each of `outer` hosts. Raises ValueError where either is below 1."""

    inner: int
    outer: int = 1

    def __post_init__(self) -> None:
        if self.inner < 1 or self.outer < 1:
            raise ValueError(
                f"a schedule needs positive sizes, got inner={self.inner}, outer={self.outer}"
            )

    @property
    def size(self) -> int:
        return self.inner * self.outer

    def ranks(self, host: int) -> range:
        """The ranks of a host."""
        return range(host * self.inner, (host + 1) * self.inner)

    def host_of_round(self, host: int, round_: int) -> int:
        """The host whose blocks the ranks of `host` attend to in a round."""
        return (host + round_) % self.outer

    def block(self, rank: int, round_: int, hop: int) -> int:
        """The rank whose block `rank` attends to. Raises ValueError for a rank out of range."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a schedule of {self.size} ranks")
        host, place = divmod(rank, self.inner)
        return self.host_of_round(host, round_) * self.inner + (place - hop) % self.inner

    def __str__(self) -> str:
        lines = [
            f"{self.outer} x {self.inner} ranks; columns are hops, round by round, entries the block attended to"
        ]
        for rank in range(self.size):
            blocks = [
                self.block(rank, n, hop) for n in range(self.outer) for hop in range(self.inner)
            ]
            lines.append(f"rank {rank:>3}: " + " ".join(f"{block:>3}" for block in blocks))
        return "\n".join(lines)
