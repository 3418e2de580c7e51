"""A timeline of a ring's plan: when one rank computes and when it receives, at assumed rates.

Nothing runs. Kernels run one after the other. Deliveries of a kind (visits and returns) follow one
another. Both wait for each other as the program's events do. Merging and launching cost nothing,
so a real rank is never faster.

`RingPlan.timelines` returns a timeline of the forward and one of the backward. examples/timeline.py
draws all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...sequence.gathered_calls import GatheredCall
from ...sequence.mask import Slice
from ...sequence.tile import KernelCall
from .events import Do, Event
from .program import Program

_BACKWARD = 2.5  # operations of a backward, relative to its forward
_WIDTH = 72  # characters of a drawing
# rows of a drawing, and their characters
_ROWS = {"compute": "#", "visit": "=", "return": "~", "host": "-"}


@dataclass(frozen=True)
class Rates:
    """Assumed rates per second: operations, bytes between ranks of a host, and bytes between
    hosts.
    """

    operations: float = 600e12
    bytes: float = 300e9
    host_bytes: float = 40e9


class Interval(NamedTuple):
    """A kernel's work or a delivery, in seconds from the start."""

    row: str
    event: Event
    start: float
    stop: float


class Timeline(NamedTuple):
    """The intervals of one rank. It prints as a drawing with a row for kernels and for each kind of
    delivery.
    """

    rank: int
    intervals: list[Interval]

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

    sizes = program.problem.sizes

    def seconds(heads: int, calls: Sequence[GatheredCall]) -> float:
        pairs = sum(count_pairs(gathered.call) for gathered in calls)
        work = 4 * sizes.batch * heads * sizes.head_size * pairs
        return work * (_BACKWARD if returning else 1) / rates.operations

    def link_seconds(event: Event) -> float:
        return program.manifest(event).nbytes / rates.bytes

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
            done[event] = occupy("host", event, nbytes / rates.host_bytes)
    return Timeline(program.rank, intervals)


def _heads(program: Program, event: Event) -> int:
    """Count the query heads of an event's pass."""
    if not program.passes:
        return program.problem.sizes.heads
    heads = program.passes[event.number].q
    return len(range(*heads.indices(program.problem.sizes.heads)))


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
