"""Routes: which tokens go to whom in each stage of a ring, and where in the receiver's memory they land.

A round's hops come in stages. The tokens of a stage that a rank looks at land one after the other, in the order of
their positions, so that what looks at them alike is one kernel call. Gradients of a stage go home the same way: at home they
land one sender's after the other. Both ends of a message compute its place from the same data, so a transport may write
it there without asking.

A rank knows what the ranks of its own host look at, and what each other host looks at of its own tokens; no more.
No tensors. Try `print(Routes(Tiling(Mask.causal(96), Layout.zigzag(96, 4)), Schedule(4), 1).stages())`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...span import Span, hull, length, merged, shifted
from ...tile import Tile
from ...tiling import Piece, Tiling
from .schedule import Schedule


class Outgoing(NamedTuple):
    """Tokens `span` of what the sender has, for place `peer` of its host, where `total` tokens land in all.

    They land from token `at` on.
    """

    peer: int
    span: Span
    at: int
    total: int


class Incoming(NamedTuple):
    """Tokens from place `peer` of the host that land at tokens `at`; they are tokens `span` of the receiver's root."""

    peer: int
    span: Span
    at: Span


@dataclass(frozen=True)
class Stage:
    """The blocks of one or more hops, as one rank sees them.

    sources     what comes in, and where it lands; spans count from the start of the stage's memory
    tokens      that land
    tiles       how the home tokens look at them
    sends       parts of this rank's root that others look at; spans count from the start of what is there of it
    returns     gradients of the stage's tokens, for the ranks they came from
    homecoming  gradients of the root from those who looked at it
    """

    hops: tuple[int, ...]
    sources: tuple[tuple[int, Span], ...]
    tokens: int
    tiles: tuple[Tile, ...]
    sends: tuple[Outgoing, ...]
    returns: tuple[Outgoing, ...]
    homecoming: tuple[Incoming, ...]

    @property
    def home_tokens(self) -> int:
        return self.homecoming[-1].at[1] if self.homecoming else 0


@dataclass(frozen=True)
class Round:
    """What a rank does with the blocks of one host.

    root     owner of the block that the rank opens the round with; in round 0 itself
    held     the tokens of the root that are there: rising spans of its shard, one after the other
    tiles    how the home tokens look at those; in round 0 none, the own block comes first
    stages   of the other blocks, of which there are parts that anybody on this host looks at
    lent     own tokens that ranks of another host look at in this round
    lent_to  that host
    """

    root: int
    held: tuple[Span, ...]
    tiles: tuple[Tile, ...]
    stages: tuple[Stage, ...]
    lent: tuple[Span, ...] = ()
    lent_to: int = 0

    @property
    def held_tokens(self) -> int:
        return sum(map(length, self.held))

    @property
    def lent_tokens(self) -> int:
        return sum(map(length, self.lent))


