"""Perplexity by position: how much a model gains from what stands before a token.

A token's position is its place in its document if documents are kept apart, else in its sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bmt_burst.sequence.layout import IGNORE_INDEX
from train.data.batches import Batches
from train.data.folder import Sequences
from train.engine import Engine


@dataclass(frozen=True)
class Bin:
    """The tokens at positions start to stop - 1: how many are targets, and their mean loss. The
    loss is NaN without any.
    """

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
    data: Sequences, batches: Batches, engine: Engine, bins: int, alive: Callable[[], None]
) -> list[Bin]:
    """Measure the mean loss in up to `bins` bins of positions, over evenly spaced sequences. Every
    rank must call this function.

    `alive` is called before each micro-batch.
    """
    bins = min(bins, data.seq_len)
    sums = torch.zeros(2 * bins, dtype=torch.float64, device=engine.device)
    for batch in batches.of_evaluation(data):
        alive()
        loss, _ = batch.score_tokens(engine.model)
        is_target = batch.labels != IGNORE_INDEX
        places = (batch.positions * bins // data.seq_len).expand_as(loss)[is_target]
        sums[:bins].index_add_(0, places, loss[is_target].double())
        sums[bins:].index_add_(0, places, torch.ones_like(places, dtype=torch.float64))
    total = engine.sum(sums.tolist())
    edges = [-(-i * data.seq_len // bins) for i in range(bins + 1)]
    return [
        Bin(start, stop, int(count), loss / count if count else math.nan)
        for start, stop, loss, count in zip(
            edges, edges[1:], total[:bins], total[bins:], strict=False
        )
    ]
