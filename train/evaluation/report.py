"""The report of an evaluation: results.json, and a picture for each task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.base.files import writing
from train.evaluation.tasks import ByPosition, Result, Retrieved


def write_report(folder: Path, about: dict[str, Any], results: Sequence[Result]) -> None:
    """Write results.json and TASK.png into `folder`. `about` describes the evaluation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    values = {**about, "tasks": {result.task: result.to_dict() for result in results}}
    with writing(folder / "results.json"):
        (folder / "results.json").write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")
    for result in results:
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        try:
            if isinstance(result, Retrieved):
                _draw_map(figure, axes, result)
            else:
                _draw_curve(axes, result)
            with writing(folder / f"{result.task}.png"):
                figure.savefig(folder / f"{result.task}.png", dpi=120)
        finally:
            plt.close(figure)


def _draw_map(figure: Any, axes: Any, result: Retrieved) -> None:
    """Draw the share of answers that were found, by length and level."""
    lengths = list(dict.fromkeys(cell.length for cell in result.cells))
    levels = list(dict.fromkeys(cell.level for cell in result.cells))
    found = {(cell.level, cell.length): cell.found for cell in result.cells}
    image = axes.imshow(
        [[found[level, length] for length in lengths] for level in levels],
        vmin=0,
        vmax=1,
        cmap="RdYlGn",
        aspect="auto",
    )
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(levels)), [f"{level:g}" for level in levels])
    for y, level in enumerate(levels):
        for x, length in enumerate(lengths):
            axes.text(x, y, f"{found[level, length]:.0%}", ha="center", va="center")
    axes.set(xlabel="tokens", ylabel=result.level, title=f"{result.task}: {result.value:.0%} found")
    figure.colorbar(image, label="found")


def _draw_curve(axes: Any, result: ByPosition) -> None:
    """Draw perplexity over positions."""
    for name, of_source in {**result.sources, "all": result.bins}.items():
        bins = [b for b in of_source if b.targets]
        centers = [(b.start + b.stop - 1) / 2 for b in bins]
        axes.plot(centers, [b.perplexity for b in bins], marker="o", label=name)
    if result.sources:
        axes.legend()
    axes.set(xlabel="position", ylabel="perplexity", title="perplexity by position")
    axes.grid(alpha=0.3)