class Routes:
    """The routes of `rank` under a tiling, whose queries stay here and whose keys travel."""

    def __init__(self, tiling: Tiling, schedule: Schedule, rank: int):
        self.tiling, self.schedule, self.rank = tiling, schedule, rank
        self.host, self.place = divmod(rank, schedule.inner)
        self._seen: list[dict[int, list[Piece]]] = []  # of each place of this host: what it looks at, by host
        for viewer in schedule.ranks(self.host):
            pieces: dict[int, list[Piece]] = {}
            for piece in tiling.seen(viewer):
                pieces.setdefault(piece.owner // schedule.inner, []).append(piece)
            self._seen.append(pieces)

    def traffic(self) -> bool:
        """Whether anything goes to or from any rank of this host."""
        return any(self._seen) or any(self._lent(host) for host in range(self.schedule.outer) if host != self.host)

    def landing_tokens(self, hops: Sequence[int]) -> int:
        """The most tokens that land on a rank of this host at once if these hops of a round are one stage."""
        totals = [
            sum(map(length, (p.span for p in self._landing(viewer, root_host, hops))))
            for viewer, root_host in itertools.product(range(self.schedule.inner), self._hosts())
        ]
        return max(totals, default=0)

    def rounds(self, limit: int | None = None, return_limit: int | None = None) -> tuple[Round, ...]:
        """All rounds. A stage has as many hops as let at most `limit` tokens land, and `return_limit` come home.

        Without a return limit no gradients come back. With one the last stage, of which they come back with nothing
        left to compute meanwhile, is not the longest; else the first, which has but the own block's time to arrive.
        """
        found = []
        for number in range(self.schedule.outer):
            host = self.schedule.host_of_round(self.host, number)
            hops = [hop for hop in range(1, self.schedule.inner) if self._sizes(host, [hop])[0]]
            stages = tuple(self._stage(host, number, part) for part in self._cut(host, hops, limit, return_limit))
            found.append(self._round(number, host, stages))
        return tuple(found)

    def _hosts(self) -> set[int]:
        return {host for pieces in self._seen for host in pieces}

    def _lent(self, host: int) -> tuple[Span, ...]:
        return self.tiling.seen_of(self.rank, self.schedule.ranks(host))

    def _round(self, number: int, host: int, stages: tuple[Stage, ...]) -> Round:
        if not number:
            return self._own_round(stages)
        root = self.schedule.block(self.rank, number, 0)
        held = self._held(root, host)
        pieces = [p for p in self._seen[self.place].get(host, ()) if p.owner == root]
        tiles = self.tiling.tiles(self.rank, pieces, [_within(held, p.span) for p in pieces])
        lent_to = self.schedule.host_of_round(self.host, -number)
        return Round(root, held, tuple(tiles), stages, self._lent(lent_to), lent_to)

    def _own_round(self, stages: Sequence[Stage]) -> Round:
        """The round of this host: of the own block is there what others look at, and what is between that."""
        held = (hull(send.span for stage in stages for send in stage.sends),)

        def counted(entry):
            return entry._replace(span=_within(held, entry.span))

        stages = [
            replace(s, sends=tuple(map(counted, s.sends)), homecoming=tuple(map(counted, s.homecoming))) for s in stages
        ]
        return Round(self.rank, held, (), tuple(stages))

    def _held(self, root: int, host: int) -> tuple[Span, ...]:
        """What this host has of the block of `root`: all that its ranks look at."""
        return merged(p.span for pieces in self._seen for p in pieces.get(host, ()) if p.owner == root)

    def _landing(self, viewer: int, host: int, hops: Sequence[int]) -> list[Piece]:
        """What lands at place `viewer` in the stage of some hops, in the order of positions."""
        inner = self.schedule.inner
        return [p for p in self._seen[viewer].get(host, ()) if (viewer - p.owner) % inner in hops]

    def _sizes(self, host: int, hops: Sequence[int]) -> tuple[int, int]:
        """The most tokens that land on a rank of this host, and that come home to one, in the stage of some hops."""
        inner = self.schedule.inner
        landing, home = [0] * inner, [0] * inner
        for viewer in range(inner):
            for piece in self._landing(viewer, host, hops):
                landing[viewer] += length(piece.span)
                home[piece.owner % inner] += length(piece.span)
        return max(landing), max(home)

    def _cut(self, host: int, hops: Sequence[int], limit: int | None, return_limit: int | None) -> list[Sequence[int]]:
        """The hops in as few stages as the limits allow, nearly equal ones."""

        def fits(part: Sequence[int]) -> bool:
            landing, home = self._sizes(host, part)
            return len(part) == 1 or (landing <= (limit or landing) and home <= (return_limit or home))

        for count in range(1, len(hops) + 1):
            up = count - 1 if return_limit else 0
            bounds = [(len(hops) * i + up) // count for i in range(count + 1)]
            parts = [hops[a:b] for a, b in itertools.pairwise(bounds)]
            if all(map(fits, parts)):
                return parts
        return []

    def _stage(self, host: int, number: int, hops: Sequence[int]) -> Stage:
        inner, root = self.schedule.inner, self.schedule.block(self.rank, number, 0)
        pieces = self._landing(self.place, host, hops)
        places = _in_a_row(pieces)
        held = self._held(root, host) if number else ()
        sends = []
        for hop in hops:
            viewer = (self.place + hop) % inner
            there = self._landing(viewer, host, hops)
            row = _in_a_row(there)
            for piece, at in zip(there, row, strict=True):
                if piece.owner == root:
                    sends.append(Outgoing(viewer, _within(held, piece.span), at[0], row[-1][1]))
        returns = []
        for hop in hops:
            peer = (self.place - hop) % inner
            entries = self._homecoming(peer, host, hops)
            mine = [at for owner_peer, _, at in entries if owner_peer == self.place]
            own = [at for piece, at in zip(pieces, places, strict=True) if piece.owner % inner == peer]
            returns += [Outgoing(peer, at, there[0], entries[-1][2][1]) for at, there in zip(own, mine, strict=True)]
        homecoming = [Incoming(p, _within(held, s), at) for p, s, at in self._homecoming(self.place, host, hops)]
        return Stage(
            tuple(hops),
            tuple((piece.owner % inner, at) for piece, at in zip(pieces, places, strict=True)),
            places[-1][1] if places else 0,
            tuple(self.tiling.tiles(self.rank, pieces, places)),
            tuple(sends),
            tuple(returns),
            tuple(homecoming),
        )

    def _homecoming(self, place: int, host: int, hops: Sequence[int]) -> list[tuple[int, Span, Span]]:
        """(place of the sender, tokens of the shard, where they land) of the gradients of the root at `place`."""
        inner, found, at = self.schedule.inner, [], 0
        for hop in hops:
            viewer = (place + hop) % inner
            for piece in self._landing(viewer, host, hops):
                if piece.owner % inner == place:
                    found.append((viewer, piece.span, (at, at + length(piece.span))))
                    at += length(piece.span)
        return found


def _in_a_row(pieces: Sequence[Piece]) -> list[Span]:
    """Where pieces lie one after the other."""
    ends = list(itertools.accumulate(length(piece.span) for piece in pieces))
    return list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


def _within(held: Sequence[Span], span: Span) -> Span:
    """Tokens of a shard, counted where only those of rising spans are there; all of them where `held` is empty."""
    before = 0
    for start, stop in held:
        if start <= span[0] and span[1] <= stop:
            return shifted(span, before - start)
        before += stop - start
    assert not held, f"{span} is not within {held}"
    return span
