"""Weights that a run starts from (--init-from)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from models.tensor_files import is_file, open_file, open_folder
from models.weights import Expected, Weights
from train.engine import Engine, Shard


def load_weights(source: str, engine: Engine, expected: Expected) -> None:
    """Load the weights in `source` into the engine, with a new optimizer.

    `source` is a folder or a file (models/tensor_files.py), under the names of models/origins.py.

    Raises ValueError if it holds the weights of another model than `expected`, or weights that are
    not finite. Raises OSError if it cannot be read.
    """
    path = Path(source)
    files = open_file(path) if is_file(path) else open_folder(path)
    weights = Weights(source, files, expected, lambda: _shapes(engine))

    def read(key: str, shard: Shard) -> Tensor:
        kind, name = key.split("/")
        if kind != "weight":
            return torch.zeros_like(shard.flat)
        mine = weights[name].flatten()[shard.start : shard.start + shard.flat.numel()]
        if not mine.isfinite().all():
            raise ValueError(f"{source}: {name} is not finite")
        return mine

    engine.load(read, optimizer_steps=0)


def _shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the engine's weights."""
    found = {tuple(key.split("/")): shard.shape for key, shard in engine.state().items()}
    return {name: shape for (kind, name), shape in found.items() if kind == "weight"}
