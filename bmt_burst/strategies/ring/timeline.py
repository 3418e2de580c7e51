"""A timeline of a ring's plan: when one rank computes and when it receives, at assumed rates.

Nothing runs. Kernels run one after the other. Deliveries of a kind (visits and returns) follow one
another. Both wait for each other as the program's events do. Merging and launching cost nothing
with the default rates, so a real rank is never faster. With measured rates, such as `H200`, they
count for each query of a kernel call.

`RingPlan.timelines` returns a timeline of the forward and one of the backward. examples/timeline.py
draws all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...scores import BY_DISTANCE, is_one_row
from ...sequence.gathered_calls import GatheredCall
from ...sequence.mask import Slice
from ...sequence.span import length
from ...sequence.tile import KernelCall
from .. import Problem, Sizes
from ..machine import BACKWARD, BIASED_TIMES, BiasedTimes, HostWork, Rates
from .events import Do, Event
from .program import Program

_WIDTH = 72  # characters of a drawing
# rows of a drawing, and their characters
_ROWS = {"compute": "#", "visit": "=", "return": "~", "host": "-"}


class Interval(NamedTuple):
    """A kernel's work or a delivery, in seconds from the start."""

    row: str
    event: Event
    start: float
    stop: float


class Timeline(NamedTuple):
    """The intervals of one rank. It prints as a drawing with a row for kernels and for each kind of
    delivery.

    work  what the host enqueues
    """

    rank: int
    intervals: list[Interval]
    work: HostWork

    @property
    def seconds(self) -> float:
        return max((x.stop for x in self.intervals), default=0.0)

    @property
    def busy(self) -> float:
        """The share of the time in which kernels run."""
        return sum(x.stop - x.start for x in self.intervals if x.row == "compute") / (
            self.seconds or 1.0
        )

    def __str__(self) -> str:
        lines = [
            f"rank {self.rank}: {self.seconds * 1e3:.2f} ms, kernels run for {self.busy:.0%} of it"
        ]
        for row, character in _ROWS.items():
            mine = [x for x in self.intervals if x.row == row]
            if mine:
                lines.append(f"  {row:<8}|{self._draw(mine, character)}|")
        return "\n".join(lines)

    def _draw(self, intervals: Sequence[Interval], character: str) -> str:
        cells = [" "] * _WIDTH
        for x in intervals:
            first, last = (int(_WIDTH * at / self.seconds) for at in (x.start, x.stop))
            label = (
                str(x.event.stage)
                if x.event.do in ("compute", "fetch", "return")
                else x.event.do[0]
            )
            for cell in range(first, min(max(last, first + 1), _WIDTH)):
                cells[cell] = label if cell == first else character
        return "".join(cells)


def timeline(program: Program, rates: Rates, returning: bool = False) -> Timeline:
    """Compute when each event of a program starts and ends. `returning` is for a backward."""
    intervals: list[Interval] = []
    free = dict.fromkeys(_ROWS, 0.0)  # when each row is free
    done: dict[Event, float] = {}  # when what was started ends

    def occupy(row: str, event: Event, seconds: float, after: float = 0.0) -> float:
        start = max(free[row], after)
        free[row] = start + seconds
        if seconds:
            intervals.append(Interval(row, event, start, free[row]))
        return free[row]

    def at(event: Event, do: Do) -> float:
        return done.get(event._replace(do=do), 0.0)

    sizes, biased = program.problem.sizes, _biased_times(program.problem)
    calls = deliveries = messages = 0

    def seconds(heads: int, found: Sequence[GatheredCall]) -> float:
        nonlocal calls
        calls += len(found) * (biased.calls if biased else 1)
        return kernel_seconds(found, replace(sizes, heads=heads), rates, returning, biased)

    def link_seconds(event: Event) -> float:
        nonlocal deliveries, messages
        stage, pass_ = program.rounds[event.round].stages[event.stage], program.passes[event.number]
        is_fetch = event.do == "fetch"
        packing = pass_.packing if is_fetch else pass_.return_packing
        tokens = stage.tokens if is_fetch else stage.gradient_tokens
        deliveries += 1
        messages += len(stage.sends if is_fetch else stage.returns) * len(packing.entries)
        return packing.nbytes(tokens) / rates.bytes

    for event in program.events:
        heads = _heads(program, event)
        if event.do == "own":
            occupy("compute", event, seconds(sizes.heads, program.own))
        elif event.do in ("open", "compute"):
            arrived = at(event, "cross") if event.do == "open" else at(event, "fetch")
            found = program.calls[event.round, event.stage if event.do == "compute" else -1]
            done[event] = occupy("compute", event, seconds(heads, found), arrived)
        elif event.do == "fetch":
            buffer_read = at(event._replace(stage=event.stage - 2), "compute")  # two buffers
            done[event] = occupy("visit", event, link_seconds(event), buffer_read)
        elif event.do == "return":
            done[event] = occupy("return", event, link_seconds(event), at(event, "compute"))
        elif event.do in ("collect", "end") and event.stage >= 0 and returning:
            free["compute"] = max(free["compute"], at(event, "return"))
        elif event.do == "cross":
            tokens = program.rounds[event.round].held_tokens
            nbytes = program.passes[event.number].packing.nbytes(tokens)
            deliveries += 1
            done[event] = occupy("host", event, nbytes / rates.host_bytes)
    return Timeline(program.rank, intervals, HostWork(calls, deliveries, messages))


def kernel_seconds(
    calls: Sequence[GatheredCall],
    sizes: Sizes,
    rates: Rates,
    returning: bool,
    biased: BiasedTimes | None = None,
) -> float:
    """Compute how long kernel calls take, forward or `returning`, without their host time. `biased`
    are the `_biased_times` of their problem.
    """
    factor, operations = 1.0, rates.operations
    if returning:
        factor, operations = BACKWARD, rates.backward_operations or rates.operations
    work = 4 * sizes.batch * sizes.heads * sizes.head_size * factor / operations
    pairs = sum(
        count_pairs(gathered.call) * _relative_time(gathered.row, returning, biased)
        for gathered in calls
    )
    return work * (pairs + rates.call_keys * _queries(calls))


def _heads(program: Program, event: Event) -> int:
    """Count the query heads of an event's pass."""
    if not program.passes:
        return program.problem.sizes.heads
    heads = program.passes[event.number].q
    return len(range(*heads.indices(program.problem.sizes.heads)))


def _biased_times(problem: Problem) -> BiasedTimes | None:
    """Return what the bias of a problem costs, or None without one, or if it is not known."""
    return BIASED_TIMES.get(problem.biased_kernel.name) if problem.biased_kernel else None


def _relative_time(row: int | None, returning: bool, biased: BiasedTimes | None) -> float:
    """Return the time of a pair of a `Term` with this row, relative to a pair without a bias."""
    if biased is None or is_one_row(row):
        return 1.0
    return (biased.by_distance if row == BY_DISTANCE else biased.by_segments)[returning]


def _queries(calls: Sequence[GatheredCall]) -> int:
    return sum(length(q) for gathered in calls for q, _ in gathered.call.tiles)


def count_pairs(call: KernelCall) -> int:
    """Count the visible pairs of a kernel call."""
    total = 0
    for (a, b), (c, d) in call.tiles:
        # how far the last query is after the last key, from their tile's corner
        last = (b - a) - (d - c)
        low = None if call.right is None else last - call.right
        high = None if call.left is None else last + call.left + 1
        total += Slice((0, b - a), (0, d - c), low, high).area
    return total
