"""Draw when each rank of a ring computes and sends, at assumed rates. No GPU is needed.

    python examples/timeline.py --tokens 131072 --ranks 8 --output timeline.png
    python examples/timeline.py --ranks 8 --inner 4     # two hosts, a double ring

It also prints a drawing of each rank. The default rates are for H200 with NVLink; see --help.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot

from bmt_burst import Layout, Mask, kernels
from bmt_burst.spec import Spec
from bmt_burst.strategies import Problem, Sizes
from bmt_burst.strategies.ring import RingPlan
from bmt_burst.strategies.ring.timeline import Rates, Timeline

COLOURS = {"compute": "#3b6fb6", "visit": "#e1812c", "return": "#3a923a", "host": "#8c6bb1"}


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


def draw(timelines: list[tuple[Timeline, Timeline]], path: Path) -> None:
    """Write a picture: forward and backward side by side, a line for each rank and kind of work."""
    figure, axes = pyplot.subplots(1, 2, figsize=(14, 0.7 * len(timelines) + 1.5))
    for axis, title, column in zip(
        axes, ("forward", "backward"), zip(*timelines, strict=True), strict=True
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
    found = [plan.timelines(rates) for plan in plans(arguments)]
    for forward, backward in found:
        print(f"forward, {forward}\nbackward, {backward}\n")
    draw(found, arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
