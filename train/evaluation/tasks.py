"""The tasks of an evaluation by name, their options, the model, and the report."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from bmt_burst import IGNORE_INDEX
from train.base.files import drawing, writing
from train.base.wording import counted, flag, remark_few
from train.data.batches import Batches
from train.data.folder import Sequences
from train.data.tokenizer_base import Tokenizer
from train.engine import Engine
from train.evaluation import retrieval
from train.evaluation.before import RESULTS
from train.evaluation.retrieval import SENTENCES, Cell, Haystack, RetrievalRows, Task

# tasks, and the number that a log has of each
METRICS = {"needle": "needle_found", "variables": "variables_found", "positions": "far_loss"}
TASKS = tuple(METRICS)
# of the sizes of a Grid
_RANGES: dict[str, tuple[int, float]] = {
    **dict.fromkeys(("lengths", "samples", "bins"), (1, math.inf)),
    "depths": (0, 1),
    "hops": (0, 64),
    "hidden": (1, retrieval.MOST_HIDDEN),
    "digits": (1, 9),
}


@dataclass(frozen=True)
class Bin:
    """The tokens at positions start to stop - 1: the number of targets, and their mean loss."""

    start: int
    stop: int
    targets: int
    loss: float

    @property
    def perplexity(self) -> float:
        """The exponential of the loss, infinite above what a float holds."""
        return float(torch.tensor(self.loss, dtype=torch.float64).exp())


@torch.no_grad()
def measure_positions(
    sources: Sequence[Sequences],
    batches: Batches,
    engine: Engine,
    bins: int,
    alive: Callable[[], None],
) -> tuple[list[Bin], list[list[Bin]]]:
    """Measure the mean loss in up to `bins` bins of positions, of all sources and of each.
    Every rank must call it. `alive` is called before each micro-batch.
    """
    seq_len = sources[0].seq_len
    bins = min(bins, seq_len)
    sums = torch.zeros(len(sources), 2, bins, dtype=torch.float64, device=engine.device)
    for (losses, counts), data in zip(sums, sources, strict=True):
        for batch in batches.of_evaluation(data):
            alive()
            loss, _ = batch.score_tokens(engine.model)
            is_target = batch.labels != IGNORE_INDEX
            places = (batch.positions * bins // seq_len).expand_as(loss)[is_target]
            losses.index_add_(0, places, loss[is_target].double())
            counts.index_add_(0, places, torch.ones_like(places, dtype=torch.float64))
    by_source = torch.tensor(engine.sum(sums.flatten().tolist())).view(sums.shape)
    edges = [-(-i * seq_len // bins) for i in range(bins + 1)]
    return _make_bins(edges, by_source.sum(0)), [_make_bins(edges, each) for each in by_source]


def _make_bins(edges: Sequence[int], sums: Tensor) -> list[Bin]:
    """Return the bins between `edges` of summed losses and numbers of targets, (2, bins)."""
    return [
        Bin(start, stop, int(count), loss / count if count else math.nan)
        for start, stop, (loss, count) in zip(edges, edges[1:], sums.T.tolist(), strict=False)
    ]


def parse_tasks(text: str, option: str) -> tuple[str, ...]:
    """Return the tasks of "needle,positions". Raises ValueError for others."""
    names = tuple(name.strip() for name in text.split(","))
    if not set(names) <= set(TASKS) or len(set(names)) < len(names):
        raise ValueError(f"{option} must be different names of {', '.join(TASKS)}, got {text!r}")
    return names


@dataclass(frozen=True)
class Grid:
    """The sizes of the tasks. Raises ValueError for values out of range.

    lengths   tokens of the texts in which something is hidden
    depths    where a needle is, as shares of the text
    hops      the assignments from variable to variable in a chain
    hidden    needles, or chains of variables, in a text; one is asked for
    digits    digits of a code or value
    samples   texts for each length and each depth or number of hops
    bins      ranges of positions
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    hops: tuple[int, ...] = (1, 2, 4)
    hidden: int = 1
    digits: int = 5
    samples: int = 5
    bins: int = 16
    seed: int = 0

    def __post_init__(self):
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            if not values or not all(low <= each <= high for each in values):
                option = "--needles" if name == "hidden" else flag(name)
                at_most = "" if high == math.inf else f" and at most {high}"
                raise ValueError(f"{option} must be at least {low}{at_most}, got {value}")
        if self.hidden > 9 * 10 ** (self.digits - 1) - 1:
            raise ValueError(
                f"--digits {self.digits} has too few numbers for --needles {self.hidden}"
            )


@dataclass(frozen=True)
class Subject:
    """The model that is evaluated, and its texts.

    batches    deals rows of a length to the ranks
    data       the sequences of the task positions by their length, and by the name of their source,
               which may be empty
    alive      is called before each micro-batch, with what is done
    """

    engine: Engine
    batches: Callable[[int], Batches]
    tokenizer: Tokenizer
    bos: int | None
    data: dict[int, dict[str, Sequences]]
    alive: Callable[[str], None]
    text: str = SENTENCES


