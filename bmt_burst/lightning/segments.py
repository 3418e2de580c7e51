"""The plan of lightning attention over ranks: segments of tokens, and the states that ranks send.

A run is consecutive positions of one rank. Document borders cut it into segments. Only its first
segment may begin with a state of earlier runs, and only its last one may leave a state for later
runs. All follows from the documents and the layout, so ranks exchange nothing but states.

The sequence may be a chunk of a longer one. A document may then continue the state of an earlier
chunk, which every rank holds: it is one more earlier run without tokens. A document may also go on
in a later chunk. Every rank adds up the state at the chunk's end, in one order, so that all get the
same bits. The rows of a batch are one sequence, in which each row has such edges.

Plain numbers, no torch. Try `print(plan_states(Layout.zigzag(60, 2), (0, 9, 60), rank=0))`.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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


class Edges(NamedTuple):
    """The documents of a chunk's rows that are parts of longer ones."""

    before: tuple[bool, ...]  # for each row, whether its first document continues an earlier state
    after: tuple[bool, ...]  # for each row, whether its last document goes on in a later chunk

    def expand(self, rows: int) -> Edges:
        """Return the edges of so many rows, from those of each or of all."""
        return self if len(self.before) > 1 else Edges(self.before * rows, self.after * rows)


class Message(NamedTuple):
    """A run whose state is sent, the rank at the other end, and its place at the receiver."""

    run: int
    peer: int
    place: int


