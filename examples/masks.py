"""Draw a gallery of masks: each kind, and how four ranks share its work in each layout.

    python examples/masks.py [FOLDER]    # writes FOLDER/masks.png and prints the masks

FOLDER is by default the current folder.

A mask is a function that returns a `bmt_burst.Mask`. To see a new one here, register it in
`EXAMPLES` of examples/mask_kinds.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from matplotlib.colors import ListedColormap

from bmt_burst import Layout, Mask
from bmt_burst.sequence.layout import LAYOUTS
from examples.mask_kinds import EXAMPLES

TOKENS, RANKS = 64, 4
# hidden pairs, then pairs of ranks 0 to 3
COLOURS = ["#ffffff", "#3b6fb6", "#e1812c", "#3a923a", "#c03d3e"]


def owners(mask: Mask, layout: Layout) -> torch.Tensor:
    """Return (tokens, tokens) int: 0 for a hidden pair, else 1 + the rank that owns its query."""
    rank_of = torch.empty(mask.seq_len, dtype=torch.int64)
    for rank in range(layout.size):
        rank_of[layout.positions(rank)] = rank + 1
    return rank_of.unsqueeze(1) * mask.dense()


def share(mask: Mask, layout: Layout) -> float:
    """Return the work of the busiest rank relative to the mean: 1 is perfect balance."""
    pairs = owners(mask, layout)
    work = torch.stack([(pairs == rank + 1).sum() for rank in range(layout.size)]).double()
    return float(work.max() / work.mean())


def draw(path: Path) -> None:
    """Write a picture: a row for each mask, a column for each layout."""
    names = [*LAYOUTS, "balanced"]
    figure, axes = pyplot.subplots(
        len(EXAMPLES), len(names), figsize=(2.2 * len(names), 2.4 * len(EXAMPLES))
    )
    for row, (kind, make) in zip(axes, EXAMPLES.items(), strict=True):
        mask = make(TOKENS)
        for axis, name in zip(row, names, strict=True):
            layout = (
                Layout.balanced(mask, RANKS)
                if name == "balanced"
                else Layout.named(name, TOKENS, RANKS)
            )
            axis.imshow(
                owners(mask, layout),
                cmap=ListedColormap(COLOURS),
                vmin=0,
                vmax=RANKS,
                interpolation="nearest",
            )
            axis.set(xticks=[], yticks=[], title=f"{name}, busiest {share(mask, layout):.2f}")
            axis.title.set_fontsize(7)
        row[0].set_ylabel(kind, fontsize=8)
    figure.suptitle(
        f"{TOKENS} queries (down) and keys (across), coloured by the rank of the query", fontsize=9
    )
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0] if arguments else ".")
    folder.mkdir(parents=True, exist_ok=True)
    for kind, make in EXAMPLES.items():
        print(f"{kind}: {make(TOKENS)}\n")
    draw(folder / "masks.png")
    print(f"wrote {folder / 'masks.png'}")


if __name__ == "__main__":
    main(sys.argv[1:])
