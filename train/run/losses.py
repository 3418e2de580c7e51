"""Token losses of a step or an evaluation, in all and by source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from train.data.batches import Dealer, Work
from train.data.source import Stored
from train.engine import Engine


class LossSums:
    """Sums of a step's token losses on this rank, also of each source. Only `read` waits."""

    def __init__(self, sources: int):
        self._sources = sources
        self._losses: list[Tensor] = []
        self._numbers: list[int] = []

    def add(self, batch: Work, losses: Tensor) -> None:
        """Add the losses of a micro-batch: their sum, or (B,) for a batch with sources."""
        self._losses.append(losses.detach().view(-1))
        self._numbers += batch.sources or ()

    def read(self) -> list[float]:
        """Return the sum of all losses, then the sum of each source."""
        losses = torch.cat(self._losses).double()
        of_sources = [0.0] * self._sources
        if self._sources:
            for number, loss in zip(self._numbers, losses.tolist(), strict=True):
                of_sources[number] += loss
        return [float(losses.sum()), *of_sources]


def mean_losses(
    name: str, sources: Iterable[str], losses: Sequence[float], targets: Sequence[float]
) -> dict[str, float]:
    """Return the mean loss of each named source that has targets, as NAME/SOURCE."""
    return {
        f"{name}/{source}": loss / count
        for source, loss, count in zip(sources, losses, targets, strict=True)
        if source and count
    }


@torch.no_grad()
def measure_losses(
    sources: Mapping[str, Stored], batches: Dealer, engine: Engine, alive: Callable[[], None]
) -> dict[str, float]:
    """Return the mean token loss of each source and of all, as a record names them, over evenly
    spaced sequences. Every rank must call it. `alive` is called before each micro-batch.
    """
    sums = []
    for data in sources.values():
        loss = targets = 0.0
        for batch in batches.of_evaluation(data):
            alive()
            batch_loss, batch_targets = batch.losses(engine.model)
            loss, targets = loss + float(batch_loss), targets + float(batch_targets)
        sums += [loss, targets]
    sums = engine.sum(sums)
    losses, targets_of = sums[::2], sums[1::2]
    mean = sum(losses) / sum(targets_of) if sum(targets_of) else math.nan
    return {"val_loss": mean, **mean_losses("val_loss", sources, losses, targets_of)}
