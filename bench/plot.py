"""Plots of TFLOP/s over the sequence length, which bench/report.py writes."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench import tables
from bench.tables import Row, alone, attention_groups, describe, implementation


def several_lengths(rows: list[Row]) -> dict[tuple, list[Row]]:
    """Return the cases with several lengths, which are worth a plot, with their rows."""
    return {
        case: group
        for case, group in attention_groups(rows).items()
        if len({r["seq_len"] for r in group}) > 1
    }


def plot(rows: list[Row], file: Path, most: int | None = None) -> None:
    """Plot TFLOP/s per GPU of forward and backward over the sequence length.

    Each case with several lengths has a panel. `most` limits the number of cases.
    """
    groups = dict(list(several_lengths(rows).items())[:most])
    if not groups:
        return
    try:
        import matplotlib
    except ImportError:
        print("No plots: the package matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # identical files in every run, and small ones
    # each text names its fonts
    matplotlib.rcParams |= {"svg.hashsalt": "bmt_burst", "svg.fonttype": "none"}
    matplotlib.rcParams["font.sans-serif"] = ["DejaVu Sans", "Arial"]
    across = min(len(groups), 3)
    down = -(-len(groups) // across)
    figure, panels = plt.subplots(
        down, across, figsize=(6 * across, 4.5 * down), squeeze=False, layout="constrained"
    )
    _fill_panels(list(panels.flat), groups, rows)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)
    if file.suffix == ".svg":
        file.write_text(_shorten(file.read_text()))
    plt.close(figure)
    print(f"Plot: {file}")


def _fill_panels(panels: list[Any], groups: dict[tuple, list[Row]], rows: list[Row]) -> None:
    """Draw each case in a panel. A line has one colour in all panels."""
    lines = dict.fromkeys(_line(row) for group in groups.values() for row in group)
    colours = {line: f"C{i % 10}" for i, line in enumerate(lines)}
    for panel in panels[len(groups) :]:
        panel.set_axis_off()
    for panel, (case, group) in zip(panels, groups.items(), strict=False):
        _draw(panel, rows, group, colours)
        lengths = sorted({row["seq_len"] for row in group})
        panel.set(xscale="log", xlabel="tokens", title=describe(case))
        panel.set(ylabel="TFLOP/s per GPU, forward + backward")
        panel.set_xticks(lengths, map(tables.tokens, lengths))
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.title.set_fontsize(9)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)


def _shorten(svg: str) -> str:
    """Return a picture with two decimals, a hundredth of a point, without indentation and
    metadata.
    """
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"(\.\d\d)\d+", r"\1", svg))


def _line(row: Row) -> tuple[str, str]:
    """Return which line of a plot a row is a point of."""
    return implementation(row), row["kernel"]


def _draw(
    panel: Any, rows: list[Row], group: list[Row], colours: dict[tuple[str, str], str]
) -> None:
    """Draw the lines of a case, and dashed or dotted lines for the yardsticks."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for row in group:
        lines[_line(row)].append((row["seq_len"], row["fwd_bwd_tflops_per_gpu"]))
    several = len({kernel for _, kernel in lines}) > 1
    for line, points in lines.items():
        label = f"{line[0]} ({line[1]})" if several else line[0]
        panel.plot(*zip(*sorted(points), strict=True), marker="o", label=label, color=colours[line])
    lengths = sorted({row["seq_len"] for row in group})
    for name, style in zip(tables.YARDSTICKS, ("k--", "k:"), strict=True):
        limits = [
            alone(rows, next(r for r in group if r["seq_len"] == length), name)
            for length in lengths
        ]
        if all(limits):
            panel.plot(lengths, [r["fwd_bwd_tflops_per_gpu"] for r in limits], style, label=name)