@dataclass(frozen=True)
class Retrieved:
    """The result of a retrieval task. `value` is the share of all answers that were found."""

    task: str
    level: str
    cells: list[Cell]
    by_source: ClassVar[dict[str, float]] = {}
    remark: ClassVar[str] = ""

    @property
    def value(self) -> float:
        return sum(cell.found for cell in self.cells) / len(self.cells)

    def describe(self) -> list[str]:
        """Return a line with the value and the lengths of the texts."""
        lengths = ", ".join(f"{n:,}" for n in dict.fromkeys(cell.length for cell in self.cells))
        return [f"{self.task}: {METRICS[self.task]} {self.value:.4f} in texts of {lengths} tokens"]

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {"length": c.length, self.level: c.level, "found": c.found, "loss": c.loss}
            for c in self.cells
        ]
        return {"found": self.value, "cells": rows}


@dataclass(frozen=True)
class ByPosition:
    """Bins by length, also by source. `value` is the loss of the last ones of the longest rows."""

    bins: dict[int, list[Bin]]
    sources: dict[str, dict[int, list[Bin]]]
    task = "positions"

    @property
    def value(self) -> float:
        return _longest(self.bins).loss

    @property
    def by_source(self) -> dict[str, float]:
        return {name: _longest(bins).loss for name, bins in self.sources.items()}

    @property
    def remark(self) -> str:
        """A remark if `value` is the mean of few targets, else nothing."""
        return remark_few(_longest(self.bins).targets)

    def describe(self) -> list[str]:
        """Return a line with the loss of the last bin with targets for each length."""
        return [
            f"positions: far_loss {far.loss:.4f}{remark_few(far.targets)} in sequences of "
            f"{length:,} tokens"
            for length, far in ((length, _far(bins)) for length, bins in self.bins.items())
        ]

    def to_dict(self) -> dict[str, Any]:
        whole = _bins_to_dict(self.bins)
        of_sources = {name: _bins_to_dict(bins) for name, bins in self.sources.items()}
        return {**whole, "sources": of_sources} if of_sources else whole


def _far(bins: list[Bin]) -> Bin:
    """Return the last bin with targets, else the last."""
    return next((b for b in reversed(bins) if b.targets), bins[-1])


def _longest(bins: dict[int, list[Bin]]) -> Bin:
    return _far(bins[max(bins)])


def _bins_to_dict(by_length: dict[int, list[Bin]]) -> dict[str, Any]:
    rows = [
        {
            "length": length,
            **dataclasses.asdict(b),
            "loss": b.loss if b.targets else None,
            "perplexity": b.perplexity if math.isfinite(b.perplexity) else None,
        }
        for length, bins in by_length.items()
        for b in bins
    ]
    far = _longest(by_length).loss
    return {"far_loss": far if math.isfinite(far) else None, "bins": rows}


Result = Retrieved | ByPosition


def check_tasks(tasks: tuple[str, ...], subject: Subject, grid: Grid) -> None:
    """Make a row of each kind. Raises ValueError for lengths that are too short."""
    for name in tasks:
        if name != "positions":
            for length in grid.lengths:
                _make_rows(_make_task(name, grid), subject, grid, length)


def evaluate(name: str, subject: Subject, grid: Grid) -> Result:
    """Run the task called `name`. Every rank must call this function, and gets the same result."""
    if name == "positions":
        whole: dict[int, list[Bin]] = {}
        of_sources: dict[str, dict[int, list[Bin]]] = {}
        for length, sources in subject.data.items():
            alive = partial(subject.alive, f"positions in {length:,} tokens")
            whole[length], parts = measure_positions(
                list(sources.values()), subject.batches(length), subject.engine, grid.bins, alive
            )
            for source, bins in zip(sources, parts, strict=True):
                if source:
                    of_sources.setdefault(source, {})[length] = bins
        return ByPosition(whole, of_sources)
    task, cells = _make_task(name, grid), []
    for length in grid.lengths:
        rows = _make_rows(task, subject, grid, length)
        alive = partial(subject.alive, f"{name} in {length:,} tokens")
        cells += retrieval.score_rows(rows, subject.batches(length), subject.engine, alive)
    return Retrieved(name, task.level, cells)


def _make_task(name: str, grid: Grid) -> Task:
    if name == "needle":
        return retrieval.Needle(grid.depths, grid.hidden, grid.digits)
    return retrieval.Variables(grid.hops, grid.hidden, grid.digits)


def _make_rows(task: Task, subject: Subject, grid: Grid, length: int) -> RetrievalRows:
    haystack = Haystack(subject.tokenizer, subject.text)
    return RetrievalRows(task, haystack, length, grid.samples, grid.seed, subject.bos)


def write_report(folder: Path, about: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """Write results.json, whose values are returned, and TASK.png into `folder`. `about` describes
    the evaluation.
    """
    values = {**about, "tasks": {result.task: result.to_dict() for result in results}}
    with writing(folder / RESULTS):
        (folder / RESULTS).write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")
    for result in results:
        with drawing(folder / f"{result.task}.png") as (figure, axes):
            if isinstance(result, Retrieved):
                _draw_map(figure, axes, result)
            else:
                _draw_curve(axes, result)
    return values


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
    """Draw perplexity over positions, a curve for each source and length."""
    for name, of_source in {**result.sources, "all": result.bins}.items():
        for length, of_length in of_source.items():
            bins = [b for b in of_length if b.targets]
            centers = [(b.start + b.stop - 1) / 2 for b in bins]
            label = f"{name}, {counted(length, 'token')}"
            axes.plot(centers, [b.perplexity for b in bins], marker="o", label=label)
    axes.legend()
    axes.set(xlabel="position", ylabel="perplexity", title="perplexity by position in a sequence")
    axes.grid(alpha=0.3)
