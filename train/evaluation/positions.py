"""Perplexity by position: a token's place in its document if these are kept apart, else its row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bmt_burst.sequence.layout import IGNORE_INDEX
from train.data.batches import Batches
from train.data.folder import Sequences
from train.engine import Engine


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
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


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
