"""Routes: which tokens go to whom in each stage of a ring, and where in the receiver's memory they
land.

A round's hops come in stages. The tokens of a stage that a rank looks at land one after the other,
in the order of their positions, so that what looks at them alike is one kernel call. Gradients of a
stage go home the same way: at home they land one sender's after the other. Both ends of a message
compute its place from the same data, so a transport may write it there without asking.

A rank knows what the ranks of its own host look at, and what each other host looks at of its own
tokens; no more. No tensors. Try
`print(Routes(Tiling(Mask.causal(96), Layout.zigzag(96, 4)), Schedule(4), 1).rounds())`.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...sequence.span import Span, hull, in_turn, length, merged
from ...sequence.tiling import Fields, Tiling
from .schedule import Schedule


class Outgoing(NamedTuple):
    """Tokens `span` of what the sender has, for place `peer` of its host, where `total` tokens land
    in all.

    They land from token `at` on.
    """

    peer: int
    span: Span
    at: int
    total: int


class Incoming(NamedTuple):
    """Tokens from place `peer` of the host that land at tokens `at`; they are tokens `span` of the
    receiver's root.
    """

    peer: int
    span: Span
    at: Span


class Landing(NamedTuple):
    """Tokens of another rank, the place of the host they come from, and where they lie one after
    the other.
    """

    piece: Fields
    peer: int
    at: Span


@dataclass(frozen=True)
class Stage:
    """The blocks of one or more hops, as one rank sees them.

    landings    what comes in, in the order of positions, and where it lands in the stage's memory
    tokens      that land
    sends       parts of this rank's root that others look at; spans count from the start of what is
                there of it
    returns     gradients of the stage's tokens, for the ranks they came from
    homecoming  gradients of the root from those who looked at it
    """

    hops: tuple[int, ...]
    landings: tuple[Landing, ...]
    tokens: int
    sends: tuple[Outgoing, ...]
    returns: tuple[Outgoing, ...]
    homecoming: tuple[Incoming, ...]

    @property
    def sources(self) -> list[tuple[int, Span]]:
        """From which place of the host the tokens of which part come."""
        return [(landing.peer, landing.at) for landing in self.landings]

    @property
    def home_tokens(self) -> int:
        return self.homecoming[-1].at[1] if self.homecoming else 0


@dataclass(frozen=True)
class Round:
    """What a rank does with the blocks of one host.

    root     owner of the block that the rank opens the round with; in round 0 itself
    held     the tokens of the root that are there: rising spans of its shard, one after the other
    landings what this rank looks at of those, and where it lies; in round 0 nothing, the own block
    comes first
    stages   of the other blocks, of which there are parts that anybody on this host looks at
    lent     own tokens that ranks of another host look at in this round
    lent_to  that host
    """

    root: int
    held: tuple[Span, ...]
    landings: tuple[Landing, ...]
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
        viewers = enumerate(schedule.ranks(self.host))
        self._stages: dict[tuple[int, tuple[int, ...]], Stage] = {}
        self.sights = [
            _Sight(tiling.seen_fields(viewer), place, schedule.inner) for place, viewer in viewers
        ]

    def traffic(self) -> bool:
        """Whether this rank has a part in what travels: to any rank of its host, or from it to
        another host.
        """
        return any(sight.pieces for sight in self.sights) or bool(self._lent)

    def landing_tokens(self, hops: Sequence[int]) -> int:
        """The most tokens that land on a rank of this host at once if these hops of a round are one
        stage.
        """
        return max((self._sizes(host, hops)[0] for host in self._hosts), default=0)

    def rounds(
        self, limit: int | None = None, return_limit: int | None = None
    ) -> tuple[Round, ...]:
        """All rounds, also those in which nothing comes or goes: hosts count them alike.

        A stage has as many hops as let at most `limit` tokens land, and `return_limit` come home.
        Without a return limit no gradients come back. With one the last stage, of which they come
        back with nothing left to compute meanwhile, is not the longest; else the first, which has
        but the own block's time to arrive.
        """
        return tuple(
            self._round(number, limit, return_limit) for number in range(self.schedule.outer)
        )

    @functools.cached_property
    def _hosts(self) -> set[int]:
        """Those that ranks of this host look at tokens of."""
        return {host for sight in self.sights for host in sight.pieces}

    @functools.cached_property
    def _lent(self) -> dict[int, tuple[Span, ...]]:
        """By host, the own tokens that its ranks look at; for other hosts that do."""
        if self.schedule.outer == 1:
            return {}
        found = self.tiling.seen_by(self.rank, self.schedule.inner)
        found.pop(self.host, None)
        return found

    def _round(self, number: int, limit: int | None, return_limit: int | None) -> Round:
        host = self.schedule.host_of_round(self.host, number)
        held = _Held(self._held(host) if number else [hull(self._held(host))])
        looked_at = {hop for sight in self.sights for hop in sight.pieces.get(host, ())} - {0}
        hops = self._cut(host, sorted(looked_at), limit, return_limit)
        stages = tuple(self._known_stage(host, held, tuple(part)) for part in hops)
        if not number:  # of the own block is there what others look at, and what is between that
            return Round(self.rank, held.spans, (), stages)
        root = self.schedule.block(self.rank, number, 0)
        pieces = self.sights[self.place].of(host, 0)
        landings = tuple(Landing(piece, self.place, held.place(piece[3])) for piece in pieces)
        lent_to = self.schedule.host_of_round(self.host, -number)
        return Round(root, held.spans, landings, stages, self._lent.get(lent_to, ()), lent_to)

    def _held(self, host: int) -> tuple[Span, ...]:
        """What any rank of this host looks at of the root of the round with `host`."""
        inner = self.schedule.inner
        sights = enumerate(self.sights)
        return merged(
            span for viewer, s in sights for *_, span in s.of(host, (viewer - self.place) % inner)
        )

    def _sizes(self, host: int, hops: Sequence[int]) -> tuple[int, int]:
        """The most tokens that land on a rank of this host, and that come home to one, in the stage
        of some hops.
        """
        inner = self.schedule.inner
        landing, home = [0] * inner, [0] * inner
        for viewer, sight in enumerate(self.sights):
            if tokens := sight.counts.get(host):
                for hop in hops:
                    landing[viewer] += tokens[hop]
                    home[(viewer - hop) % inner] += tokens[hop]
        return max(landing), max(home)

    def _cut(
        self, host: int, hops: Sequence[int], limit: int | None, return_limit: int | None
    ) -> list[Sequence[int]]:
        """The hops in as few stages as the limits allow, nearly equal ones."""

        def fits(part: Sequence[int]) -> bool:
            landing, home = self._sizes(host, part)
            return len(part) == 1 or (
                landing <= (limit or landing) and home <= (return_limit or home)
            )

        for count in range(1, len(hops) + 1):
            up = count - 1 if return_limit else 0
            bounds = [(len(hops) * i + up) // count for i in range(count + 1)]
            parts = [hops[a:b] for a, b in itertools.pairwise(bounds)]
            if all(map(fits, parts)):
                return parts
        return []

    def _known_stage(self, host: int, held: _Held, hops: tuple[int, ...]) -> Stage:
        """Return a stage, which is made once: a backward often has those of its forward."""
        if (host, hops) not in self._stages:
            self._stages[host, hops] = self._stage(host, held, hops)
        return self._stages[host, hops]

    def _stage(self, host: int, held: _Held, hops: tuple[int, ...]) -> Stage:
        pieces = self.sights[self.place].landing(host, hops)
        peers = (owner % self.schedule.inner for _, _, owner, _ in pieces)
        landings = tuple(
            map(Landing, pieces, peers, (at for _, at in in_turn(span for *_, span in pieces)))
        )
        return Stage(
            hops=hops,
            landings=landings,
            tokens=landings[-1].at[1] if landings else 0,
            sends=tuple(self._sends(host, held, hops)),
            returns=tuple(self._returns(host, hops, landings)),
            homecoming=tuple(self._homecoming(host, held, hops)),
        )

    def _sends(self, host: int, held: _Held, hops: Sequence[int]) -> Iterator[Outgoing]:
        root = host * self.schedule.inner + self.place
        for hop in hops:
            viewer = (self.place + hop) % self.schedule.inner
            sight = self.sights[viewer]
            if not sight.tokens(host, hop):
                continue
            at, total = 0, sum(sight.tokens(host, h) for h in hops)
            for _, _, owner, span in sight.landing(host, hops):
                if owner == root:
                    yield Outgoing(viewer, held.place(span), at, total)
                at += span[1] - span[0]

    def _returns(
        self, host: int, hops: Sequence[int], landings: Sequence[Landing]
    ) -> Iterator[Outgoing]:
        """What landed goes back; with each peer lies first what comes home from nearer places."""
        inner = self.schedule.inner
        of_peer: dict[int, list[Span]] = {}
        for landing in landings:
            of_peer.setdefault(landing.peer, []).append(landing.at)
        for hop in hops:
            peer = (self.place - hop) % inner
            sizes = [self.sights[(peer + h) % inner].tokens(host, h) for h in hops]
            at, total = (
                sum(size for h, size in zip(hops, sizes, strict=True) if h < hop),
                sum(sizes),
            )
            for span in of_peer.get(peer, ()):
                yield Outgoing(peer, span, at, total)
                at += length(span)

    def _homecoming(self, host: int, held: _Held, hops: Sequence[int]) -> Iterator[Incoming]:
        at = 0
        for hop in hops:
            viewer = (self.place + hop) % self.schedule.inner
            for *_, span in self.sights[viewer].of(host, hop):
                yield Incoming(viewer, held.place(span), (at, at := at + length(span)))


class _Sight:
    """What a place of this host looks at, by the host it is of and by hop, and how many tokens."""

    def __init__(self, seen: Sequence[Fields], place: int, inner: int):
        self.pieces: dict[int, dict[int, list[Fields]]] = {}
        self.counts: dict[int, list[int]] = {}
        of_owner: dict[int, list[Fields]] = {}
        for fields in seen:
            of_owner.setdefault(fields[2], []).append(fields)
        for rank, pieces in of_owner.items():
            host, owner = divmod(rank, inner)
            hop = (place - owner) % inner
            self.pieces.setdefault(host, {})[hop] = pieces
            self.counts.setdefault(host, [0] * inner)[hop] = sum(
                [stop - start for _, _, _, (start, stop) in pieces]
            )

    def of(self, host: int, hop: int) -> Sequence[Fields]:
        return self.pieces[host].get(hop, ()) if host in self.pieces else ()

    def tokens(self, host: int, hop: int) -> int:
        return self.counts[host][hop] if host in self.counts else 0

    def landing(self, host: int, hops: Sequence[int]) -> list[Fields]:
        """What lands in the stage of some hops, in the order of positions."""
        return sorted(fields for hop in hops for fields in self.of(host, hop))


class _Held:
    """Rising spans of a shard that are there, one after the other."""

    def __init__(self, spans: Sequence[Span]):
        self.spans = tuple(spans)
        self._starts = [start for start, _ in spans]
        self._places = [at for _, (at, _) in in_turn(spans)]

    def place(self, span: Span) -> Span:
        """Where tokens `span` of the shard, which are within one of the spans, are there."""
        index = bisect.bisect_right(self._starts, span[0]) - 1
        start, stop = self.spans[index]
        assert start <= span[0] and span[1] <= stop, f"{span} is not within {self.spans}"
        by = self._places[index] - start
        return span[0] + by, span[1] + by
