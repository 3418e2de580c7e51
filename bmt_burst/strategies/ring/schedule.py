"""The schedule: whose block a rank attends to in which step, and what moves over which ring meanwhile.

Ranks lie on a grid of `outer` hosts with `inner` ranks each; rank = host * inner + place. With outer = 1 this is
the single ring. With more, it is the double ring: in each of `outer` rounds the blocks with which the ranks of a host
open the round go round the inner ring, while the blocks of the next round come in from the host after, an exchange
that has the whole round to finish. Blocks go to earlier hosts first, which under a causal mask look at all of them;
those that they come to at last look at a part, and only that goes on.

At hop h a block goes straight from the rank that opened the round with it to the place h further on. Nothing is
forwarded, so no hop waits for another, several hops may be one exchange, and only what the receiver will look at is
sent. Gradients go the same way back: to the rank that opened the round with the block (`inner_return`), which adds up
its host's share and at the end of the round sends it to the owner (`outer_return`): one partial sum crosses between
hosts per round and block.

A schedule is data. Try `print(Schedule(inner=3, outer=2))`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Edge:
    """One exchange: what goes out to `send_to` and what comes in from `recv_from`, ranks of the edge's own ring."""

    send_to: int
    recv_from: int


@dataclass(frozen=True)
class Step:
    """One step of one rank.

    block         owner (a rank of the whole grid) of the block that is attended to
    root          owner of the block with which this rank opened the round
    inner         before this step: `root`'s block goes to the place `hop` further on, `block` comes in; None at hop 0
    outer         set in the first step of a round and runs under all of it: `root`'s block goes to the host before, the
                  next round's comes in
    inner_return  after this step: gradients of `block` go to the place that opened the round with it, gradients of
                  `root` come in; None at hop 0
    outer_return  after a round's last step: gradients of `root` go to its owner, gradients of the own block come in
    """

    block: int
    root: int
    inner: Edge | None = None
    outer: Edge | None = None
    inner_return: Edge | None = None
    outer_return: Edge | None = None


@dataclass(frozen=True)
class Schedule:
    """A ring of `inner` ranks in each of `outer` hosts. Raises ValueError where either is below 1."""

    inner: int
    outer: int = 1

    def __post_init__(self):
        if self.inner < 1 or self.outer < 1:
            raise ValueError(f"a schedule needs positive sizes, got inner={self.inner}, outer={self.outer}")

    @property
    def size(self) -> int:
        return self.inner * self.outer

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - small, frozen and hashable
    def steps(self, rank: int) -> tuple[Step, ...]:
        """All steps of `rank`, in order, its own block first. Raises ValueError for a rank out of range."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a schedule of {self.size} ranks")
        host, place = divmod(rank, self.inner)
        return tuple(self._step(host, place, round_, hop) for round_ in range(self.outer) for hop in range(self.inner))

    def _step(self, host: int, place: int, round_: int, hop: int) -> Step:
        source = (host + round_) % self.outer
        first, last = hop == 0, hop == self.inner - 1
        return Step(
            block=source * self.inner + (place - hop) % self.inner,
            root=source * self.inner + place,
            inner=None if first else _edge(place, hop, self.inner),
            outer=_edge(host, -1, self.outer) if first and round_ < self.outer - 1 else None,
            inner_return=None if first else _edge(place, -hop, self.inner),
            outer_return=_edge(host, round_, self.outer) if last and round_ else None,
        )

    def __str__(self) -> str:
        lines = [f"{self.outer} x {self.inner} ranks; columns are steps, entries the block attended to"]
        for rank in range(self.size):
            marks = [f"{s.block}{'*' if s.outer else ''}" for s in self.steps(rank)]
            lines.append(f"rank {rank:>3}: " + " ".join(f"{m:>4}" for m in marks))
        return "\n".join([*lines, "* the outer exchange starts here"])


def _edge(rank: int, distance: int, size: int) -> Edge:
    return Edge(send_to=(rank + distance) % size, recv_from=(rank - distance) % size)
