"""Weights that a run starts from (--init-from)."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import torch
from torch import Tensor

from models.huggingface import HFWeights
from train.engine import Engine, Shard

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_weights(source: str, engine: Engine, model: str) -> None:
    """Load the weights in `source` into the engine, with a new optimizer. Errors name the model
    `model`.

    `source` is a folder in Hugging Face's format, or a .pt file of bmtrain.save. Raises ValueError
    if it is neither, holds the weights of another model, or has weights that are not finite. Raises
    OSError if it cannot be read.
    """
    weights = _read_file(source, engine, model) if source.endswith(".pt") else HFWeights(source)

    def read(key: str, shard: Shard) -> Tensor:
        kind, name = key.split("/")
        if kind != "weight":
            return torch.zeros_like(shard.flat)
        mine = weights[name].flatten()[shard.start : shard.start + shard.flat.numel()]
        if not mine.isfinite().all():
            raise ValueError(f"{source}: {name} is not finite")
        return mine

    engine.load(read, optimizer_steps=0)


def _read_file(source: str, engine: Engine, model: str) -> Mapping[str, Tensor]:
    try:
        weights = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{source} is not a file of weights: only names and tensors are unpickled"
        ) from error
    # bytes that are not such an archive
    except (RuntimeError, EOFError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{source} is not a file of weights: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(weights, dict) or not all(_is_weight(*item) for item in weights.items()):
        raise ValueError(f"{source} does not hold names and tensors of floating-point numbers")
    shards = engine.state().items()
    expected = {
        key.removeprefix("weight/"): shard.shape
        for key, shard in shards
        if key.startswith("weight/")
    }
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    if found != expected:
        wrong = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
        raise ValueError(
            f"{source} does not hold the weights of --model {model}: {wrong[:5]} differ"
        )
    return weights


def _is_weight(name: object, weight: object) -> bool:
    if not isinstance(name, str) or not isinstance(weight, Tensor):
        return False
    return weight.layout == torch.strided and weight.dtype in _DTYPES
