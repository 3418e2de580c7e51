"""Routes: which tokens a rank sends to which other rank in a stage of a ring, and where they land.

The hops of a round are grouped into stages. The tokens of a stage that a rank needs land one
after the other, in the order of their positions, so that tiles that are cut in the same way are one
kernel call. Gradients of a stage return to the owners of its tokens. There they land by sender.
Both ends of a message compute its place from the same data, so a transport may write it there
without asking.

The memory where tokens land may hold those of an earlier stage. A sender overwrites them, also
without asking: there are two buffers for tokens and one for gradients, and all ranks of a host have
the same stages. So the receiver has freed the buffer before it begins the stage that lands there,
and the transport holds back messages until then (`Transport.deliver`).

A rank knows only two things: what the ranks of its host need, and which of its tokens each other
host needs. No tensors are sent here. Try
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
from ...sequence.tiling import RunFields, ShardRun, Tiling
from .schedule import Schedule


class Outgoing(NamedTuple):
    """Tokens `span` of what the sender has, which land from token `at` on at place `peer` of its
    host.

    `total` tokens land there in the stage.
    """

    peer: int
    span: Span
    at: int
    total: int


class Incoming(NamedTuple):
    """Gradients from place `peer` of the host, which land at tokens `at`.

    They belong to tokens `span` of what the receiver has of its root.
    """

    peer: int
    span: Span
    at: Span


class Landing(NamedTuple):
    """Tokens of another rank, the place of the host that sends them, and where they land."""

    run: ShardRun
    peer: int
    at: Span


@dataclass(frozen=True, eq=False, repr=False)
class Landings:
    """Landings as three lists: runs, the places that send them, and where they land.

    Iterating gives each as a `Landing`. Plans do not keep these: with many short documents there
    are so many that the garbage collector would take longer than the planning.
    """

    runs: Sequence[RunFields] = ()
    peers: Sequence[int] = ()
    places: Sequence[Span] = ()

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Landing]:
        return map(Landing, itertools.starmap(ShardRun, self.runs), self.peers, self.places)

    def __repr__(self) -> str:
        return repr(list(self))


class Stage:
    """The blocks of one or more hops, as one rank sees them.

    landings            what this rank receives, in the order of positions, and where it lands
    tokens              how many tokens land
    sends               parts of this rank's root that others need; spans count tokens of what
                        this rank has of the root
    returns             gradients of the stage's tokens, for the ranks that sent these
    incoming_gradients  gradients of the root, from the ranks that needed it
    gradient_tokens     how many tokens these are of

    Planning needs only the landings. Messages (sends, returns, incoming_gradients) are found when
    they are first asked for.
    """

    def __init__(self, seen_runs: SeenRuns, held: Held, hops: tuple[int, ...]):
        self._seen, self._held, self.hops = seen_runs, held, hops
        self._inner, self._place = len(seen_runs.tokens), seen_runs.place
        self._landing, self._home = seen_runs.sizes(hops)  # by place
        self.tokens, self.gradient_tokens = (
            self._landing[seen_runs.place],
            self._home[seen_runs.place],
        )
        runs = seen_runs.own_runs(hops)
        peers = [owner % self._inner for _, _, owner, _ in runs]
        places = [at for _, at in in_turn(span for *_, span in runs)]
        self.landings = Landings(runs, peers, places)

    @property
    def sources(self) -> list[tuple[int, Span]]:
        """Return the place of the host that sends each part of the tokens, and the part.

        A rank waits for no message from itself: it copies those tokens when it sends.
        """
        return [(peer, at) for peer, at in self._parts if peer != self._place]

    @property
    def gradient_sources(self) -> list[tuple[int, Span]]:
        """Return the same for gradients that return."""
        return [(x.peer, x.at) for x in self.incoming_gradients if x.peer != self._place]

    @property
    def _parts(self) -> Iterator[tuple[int, Span]]:
        return zip(self.landings.peers, self.landings.places, strict=True)

    @functools.cached_property
    def sends(self) -> tuple[Outgoing, ...]:
        earlier = itertools.chain(*(self._seen.earlier[hop] for hop in self.hops))
        return tuple(
            Outgoing(peer, span, sum([tokens[h] for h in self.hops]), self._landing[peer])
            for (peer, span, _), tokens in zip(self.incoming_gradients, earlier, strict=True)
        )

    @functools.cached_property
    def returns(self) -> tuple[Outgoing, ...]:
        """Send back what landed. At each peer, what nearer places return lies first."""
        of_peer: dict[int, list[Span]] = {}
        for peer, at in self._parts:
            of_peer.setdefault(peer, []).append(at)
        found: list[Outgoing] = []
        for hop in self.hops:
            peer = (self._place - hop) % self._inner
            nearer = (h for h in self.hops if h < hop)
            first = sum(self._seen.tokens[(peer + h) % self._inner][h] for h in nearer)
            for span in of_peer.get(peer, ()):
                found.append(Outgoing(peer, span, first, self._home[peer]))
                first += length(span)
        return tuple(found)

    @functools.cached_property
    def incoming_gradients(self) -> tuple[Incoming, ...]:
        peers = [
            (self._place + hop) % self._inner for hop in self.hops for _ in self._seen.spans[hop]
        ]
        places = in_turn(span for hop in self.hops for span in self._seen.spans[hop])
        return tuple(
            Incoming(peer, self._held.place(span), at)
            for peer, (span, at) in zip(peers, places, strict=True)
        )

    def __repr__(self) -> str:
        return (
            f"Stage(hops={self.hops}, landings={self.landings}, tokens={self.tokens}, "
            f"sends={self.sends}, returns={self.returns}, "
            f"incoming_gradients={self.incoming_gradients})"
        )


@dataclass(frozen=True, eq=False)
class Round:
    """The blocks of one host, as one rank sees them.

    root     owner of the block that the rank opens the round with; in round 0 itself
    held     the tokens of the root that this rank has: rising spans of its shard, one after the
             other
    landings what this rank needs of those, and where it lies; empty in round 0, since the own
             block is not received
    stages   the other blocks, if a rank of this host needs them
    lent     own tokens that ranks of another host need in this round
    lent_to  that host
    """

    root: int
    held: tuple[Span, ...]
    landings: Landings
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
    """The routes of `rank` under a tiling. Its queries stay, its keys are sent."""

    def __init__(self, tiling: Tiling, schedule: Schedule, rank: int):
        self.tiling, self.schedule, self.rank = tiling, schedule, rank
        self.host, self.place = divmod(rank, schedule.inner)
        self._stages: dict[tuple[int, tuple[int, ...]], Stage] = {}
        self._seen = _find_seen(tiling, schedule, rank)

    def traffic(self) -> bool:
        """Whether a rank of this host needs another rank's tokens, or another host this rank's."""
        return bool(self._seen) or bool(self._lent)

    def landing_tokens(self, hops: Sequence[int]) -> int:
        """Return the most tokens that land on a rank of this host if these hops are one stage."""
        return max((max(seen_runs.sizes(hops)[0]) for seen_runs in self._seen.values()), default=0)

    def rounds(
        self, limit: int | None = None, return_limit: int | None = None
    ) -> tuple[Round, ...]:
        """Return all rounds. Those in which nothing is sent count too, as they do on other hosts.

        A stage has as many hops as let at most `limit` tokens land, and gradients of `return_limit`
        tokens return. Without a return limit, no gradients return, and the first stage is not the
        longest: it must arrive while the own block is computed. With one, the last stage is not the
        longest: its gradients return when nothing is left to compute.
        """
        return tuple(
            self._round(number, limit, return_limit) for number in range(self.schedule.outer)
        )

    @functools.cached_property
    def _lent(self) -> dict[int, tuple[Span, ...]]:
        """The own tokens that other hosts need, by host."""
        if self.schedule.outer == 1:
            return {}
        found = self.tiling.seen_by(self.rank, self.schedule.inner)
        found.pop(self.host, None)
        return found

    def _round(self, number: int, limit: int | None, return_limit: int | None) -> Round:
        root = self.schedule.block(self.rank, number, 0)
        host = root // self.schedule.inner
        seen_runs = self._seen.get(host) or SeenRuns(self.schedule.inner, root)
        seen = list(itertools.chain(*seen_runs.spans))
        held = Held(merged(seen) if number else [hull(seen)])
        hops = seen_runs.split_hops(limit, return_limit)
        stages = tuple(self._known_stage(seen_runs, held, tuple(part)) for part in hops)
        if not number:  # the root is the own block, held from the first to the last token in use
            return Round(self.rank, held.spans, Landings(), stages)
        runs = seen_runs.own_runs([0])
        places = [held.place(span) for *_, span in runs]
        landings = Landings(runs, [self.place] * len(runs), places)
        lent_to = self.schedule.host_of_round(self.host, -number)
        return Round(root, held.spans, landings, stages, self._lent.get(lent_to, ()), lent_to)

    def _known_stage(self, seen_runs: SeenRuns, held: Held, hops: tuple[int, ...]) -> Stage:
        """Return a stage, made only once: forward and backward often share their stages."""
        key = seen_runs.root, hops
        if key not in self._stages:
            self._stages[key] = Stage(seen_runs, held, hops)
        return self._stages[key]


class SeenRuns:
    """All runs of one host that the ranks of this host need, of which one rank uses a part.

    The rank is the one at the place of `root`, which is its root in the round with that host.

    tokens   how many tokens each needs, by place of the viewer and by hop
    own      runs that the rank itself needs, in the order of positions
    spans    spans of the root that others need, by hop
    earlier  for each of those, how many tokens with lower positions its viewer needs, by hop
    """

    def __init__(self, inner: int, root: int):
        self.root, self.place = root, root % inner
        self.tokens = [[0] * inner for _ in range(inner)]
        self.own: list[RunFields] = []
        self.spans: list[list[Span]] = [[] for _ in range(inner)]
        self.earlier: list[list[tuple[int, ...]]] = [[] for _ in range(inner)]

    def add(self, viewer: int, runs: Sequence[RunFields]) -> None:
        """Add the runs that a rank needs, in the order in which they land there."""
        place, inner, root = viewer % len(self.tokens), len(self.tokens), self.root
        tokens = self.tokens[place]
        for _, _, owner, span in runs:
            hop = (place - owner) % inner
            if owner == root:
                self.spans[hop].append(span)
                self.earlier[hop].append(tuple(tokens))
            tokens[hop] += span[1] - span[0]
        if place == self.place:
            self.own += runs

    def own_runs(self, hops: Sequence[int]) -> list[RunFields]:
        """Return the runs of some hops that the rank itself needs."""
        inner = len(self.tokens)
        owners = [(self.place - hop) % inner for hop in hops]
        return [run for run in self.own if run[2] % inner in owners]

    def sizes(self, hops: Sequence[int]) -> tuple[list[int], list[int]]:
        """Count, for a stage of some hops, the tokens that land at each place, and the tokens that
        gradients return to.
        """
        inner = len(self.tokens)
        landing = [sum([tokens[hop] for hop in hops]) for tokens in self.tokens]
        home = [
            sum([self.tokens[(place + hop) % inner][hop] for hop in hops]) for place in range(inner)
        ]
        return landing, home

    def split_hops(self, limit: int | None, return_limit: int | None) -> list[list[int]]:
        """Split the hops that are needed into as few stages as the limits allow, of nearly equal
        numbers of hops.
        """
        hops = [hop for hop in range(1, len(self.tokens)) if any(seen[hop] for seen in self.tokens)]

        def fits(part: Sequence[int]) -> bool:
            landing, home = map(max, self.sizes(part))
            return len(part) == 1 or (
                landing <= (limit or landing) and home <= (return_limit or home)
            )

        for count in range(1, len(hops) + 1):
            # Rounded down, the bounds of 5 hops in 2 stages are 2 + 3: only the own block hides the
            # first stage. Rounded up, they are 3 + 2: nothing hides the gradients of the last one.
            up = count - 1 if return_limit else 0
            bounds = [(len(hops) * i + up) // count for i in range(count + 1)]
            parts = [hops[a:b] for a, b in itertools.pairwise(bounds)]
            if all(map(fits, parts)):
                return parts
        return []


def _find_seen(tiling: Tiling, schedule: Schedule, rank: int) -> dict[int, SeenRuns]:
    """Return the tokens that the ranks of a host need, by the host of the owners."""
    inner, place = schedule.inner, rank % schedule.inner
    seen: dict[int, SeenRuns] = {}
    for viewer in schedule.ranks(rank // inner):
        by_host: dict[int, list[RunFields]] = {}
        for run in tiling.seen(viewer):
            by_host.setdefault(run[2] // inner, []).append(run)
        for host, runs in by_host.items():
            if host not in seen:
                seen[host] = SeenRuns(inner, host * inner + place)
            seen[host].add(viewer, runs)
    return seen


class Held:
    """The rising spans of a shard that a rank has, one after the other in its memory."""

    def __init__(self, spans: Sequence[Span]):
        self.spans = tuple(spans)
        self._starts = [start for start, _ in spans]
        self._places = [at for _, (at, _) in in_turn(spans)]

    def place(self, span: Span) -> Span:
        """Return where tokens `span` of the shard lie. They are within one of the held spans."""
        index = bisect.bisect_right(self._starts, span[0]) - 1
        start, stop = self.spans[index]
        assert start <= span[0] and span[1] <= stop, f"{span} is not within {self.spans}"
        by = self._places[index] - start
        return span[0] + by, span[1] + by
