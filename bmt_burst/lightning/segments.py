"""The plan of lightning attention over ranks: segments of tokens, and the states that ranks send.

A run is consecutive positions of one rank. Document borders cut it into segments. Only its first
segment may begin with a state of earlier runs, and only its last one may leave a state for later
runs. All follows from the documents and the layout, so ranks exchange nothing but states.

Plain numbers, no torch. Try `print(plan_states(Layout.zigzag(60, 2), (0, 9, 60), rank=0))`.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from ..sequence.layout import Layout, Run
from ..sequence.mask import Mask


@dataclass(frozen=True)
class Segments:
    """The parts of a rank's tokens that have a state of their own.

    cuts    (0, ..., T), strictly rising: segment i has tokens cuts[i] to cuts[i + 1] - 1
    opens   segments that begin with a state of other runs, rising. The others begin with 0.
    leaves  segments that leave their last state to other runs, rising
    """

    cuts: tuple[int, ...]
    opens: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    # what kernels keep for these segments
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


class Message(NamedTuple):
    """The state of a run, the rank of a ring that it is sent to or received from, and its place
    among the states that the receiver gets.
    """

    run: int
    peer: int
    place: int


class Hop(NamedTuple):
    """The messages of one ring, in the same order at both ends."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Term(NamedTuple):
    """A state that is added to another one, after it decayed over `tokens`."""

    run: int
    tokens: int


class Sum(NamedTuple):
    """The state that a run takes: the last state of each of `terms`, decayed.

    earlier  how many tokens the previous Sum of this rank decays over until it is added, or None
             if it belongs to another document
    """

    terms: tuple[Term, ...]
    earlier: int | None


@dataclass(frozen=True)
class Exchange:
    """The states that a rank sends, receives and adds up in one direction. Runs are numbered in
    that direction.

    own     the runs whose states this rank computes
    across  messages between hosts, among the ranks at one place of all hosts
    within  messages within this host, afterwards
    most    the most states that any rank receives from ranks of its host
    sums    the states that this rank takes, in the order of their runs
    is_any  whether any rank takes a state. Otherwise no rank sends one.
    """

    own: tuple[int, ...]
    across: Hop
    within: Hop
    most: int
    sums: tuple[Sum, ...]
    is_any: bool

    def __str__(self) -> str:
        hops = "; ".join(
            f"{ring}: sends {_format(hop.sends)}, receives {_format(hop.receives)}"
            for ring, hop in (("between hosts", self.across), ("within the host", self.within))
            if hop.sends or hop.receives
        )
        return f"adds {len(self.sums)} states, {hops or 'sends and receives nothing'}"


@dataclass(frozen=True)
class StatePlan:
    """The part of one rank. `backward` numbers runs from the end of the sequence."""

    rank: int
    runs: tuple[Run, ...]
    segments: Segments
    forward: Exchange
    backward: Exchange

    def __str__(self) -> str:
        runs = ", ".join(f"{run.start} to {run.stop - 1}" for run in self.runs)
        segments = self.segments
        return "\n".join(
            (
                f"rank {self.rank}: positions {runs}, {len(segments.cuts) - 1} segments, "
                f"{len(segments.opens)} open, {len(segments.leaves)} leave a state",
                f"  forward {self.forward}",
                f"  backward {self.backward}",
            )
        )


@functools.lru_cache(maxsize=64)  # each call needs them, and a mask may have thousands of slices
def find_borders(mask: Mask) -> tuple[int, ...]:
    """Return where the documents of a mask begin, rising from 0, and last the mask's length.

    Raises ValueError unless the mask is of causal documents.
    """
    mask.check_one_length("lightning attention")
    borders = [0]
    for q, kv, low, high in mask.slices:
        tokens = q[1] - q[0]
        is_causal = tokens == 1 or (low == 0 and (high is None or high >= tokens))
        if q[0] > borders[-1]:
            _refuse_padding(borders[-1], q[0])
        if q != kv or q[0] != borders[-1] or not is_causal:
            raise ValueError(
                "lightning attention needs causal documents, such as Mask.documents(cu_seqlens), "
                f"not windows, prefixes or full masks; got Slice{(q, kv, low, high)}"
            )
        borders.append(q[1])
    if borders[-1] != mask.seq_len:
        _refuse_padding(borders[-1], mask.seq_len)
    return tuple(borders)


def _refuse_padding(start: int, stop: int) -> NoReturn:
    raise ValueError(
        "lightning attention needs causal documents, in which each token sees itself; got a mask "
        f"in which tokens {start} to {stop - 1} see nothing: make such padding a document of its "
        f"own, with {start} and {stop} among the cu_seqlens of Mask.documents. That changes no "
        "other document"
    )


