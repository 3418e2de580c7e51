"""The weights that a run starts from (--init-from)."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import torch
from torch import Tensor

from bmt_burst.engine import Engine, Shard
from models.huggingface import HFWeights


def load_weights(source: str, engine: Engine, model: str) -> None:
    """Gives the engine, whose model is called `model`, the weights in `source`, and an optimizer that has yet to step.

    `source` is a folder in Hugging Face's format, or a file .pt as bmtrain.save writes it. Raises ValueError if it is
    neither, or holds another model's weights.
    """
    weights = _read_file(source, engine, model) if source.endswith(".pt") else HFWeights(source)

    def read(key: str, shard: Shard) -> Tensor:
        kind, name = key.split("/")
        if kind != "weight":
            return torch.zeros_like(shard.flat)
        return weights[name].flatten()[shard.start : shard.start + shard.flat.numel()]

    engine.load(read, optimizer_steps=0)


def _read_file(source: str, engine: Engine, model: str) -> Mapping[str, Tensor]:
    try:
        weights = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{source} is no file of weights: {str(error).splitlines()[0]}") from error
    if not isinstance(weights, dict) or not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise ValueError(f"{source} does not hold names and tensors")
    shards = engine.state().items()
    expected = {key.removeprefix("weight/"): shard.shape for key, shard in shards if key.startswith("weight/")}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    if found != expected:
        wrong = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
        raise ValueError(f"{source} does not hold the weights of model {model!r}: {wrong[:5]} differ")
    return weights
