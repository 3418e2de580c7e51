"""Routes: which tokens a rank sends to which other rank in a stage of a ring, and where they land.

Ranks form a grid of `outer` hosts with `inner` ranks each: rank = host * inner + place. In round n,
each rank begins with the block of the rank at its own place on the n-th host after it, its *root*.
That rank sent the root directly while the previous round was computed. At hop h, a rank sends its
own root to the place h after it, and attends to the root of the place h before it. With outer = 1,
this is the single ring, and a root is a rank's own block.

No rank forwards a block, so several hops can be one stage. Results take the same way back: first to
the rank that began the round with the block, which adds up its host's share, then to its owner.

The tokens of a stage that a rank needs land one after the other, in the order of their positions,
so that tiles that are cut in the same way are one kernel call. Results land by sender. Both ends of
a message compute its place from the same data. A rank knows only what the ranks of its host need,
and which of its tokens each other host needs. Try
`print(Routes(Tiling(Mask.causal(96), Layout.zigzag(96, 4)), 4, 1, 1).rounds())`.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...sequence.layout import RunFields
from ...sequence.span import Span, hull, in_turn, length, merged, shifted
from ...sequence.tiling import Tiling


class Outgoing(NamedTuple):
    """Tokens `span` of what the sender has, which land from token `at` on at place `peer`.

    `total` tokens land there in the stage.
    """

    peer: int
    span: Span
    at: int
    total: int


class Landing(NamedTuple):
    """Memory for `tokens` tokens of other ranks, the runs in it that this rank needs, in the order
    of positions, and where each run lies.
    """

    runs: Sequence[RunFields]
    places: Sequence[Span]
    tokens: int

    def positions(self) -> Tensor:
        """Return the positions (tokens,) of what lies in memory, 0 for tokens not needed."""
        positions = torch.zeros(self.tokens, dtype=torch.int64)
        for (start, step, _, span), at in zip(self.runs, self.places, strict=True):
            positions[slice(*at)] = torch.arange(start, start + step * length(span), step)
        return positions


class Stage:
    """The blocks of one or more hops, as one rank sees them.

    landing           what this rank receives, `tokens` tokens; it needs all of it
    sources           the place that sends each part of the landing, and where the part lies
    sends             parts of this rank's root that others need; spans count the tokens that this
                      rank has of the root
    returns           results of what landed, for the ranks that sent it
    returned_tokens   how many tokens results return to
    return_sources    the place that returns each part of the results, and where it lies, as `sends`
    """

    def __init__(self, seen: SeenRuns, hops: tuple[int, ...]):
        self._seen, self.hops, self._inner, self._place = seen, hops, seen.inner, seen.place
        self._landing, self._returning = seen.sizes(hops)  # by place
        self.tokens = self._landing[self._place]
        self.returned_tokens = self._returning[self._place]
        runs = seen.own_runs(hops)
        places = [at for _, at in in_turn(span for *_, span in runs)]
        self.landing = Landing(runs, places, self.tokens)

    @functools.cached_property
    def sources(self) -> list[tuple[int, Span]]:
        runs, places, _ = self.landing
        return [(run[2] % self._inner, at) for run, at in zip(runs, places, strict=True)]

    @functools.cached_property
    def return_sources(self) -> list[tuple[int, Span]]:
        places = in_turn(out.span for out in self.sends)
        return [(out.peer, at) for out, (_, at) in zip(self.sends, places, strict=True)]

    @functools.cached_property
    def sends(self) -> tuple[Outgoing, ...]:
        found = list[Outgoing]()
        for hop in self.hops:
            peer = (self._place + hop) % self._inner
            for span, earlier in self._seen.lent[hop]:
                at = sum([earlier[h] for h in self.hops])
                found.append(Outgoing(peer, self._seen.find(span), at, self._landing[peer]))
        return tuple(found)

    @functools.cached_property
    def returns(self) -> tuple[Outgoing, ...]:
        of_peer = collections.defaultdict[int, list[Span]](list)
        for peer, at in self.sources:
            of_peer[peer].append(at)
        found = list[Outgoing]()
        for hop in self.hops:
            peer = (self._place - hop) % self._inner
            # The peer's results from nearer places lie before this rank's.
            nearer = (h for h in self.hops if h < hop)
            first = sum(self._seen.tokens[(peer + h) % self._inner][h] for h in nearer)
            for span in of_peer[peer]:
                found.append(Outgoing(peer, span, first, self._returning[peer]))
                first += length(span)
        return tuple(found)

    def __repr__(self) -> str:
        landing, sends, returns = self.landing, self.sends, self.returns
        return f"Stage(hops={self.hops}, {landing=}, {sends=}, {returns=})"


@dataclass(frozen=True, eq=False)
class Round:
    """The blocks of one host, as one rank sees them.

    root     owner of the block that the rank begins the round with; in round 0 itself
    held     the tokens of the root that this rank has, as rising spans of its shard
    landing  these in memory, with what this rank itself needs of them: nothing in round 0, since
             the own block is not received
    stages   the other blocks, if a rank of this host needs them
    lent     own tokens that ranks of another host need in this round
    lent_to  that host
    """

    root: int
    held: tuple[Span, ...]
    landing: Landing
    stages: tuple[Stage, ...]
    lent: tuple[Span, ...] = ()
    lent_to: int = 0


class Routes:
    """The routes of `rank` under a tiling. Its queries stay, its keys are sent."""

    def __init__(self, tiling: Tiling, inner: int, outer: int, rank: int):
        self.tiling, self.inner, self.outer, self.rank = tiling, inner, outer, rank
        self.host, place = divmod(rank, inner)
        self._seen = [
            SeenRuns(inner, host * inner + place, is_own=host == self.host) for host in range(outer)
        ]
        for viewer in range(rank - place, rank - place + inner):
            by_host = collections.defaultdict[int, list[RunFields]](list)
            for run in tiling.seen(viewer):
                by_host[run[2] // inner].append(run)
            for host, runs in by_host.items():
                self._seen[host].add(viewer, runs)

    def traffic(self) -> bool:
        """Whether a rank of this host needs another rank's tokens, or another host this rank's."""
        return any(any(map(any, seen.tokens)) for seen in self._seen) or bool(self._lent)

    def landing_tokens(self, hops: Sequence[int]) -> int:
        """Return the most tokens that land on a rank of this host if these hops are one stage."""
        return max(max(seen.sizes(hops)[0]) for seen in self._seen)

    def rounds(
        self, limit: int | None = None, return_limit: int | None = None
    ) -> tuple[Round, ...]:
        """Return all rounds. Those in which nothing is sent count too, as they do on other hosts.

        A stage has as many hops as let at most `limit` tokens land, and results of `return_limit`
        tokens return. Without a return limit, no results return, and the first stage is not the
        longest: it must arrive while the own block is computed. With one, the last stage is not the
        longest: its results return when nothing is left to compute.
        """
        rounds = []
        for number in range(self.outer):
            seen = self._seen[(self.host + number) % self.outer]
            runs = seen.own_runs([0])
            places = [seen.find(span) for *_, span in runs]
            landing = Landing(runs, places, sum(map(length, seen.held)))
            stages = tuple(map(seen.stage, seen.split_hops(limit, return_limit)))
            lent_to = (self.host - number) % self.outer
            lent = self._lent.get(lent_to, ())
            rounds.append(Round(seen.root, seen.held, landing, stages, lent, lent_to))
        return tuple(rounds)

    @functools.cached_property
    def _lent(self) -> dict[int, tuple[Span, ...]]:
        """The own tokens that other hosts need, by host."""
        found = self.tiling.seen_by(self.rank, self.inner) if self.outer > 1 else {}
        return {host: spans for host, spans in found.items() if host != self.host}


class SeenRuns:
    """All runs of one host that the ranks of this host need. One rank, at `place`, uses a part.

    root    owner of its root in the round with that host
    is_own  whether the root is its own block
    tokens  how many tokens each needs, by place of the viewer and by hop
    own     runs that the rank itself needs, in the order of positions
    lent    spans of the root that others need, by hop; and for each, how many tokens with lower
            positions its viewer needs, by hop
    """

    def __init__(self, inner: int, root: int, is_own: bool):
        self.inner, self.root, self.place, self.is_own = inner, root, root % inner, is_own
        self.tokens = [[0] * inner for _ in range(inner)]
        self.own: list[RunFields] = []
        self.lent: list[list[tuple[Span, tuple[int, ...]]]] = [[] for _ in range(inner)]
        self._stages: dict[tuple[int, ...], Stage] = {}

    def add(self, viewer: int, runs: Sequence[RunFields]) -> None:
        """Add the runs that a rank needs, in the order in which they land there."""
        # Short documents make very many runs, of all ranks of the host: this is one plain loop.
        inner, root = self.inner, self.root
        place = viewer % inner
        tokens = self.tokens[place]
        for _, _, owner, span in runs:
            hop = (place - owner) % inner
            if owner == root:
                self.lent[hop].append((span, tuple(tokens)))
            tokens[hop] += span[1] - span[0]
        if place == self.place:
            self.own += runs

    def own_runs(self, hops: Sequence[int]) -> list[RunFields]:
        """Return the runs of some hops that the rank itself needs."""
        owners = [(self.place - hop) % self.inner for hop in hops]
        return [run for run in self.own if run[2] % self.inner in owners]

    @functools.cached_property
    def held(self) -> tuple[Span, ...]:
        """The tokens of the root that the rank has, as rising spans of its shard. Of its own block
        these are all from the first to the last one that others need: a view, not a copy.
        """
        spans = [span for of_hop in self.lent for span, _ in of_hop]
        return (hull(spans),) if self.is_own else merged(spans)

    def find(self, span: Span) -> Span:
        """Return where tokens `span` of the root lie, if held spans lie one after the other."""
        index = bisect.bisect_right(self.held, span[0], key=operator.itemgetter(0)) - 1
        (start, stop), (place, _) = self._held_places[index]
        assert start <= span[0] and span[1] <= stop, f"{span} is not within {self.held}"
        return shifted(span, place - start)

    @functools.cached_property
    def _held_places(self) -> list[tuple[Span, Span]]:
        return list(in_turn(self.held))

    def sizes(self, hops: Sequence[int]) -> tuple[list[int], list[int]]:
        """Count the tokens that land at each place in a stage, and those that results return to."""
        inner = self.inner
        landing = [sum([tokens[hop] for hop in hops]) for tokens in self.tokens]
        returning = [
            sum([self.tokens[(place + hop) % inner][hop] for hop in hops]) for place in range(inner)
        ]
        return landing, returning

    def stage(self, hops: tuple[int, ...]) -> Stage:
        """Return the stage of some hops. Forward and backward often share it."""
        if hops not in self._stages:
            self._stages[hops] = Stage(self, hops)
        return self._stages[hops]

    def split_hops(self, limit: int | None, return_limit: int | None) -> list[tuple[int, ...]]:
        """Split the hops that are needed into few stages, of nearly equal numbers of hops."""
        by_hop = zip(*self.tokens, strict=True)
        hops = [hop for hop, of_places in enumerate(by_hop) if hop and any(of_places)]

        def fits(part: Sequence[int]) -> bool:
            landing, returning = map(max, self.sizes(part))
            return len(part) == 1 or (
                landing <= (limit or landing) and returning <= (return_limit or returning)
            )

        for count in range(1, len(hops) + 1):
            # Rounded down, the bounds of 5 hops in 2 stages are 2 + 3: only the own block hides the
            # first stage. Rounded up, they are 3 + 2: nothing hides the results of the last one.
            up = count - 1 if return_limit else 0
            bounds = [(len(hops) * i + up) // count for i in range(count + 1)]
            parts = [tuple(hops[a:b]) for a, b in itertools.pairwise(bounds)]
            if all(map(fits, parts)):
                return parts
        return []