def plan_states(
    layout: Layout, borders: Sequence[int], rank: int, inner: int | None = None
) -> StatePlan:
    """Return the part of a rank.

    borders  where documents begin, rising from 0, and last the length of the sequence
    inner    the number of ranks of a host, by default all

    Raises ValueError if a run has steps, as in striped layouts.
    """
    by_rank = [tuple(_join_runs(layout, r)) for r in range(layout.size)]
    runs = sorted(itertools.chain(*by_rank))
    end = layout.seq_len
    forward = [(run.start, run.stop, run.owner) for run in runs]
    backward = [(end - stop, end - start, owner) for start, stop, owner in reversed(forward)]
    mirrored = [end - border for border in reversed(borders)]
    inner = inner or layout.size
    return StatePlan(
        rank,
        by_rank[rank],
        _cut_segments(by_rank[rank], borders),
        _plan_exchange(forward, borders, rank, layout.size, inner),
        _plan_exchange(backward, mirrored, rank, layout.size, inner),
    )


def _join_runs(layout: Layout, rank: int) -> Iterator[Run]:
    """Yield the runs of a rank, neighbours joined."""
    last = None
    for run in layout.runs(rank):
        length = run.span[1] - run.span[0]
        if run.step != 1 and length > 1:
            raise ValueError(
                f"lightning attention needs consecutive tokens, got {layout!r}: each of its runs "
                "would send a state for one token; use layout='zigzag'"
            )
        if last is not None and last.start + last.span[1] - last.span[0] == run.start:
            last = last._replace(span=(last.span[0], run.span[1]))
            continue
        if last is not None:
            yield last
        last = run._replace(step=1)
    if last is not None:
        yield last


def _cut_segments(runs: Sequence[Run], borders: Sequence[int]) -> Segments:
    cuts, opens, leaves = [0], list[int](), list[int]()
    for run in runs:
        first, last = bisect_left(borders, run.start), bisect_left(borders, run.stop)
        if borders[first] != run.start:
            opens.append(len(cuts) - 1)
        shift = run.span[0] - run.start
        cuts += [b + shift for b in borders[first:last] if b > run.start]
        if borders[last] != run.stop:
            leaves.append(len(cuts) - 1)
        cuts.append(run.span[1])
    return Segments(tuple(cuts), tuple(opens), tuple(leaves))


def _plan_exchange(
    runs: Sequence[tuple[int, int, int]],
    borders: Sequence[int],
    rank: int,
    size: int,
    inner: int,
) -> Exchange:
    """Plan the exchange of states from earlier to later runs (start, stop, owner)."""
    starts, inside = [start for start, _, _ in runs], set(borders)
    needed = [set[int]() for _ in range(size)]
    sums, previous = list[Sum](), dict[int, int]()  # by rank its last run that takes a state
    for number, (start, _, owner) in enumerate(runs):
        if start in inside:
            continue
        document = borders[bisect_right(borders, start) - 1]
        first, earlier = bisect_right(starts, document) - 1, previous.get(owner, 0)
        joins = earlier > first
        sources = range(max(first, earlier), number)
        needed[owner].update(sources)
        if owner == rank:
            terms = tuple(Term(run, start - runs[run][1]) for run in sources)
            sums.append(Sum(terms, start - starts[earlier] if joins else None))
        previous[owner] = number
    own = [
        number for number, (_, stop, owner) in enumerate(runs)
        if owner == rank and stop not in inside
    ]  # fmt: skip
    owners = [owner for _, _, owner in runs]
    across, within, most = _plan_hops(owners, needed, rank, inner)
    return Exchange(tuple(own), across, within, most, tuple(sums), any(needed))


def _plan_hops(
    owners: Sequence[int], needed: Sequence[set[int]], rank: int, inner: int
) -> tuple[Hop, Hop, int]:
    """Plan the messages of a rank that bring each rank the states of its `needed` runs, and find
    the most that any rank receives within its host.

    A state that another host needs is sent there once: to the rank at the owner's place. That one
    passes it on within its host.
    """
    size, place = len(needed), rank % inner
    host = range(rank - place, rank - place + inner)

    def find_crossing(to: int) -> list[int]:
        """Return the runs of other hosts whose states a rank receives for its host."""
        first = to - to % inner
        of_host = set[int]().union(*needed[first : first + inner])
        return [
            run for run in sorted(of_host)
            if owners[run] != to and (owners[run] - to) % inner == 0
        ]  # fmt: skip

    def find_within(to: int) -> list[int]:
        """Return the runs whose states a rank receives from its host."""
        return [run for run in sorted(needed[to]) if (owners[run] - to) % inner]

    across = Hop(
        tuple(
            Message(run, to // inner, at)
            for to in range(place, size, inner)
            for at, run in enumerate(find_crossing(to))
            if owners[run] == rank
        ),
        tuple(Message(run, owners[run] // inner, at) for at, run in enumerate(find_crossing(rank))),
    )
    within = Hop(
        tuple(
            Message(run, to % inner, at)
            for to in host
            for at, run in enumerate(find_within(to))
            if owners[run] % inner == place
        ),
        tuple(Message(run, owners[run] % inner, at) for at, run in enumerate(find_within(rank))),
    )
    return across, within, max(len(find_within(to)) for to in range(size))


def _format(messages: Sequence[Message]) -> str:
    by_peer: dict[int, int] = {}
    for _, peer, _ in messages:
        by_peer[peer] = by_peer.get(peer, 0) + 1
    return ", ".join(f"{n} with rank {peer}" for peer, n in by_peer.items()) or "nothing"
