"""The models that can be enabled, and why others cannot."""

from __future__ import annotations

import functools
from typing import Any

import model_center.model as zoo
from model_center.layer import Attention
from torch import nn

from .attention import _MASKED
from .biased import _CPM1, _CPM3
from .models import _GPT2, _OPT, _Bert, _GPTj, _Llama, _Model, _Roberta

_FAMILIES: dict[type[nn.Module], type[_Model]] = {
    zoo.Llama: _Llama,
    zoo.GPTj: _GPTj,
    zoo.GPT2: _GPT2,
    zoo.OPT: _OPT,
    zoo.Bert: _Bert,
    zoo.Roberta: _Roberta,
    zoo.CPM1: _CPM1,
    zoo.CPM3: _CPM3,
}


_REFUSED: dict[type[nn.Module], str] = {
    zoo.CPM2: "its decoder attends to another sequence",
    zoo.T5: "its decoder attends to another sequence",
    zoo.GLM: "its prefix and its positions are read off the whole input",
    zoo.Longformer: "its attention is sparse, over chunks of a sequence that it pads",
    zoo.ViT: "its sequence is made inside of it, of an image",
}


def _family(model: nn.Module) -> type[_Model]:
    """What the model becomes. Raises ValueError if it is that already, TypeError if it can be
    nothing.
    """
    name = type(model).__name__
    if isinstance(model, _Model):
        raise ValueError(f"this {name} is enabled already, for {model._sp.size} ranks")
    for base, reason in _REFUSED.items():
        if isinstance(model, base):
            raise TypeError(f"{name} cannot be sequence parallel: {reason}")
    for base, family in _FAMILIES.items():
        if isinstance(model, base):
            if type(model).forward is not base.forward or "forward" in vars(model):
                raise TypeError(
                    f"this {name} has another forward than {base.__name__}, which would be lost"
                )
            return family
    known = ", ".join(base.__name__ for base in _FAMILIES)
    raise TypeError(f"expected one of ModelCenter's {known}, got a {name}{_hint(model)}")


def _hint(model: Any) -> str:
    """Which of its modules could be enabled."""
    for path, part in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(part, tuple(_FAMILIES)):
            return f": give its {path}, a {type(part).__name__}"
    return ""


def _check_layer(layer: Attention, family: type[_Model]) -> None:
    if type(layer) is not Attention or "forward" in vars(layer):
        raise TypeError(
            f"a layer has another forward than Attention, which would be lost: {type(layer).__name__}"
        )
    if layer.pos_bias_type not in family.pos_bias_types:
        expected = " or ".join(map(repr, family.pos_bias_types))
        raise ValueError(
            f"pos_bias_type must be {expected} in this model, got {layer.pos_bias_type!r}"
        )
    if layer.mask_value > _MASKED:
        raise ValueError(
            f"att_mask_value={layer.mask_value} would let tokens see what is masked: {_MASKED} or less"
        )


@functools.cache
def _enabled(cls: type[nn.Module], family: type[_Model]) -> type[nn.Module]:
    return type(cls.__name__, (family, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