class Hop(NamedTuple):
    """The messages of one ring, in the same order at both ends."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Faded(NamedTuple):
    """The last state of a run, decayed over `tokens`. Run ~r is the state that enters row r."""

    run: int
    tokens: int


@dataclass(frozen=True)
class StateExchange:
    """The states that a rank sends, receives and adds up in one direction. Runs are numbered in
    that direction.

    own       the runs whose states this rank computes
    across    messages between hosts, among the ranks at one place of all hosts
    within    messages within this host, afterwards
    most      the most states that any rank receives from ranks of its host
    sums      the states that this rank takes, in the order of their runs, then those that leave.
              Each is the sum of faded ones.
    is_any    whether any rank takes a state. Otherwise no rank sends one.
    entering  the rows whose state enters, from beyond the first token
    leaving   the rows whose state leaves, beyond the last token, in the order of their sums
    """

    own: tuple[int, ...]
    across: Hop
    within: Hop
    most: int
    sums: tuple[tuple[Faded, ...], ...]
    is_any: bool
    entering: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()


@dataclass(frozen=True)
class StatePlan:
    """The part of one rank. `backward` numbers runs from the end of the sequence.

    total  the number of runs of all ranks. No rank receives more states, whatever the documents.
    rows   the number of rows that have edges, or 1
    """

    rank: int
    runs: tuple[Run, ...]
    segments: Segments
    forward: StateExchange
    backward: StateExchange
    total: int
    rows: int

    def __str__(self) -> str:
        runs = ", ".join(f"{run.start} to {run.stop - 1}" for run in self.runs)
        segments = self.segments
        lines = [
            f"rank {self.rank}: positions {runs}, {len(segments.cuts) - 1} segments, "
            f"{len(segments.opens)} open, {len(segments.leaves)} leave a state"
        ]
        for name, x in (("forward", self.forward), ("backward", self.backward)):
            lines.append(
                f"  {name} adds {len(x.sums)} states, sends {len(x.within.sends)} within the host "
                f"and {len(x.across.sends)} between hosts"
            )
        return "\n".join(lines)


@functools.lru_cache(maxsize=64)  # each call needs them, and a mask may have thousands of slices
def find_borders(mask: Mask) -> tuple[int, ...]:
    """Return where the causal documents of a mask begin, rising from 0, and last its length."""
    mask.check_one_length("lightning attention")
    starts = [*(q[0] for q, *_ in mask.slices), mask.seq_len]
    stops = [0, *(q[1] for q, *_ in mask.slices)]
    for stop, start in zip(stops, starts, strict=True):
        if stop < start:
            raise ValueError(
                "lightning attention needs causal documents, in which each token sees itself; got "
                f"a mask in which tokens {stop} to {start - 1} see nothing: make such padding a "
                f"document of its own, with {stop} and {start} among the cu_seqlens of "
                "Mask.documents. That changes no other document"
            )
    for stop, (q, kv, low, high) in zip(stops, mask.slices, strict=False):
        tokens = q[1] - q[0]
        is_causal = tokens == 1 or (low == 0 and (high is None or high >= tokens))
        if q != kv or q[0] != stop or not is_causal:
            raise ValueError(
                "lightning attention needs causal documents, such as Mask.documents(cu_seqlens), "
                f"not windows, prefixes or full masks; got Slice{(q, kv, low, high)}"
            )
    return tuple(stops)


@functools.lru_cache(maxsize=256)  # a chunk needs them in each layer
def cut_documents(
    masks: tuple[Mask, ...], start: int, stop: int, goes_on: bool = False
) -> tuple[tuple[Mask, ...], Edges]:
    """Return the masks of the tokens start to stop - 1 of each row, and the edges of these rows.

    masks    of the whole sequences
    goes_on  whether the last document of each mask goes on after it, as that of a prompt does
    """
    found, before, after = list[Mask](), list[bool](), list[bool]()
    for borders in map(find_borders, masks):
        first, last = bisect_left(borders, start), bisect_left(borders, stop)
        inside = [border - start for border in borders[first:last] if border > start]
        found.append(Mask.documents((0, *inside, stop - start)))
        before.append(borders[first] != start)
        after.append(goes_on if stop == borders[-1] else borders[last] != stop)
    return tuple(found), Edges(tuple(before), tuple(after))


def plan_states(
    layout: Layout,
    borders: Sequence[int],
    rank: int,
    inner: int | None = None,
    edges: Edges | None = None,
) -> StatePlan:
    """Return the part of a rank.

    borders  where documents begin, rising from 0, and last the length of the sequence
    inner    the number of ranks of a host, by default all
    edges    those of the rows, if the sequence consists of rows of a chunk, of equal lengths

    Raises ValueError if a run has steps, as in striped layouts.
    """
    row_count = len(edges.before) if edges else 1
    row_starts = range(0, layout.seq_len + 1, layout.seq_len // row_count)
    by_rank = [_join_runs(layout, r, row_starts) for r in range(layout.size)]
    runs = sorted(itertools.chain(*by_rank))
    forward = _Direction(
        [(run.start, run.stop, run.owner) for run in runs],
        borders,
        {at: row for row, at in enumerate(row_starts[:-1]) if edges and edges.before[row]},
        {at: row for row, at in enumerate(row_starts[1:]) if edges and edges.after[row]},
    )
    backward = forward.mirrored(layout.seq_len)
    inner = inner or layout.size
    return StatePlan(
        rank,
        by_rank[rank],
        _cut_segments(by_rank[rank], forward),
        _plan_exchange(forward, rank, layout.size, inner),
        _plan_exchange(backward, rank, layout.size, inner),
        len(runs),
        row_count,
    )


class _Direction(NamedTuple):
    """A sequence in one direction.

    runs    (start, stop, owner), rising
    enters  by position the row whose state enters there
    leaves  by position the row whose state leaves there
    """

    runs: Sequence[tuple[int, int, int]]
    borders: Sequence[int]
    enters: dict[int, int]
    leaves: dict[int, int]

    def mirrored(self, end: int) -> _Direction:
        """Return the sequence of `end` tokens from its end."""
        return _Direction(
            [(end - stop, end - start, owner) for start, stop, owner in reversed(self.runs)],
            [end - border for border in reversed(self.borders)],
            {end - at: row for at, row in self.leaves.items()},
            {end - at: row for at, row in self.enters.items()},
        )


def _join_runs(layout: Layout, rank: int, row_starts: Sequence[int]) -> tuple[Run, ...]:
    """Return the runs of a rank, neighbours of a row joined."""
    joined = list[Run]()
    for run in layout.runs(rank):
        if run.step != 1 and run.span[1] - run.span[0] > 1:
            raise ValueError(
                f"lightning attention needs runs of consecutive tokens, got {layout!r}: a striped "
                "layout would send a state for each token; use layout='zigzag'"
            )
        if joined and joined[-1].stop == run.start and run.start not in row_starts:
            joined[-1] = joined[-1]._replace(span=(joined[-1].span[0], run.span[1]))
        else:
            joined.append(run._replace(step=1))
    return tuple(joined)


def _cut_segments(runs: Sequence[Run], sequence: _Direction) -> Segments:
    borders, cuts, opens, leaves = sequence.borders, [0], list[int](), list[int]()
    for run in runs:
        first, last = bisect_left(borders, run.start), bisect_left(borders, run.stop)
        if borders[first] != run.start or run.start in sequence.enters:
            opens.append(len(cuts) - 1)
        shift = run.span[0] - run.start
        cuts += [b + shift for b in borders[first:last] if b > run.start]
        if borders[last] != run.stop or run.stop in sequence.leaves:
            leaves.append(len(cuts) - 1)
        cuts.append(run.span[1])
    return Segments(tuple(cuts), tuple(opens), tuple(leaves))


def _plan_exchange(sequence: _Direction, rank: int, size: int, inner: int) -> StateExchange:
    """Plan the exchange of states from earlier to later runs."""
    runs, borders, enters, leaves = sequence
    starts, inside = [start for start, _, _ in runs], set(borders)
    needed = [set[int]() for _ in range(size)]
    sums = list[tuple[Faded, ...]]()

    def take(document: int, at: int, stop: int, takers: Sequence[int]) -> None:
        """Let ranks take the state of a document at a position, after the runs up to `stop` - 1."""
        sources = range(bisect_right(starts, document) - 1, stop)
        for taker in takers:
            needed[taker].update(sources)
        if rank in takers:
            edge = [Faded(~enters[document], at - document)] if document in enters else []
            sums.append((*edge, *(Faded(run, at - runs[run][1]) for run in sources)))

    for number, (start, _, owner) in enumerate(runs):
        if start not in inside or start in enters:
            take(borders[bisect_right(borders, start) - 1], start, number, (owner,))
    for at in leaves:  # the same sum on every rank
        take(borders[bisect_left(borders, at) - 1], at, bisect_left(starts, at), range(size))
    own = [
        number for number, (_, stop, owner) in enumerate(runs)
        if owner == rank and (stop not in inside or stop in leaves)
    ]  # fmt: skip
    owners = [owner for _, _, owner in runs]
    across, within, most = _plan_hops(owners, needed, rank, inner)
    is_any = any(needed) or bool(enters)
    rows = tuple(enters.values()), tuple(leaves.values())
    return StateExchange(tuple(own), across, within, most, tuple(sums), is_any, *rows)


def _plan_hops(
    owners: Sequence[int], needed: Sequence[set[int]], rank: int, inner: int
) -> tuple[Hop, Hop, int]:
    """Plan the messages of a rank that bring each rank the states of its `needed` runs, and find
    the most that any rank receives within its host.

    A state that another host needs is sent there once: to the rank at the owner's place. That one
    passes it on within its host.
    """
    size, place = len(needed), rank % inner
    crossing, within = list[list[int]](), list[list[int]]()  # the runs that each rank receives
    for to in range(size):
        first = to - to % inner
        of_host = sorted(set[int]().union(*needed[first : first + inner]))
        crossing.append([r for r in of_host if owners[r] != to and (owners[r] - to) % inner == 0])
        within.append([r for r in sorted(needed[to]) if (owners[r] - to) % inner])
    between_hosts = Hop(
        tuple(
            Message(run, to // inner, at)
            for to in range(place, size, inner)
            for at, run in enumerate(crossing[to])
            if owners[run] == rank
        ),
        tuple(Message(run, owners[run] // inner, at) for at, run in enumerate(crossing[rank])),
    )
    in_host = Hop(
        tuple(
            Message(run, to % inner, at)
            for to in range(rank - place, rank - place + inner)
            for at, run in enumerate(within[to])
            if owners[run] % inner == place
        ),
        tuple(Message(run, owners[run] % inner, at) for at, run in enumerate(within[rank])),
    )
    return between_hosts, in_host, max(map(len, within))
