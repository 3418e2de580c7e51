"""Weights that a run starts from (--init-from)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from models.tensor_files import is_file, open_file, open_folder
from models.weights import Expected, Shapes, Weights
from train.base import ranks
from train.engine import Engine, Shard
from train.engine.common import seeded_generator

_VOCABULARY = {"embed_tokens.weight", "lm_head.weight", "input_embedding.weight"}
_NOISE = 0.01  # standard deviation of a new row's noise, relative to that of each column


def load_weights(source: str, engine: Engine, expected: Expected, seed: int = 0) -> None:
    """Load the weights in `source`, a folder or a file, into the engine, with a new optimizer.

    If the engine's model has a larger vocabulary than `expected`, new rows are the mean of the
    others with small noise, by `seed`. Raises ValueError for weights of another model than
    `expected`, or that are not finite, and OSError if they cannot be read.
    """
    weights = open_weights(source, expected, lambda: _shapes_before(engine, expected))
    _say_growth(engine, expected)

    def read(key: str, shard: Shard) -> Tensor:
        kind, name = key.split("/")
        if kind != "weight":
            return torch.zeros_like(shard.flat)
        mine = _read_shard(weights, name, shard, seed)
        if not mine.isfinite().all():
            raise ValueError(f"{source}: {name} is not finite")
        return mine

    engine.load(read, optimizer_steps=0)


def open_weights(source: str, expected: Expected, shapes: Shapes) -> Weights:
    """Open the weights in `source`, a folder or a file. Raises Weights' errors, or OSError."""
    path = Path(source)
    files = open_file(path) if is_file(path) else open_folder(path)
    return Weights(source, files, expected, shapes)


def _shapes_before(engine: Engine, expected: Expected) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the engine's weights, before their vocabulary grew."""
    shapes = {}
    for key, shard in engine.state().items():
        kind, name = key.split("/")
        if kind == "weight":
            rows = (expected.config.vocab_size,) if name in _VOCABULARY else shard.shape[:1]
            shapes[name] = (*rows, *shard.shape[1:])
    return shapes


def _say_growth(engine: Engine, expected: Expected) -> None:
    before = expected.config.vocab_size
    for name in sorted(_VOCABULARY):
        shard = engine.state().get(f"weight/{name}")
        if shard is not None and shard.shape[0] > before:
            ranks.warn(f"{name} grows from {before:,} to {shard.shape[0]:,} rows")


def _read_shard(weights: Weights, name: str, shard: Shard, seed: int) -> Tensor:
    """Return a rank's entries of a weight, whose rows may be fewer than the shard's whole has."""
    whole, stop = weights[name], shard.start + shard.flat.numel()
    mine, old = whole.flatten()[shard.start : stop], whole.numel()
    if stop <= old or not shard.flat.numel():
        return mine
    added = _new_rows(name, whole, shard.shape[0] - len(whole), seed).flatten()
    return torch.cat((mine.float(), added[max(shard.start - old, 0) : stop - old]))


def _new_rows(name: str, whole: Tensor, count: int, seed: int) -> Tensor:
    """Return rows (count, E) in fp32 for new tokens: the mean of all rows, with small noise."""
    deviation, mean = torch.std_mean(whole.float(), 0, correction=0)
    generator = seeded_generator(f"{seed}/{name}/new")
    return mean + _NOISE * deviation * torch.randn(count, whole.shape[1], generator=generator)
