"""Draw when each rank of a ring computes and sends, at assumed rates. No GPU is needed.

    python examples/timeline.py --tokens 131072 --ranks 8 --output timeline.png
    python examples/timeline.py --ranks 8 --inner 4     # two hosts, a double ring

It also prints a drawing of each rank. The default rates are for H200 with NVLink; see --help.

Kernels run one after the other, and so do the deliveries of each kind: blocks, and returned
gradients. Kernels and deliveries wait for each other as the events of a plan do. Merging and
launching cost nothing, so a real rank is never faster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot

from bmt_burst import Layout, Mask, kernels
from bmt_burst.sequence.gathered_calls import GatheredCall
from bmt_burst.sequence.mask import Slice
from bmt_burst.sequence.tile import KernelCall
from bmt_burst.spec import Spec
from bmt_burst.strategies import Problem, Sizes
from bmt_burst.strategies.ring import RingPlan
from bmt_burst.strategies.ring.program import Event, Program

_BACKWARD = 2.5  # operations of a backward, relative to its forward
_WIDTH = 72  # characters of a drawing
# rows of a drawing, and their characters
_ROWS = {"compute": "#", "visit": "=", "return": "~", "host": "-"}
COLOURS = {"compute": "#3b6fb6", "visit": "#e1812c", "return": "#3a923a", "host": "#8c6bb1"}


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


def timeline(program: Program, rates: Rates) -> Timeline:
    """Compute when each event of a program starts and ends."""
    intervals: list[Interval] = []
    free = dict.fromkeys(_ROWS, 0.0)  # when each row is free
    done: dict[Event, float] = {}  # when what was started ends

    def occupy(row: str, event: Event, seconds: float, after: float = 0.0) -> float:
        start = max(free[row], after)
        free[row] = start + seconds
        if seconds:
            intervals.append(Interval(row, event, start, free[row]))
        return free[row]

    def at(event: Event, do: str) -> float:
        return done.get(event._replace(do=do), 0.0)

    sizes, returning = program.problem.sizes, program.payload.returns

    def seconds(heads: int, calls: Sequence[GatheredCall]) -> float:
        pairs = sum(count_pairs(gathered.call) for gathered in calls)
        work = 4 * sizes.batch * heads * sizes.head_size * pairs
        return work * (_BACKWARD if returning else 1) / rates.operations

    def link_seconds(event: Event) -> float:
        stage, pass_ = program.rounds[event.round].stages[event.stage], program.passes[event.number]
        if event.do == "fetch":
            return pass_.packing.nbytes(stage.tokens) / rates.bytes
        return pass_.return_packing.nbytes(stage.returned_tokens) / rates.bytes

    for event in program.events:
        heads = _heads(program, event)
        if event.do == "own":
            occupy("compute", event, seconds(sizes.heads, program.own))
        elif event.do == "compute":
            is_root = event.stage < 0
            arrived = at(event._replace(stage=0), "cross") if is_root else at(event, "fetch")
            found = program.calls[event.round, event.stage]
            done[event] = occupy("compute", event, seconds(heads, found), arrived)
        elif event.do == "fetch":
            before = event._replace(stage=event.stage - 2)  # there are two buffers
            buffer_read = at(before, "compute") if before.stage >= 0 else 0.0
            done[event] = occupy("visit", event, link_seconds(event), buffer_read)
        elif event.do == "return":
            done[event] = occupy("return", event, link_seconds(event), at(event, "compute"))
        elif event.do in ("collect", "end") and event.stage >= 0 and returning:
            free["compute"] = max(free["compute"], at(event, "return"))
        elif event.do == "cross":
            tokens = program.rounds[event.round].landing.tokens
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


def timelines(plan: RingPlan, rates: Rates) -> tuple[Timeline, Timeline]:
    """Return when a rank computes and sends, in the forward and in the backward."""
    forward, backward = plan.forward_program, plan.backward_program
    return timeline(forward, rates), timeline(backward, rates)


def plans(arguments: argparse.Namespace) -> list[RingPlan]:
    """Return each rank's plan of a causal sequence in the zigzag layout, in bf16."""
    problem = Problem(
        mask=Mask.causal(arguments.tokens),
        layout=Layout.zigzag(arguments.tokens, arguments.ranks),
        spec=Spec(scale=arguments.head_size**-0.5),
        kernel=kernels.load("reference"),
        sizes=Sizes(
            1,
            arguments.heads,
            arguments.kv_heads,
            arguments.head_size,
            torch.bfloat16,
            torch.bfloat16,
        ),
        inner=arguments.inner or arguments.ranks,
        outer=arguments.ranks // (arguments.inner or arguments.ranks),
    )
    return [RingPlan(problem, rank) for rank in range(arguments.ranks)]


def draw(lines: list[tuple[Timeline, Timeline]], path: Path) -> None:
    """Write a picture: forward and backward side by side, a line for each rank and kind of work."""
    figure, axes = pyplot.subplots(1, 2, figsize=(14, 0.7 * len(lines) + 1.5))
    for axis, title, column in zip(
        axes, ("forward", "backward"), zip(*lines, strict=True), strict=True
    ):
        for number, one in enumerate(column):
            for x in one.intervals:
                place = number + 0.22 * list(COLOURS).index(x.row)
                axis.barh(
                    place,
                    (x.stop - x.start) * 1e3,
                    0.2,
                    x.start * 1e3,
                    color=COLOURS[x.row],
                    edgecolor="white",
                )
        busy = sum(one.busy for one in column) / len(column)
        axis.set(
            title=f"{title}: kernels run for {busy:.0%} of the time",
            xlabel="milliseconds at assumed rates",
        )
        axis.set_yticks(
            [n + 0.3 for n in range(len(column))], [f"rank {n}" for n in range(len(column))]
        )
        axis.invert_yaxis()
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes[1].legend(
        handles, ["kernels", "blocks are sent", "gradients are sent", "between hosts"], fontsize=8
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1 << 17)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--inner", type=int, help="ranks of a host; by default all")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--tflops", type=float, default=600, help="of the kernel alone")
    parser.add_argument("--link", type=float, default=300, help="GB/s between ranks of a host")
    parser.add_argument(
        "--host-link", type=float, default=40, help="GB/s between hosts, for each rank"
    )
    parser.add_argument("--output", type=Path, default=Path("timeline.png"))
    arguments = parser.parse_args()
    if arguments.inner and arguments.ranks % arguments.inner:
        parser.error(f"--inner {arguments.inner} does not divide --ranks {arguments.ranks}")
    rates = Rates(arguments.tflops * 1e12, arguments.link * 1e9, arguments.host_link * 1e9)
    found = [timelines(plan, rates) for plan in plans(arguments)]
    for forward, backward in found:
        print(f"forward, {forward}\nbackward, {backward}\n")
    draw(found, arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
