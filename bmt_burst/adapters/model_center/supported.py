"""The models that can be enabled, and why others cannot."""

from __future__ import annotations

from typing import Any

import model_center.model as zoo
from model_center.layer import Attention
from torch import nn

from ..enabling import find_base
from .biased import CPM1, CPM3
from .models import OPT, Bert, EnabledModel, GPTj, LearnedPositionModel, Llama, Roberta

_MASKED = -1e4  # softmax makes 0 of this score

_FAMILIES: dict[type[nn.Module], type[EnabledModel]] = {
    zoo.Llama: Llama,
    zoo.GPTj: GPTj,
    zoo.GPT2: LearnedPositionModel,
    zoo.OPT: OPT,
    zoo.Bert: Bert,
    zoo.Roberta: Roberta,
    zoo.CPM1: CPM1,
    zoo.CPM3: CPM3,
}

_REFUSED = {
    "CPM2": "its decoder attends to another sequence",
    "T5": "its decoder attends to another sequence",
    "GLM": "it reads its prefix and its positions off the whole input",
    "Longformer": "its attention is sparse, over chunks of a sequence that it pads",
    "ViT": "it makes its sequence inside, from an image",
}


def find_family(model: Any) -> type[EnabledModel]:
    """Return the class that enables `model`. Raises ValueError or TypeError if none can."""
    base = find_base(model, EnabledModel, _FAMILIES, _REFUSED, "ModelCenter's")
    if type(model).forward is not base.forward or "forward" in vars(model):
        raise TypeError(
            f"this {type(model).__name__} overrides the forward of {base.__name__}, which would "
            "be lost"
        )
    return _FAMILIES[base]


def check_layer(layer: Attention, family: type[EnabledModel]) -> None:
    """Raise TypeError or ValueError if the attention of this layer cannot be replaced."""
    if type(layer) is not Attention or "forward" in vars(layer):
        raise TypeError(
            "a layer overrides the forward of Attention, which would be lost: "
            f"{type(layer).__name__}"
        )
    if layer.pos_bias_type not in family.pos_bias_types:
        expected = " or ".join(map(repr, family.pos_bias_types))
        raise ValueError(
            f"pos_bias_type must be {expected} in this model, got {layer.pos_bias_type!r}"
        )
    if layer.mask_value > _MASKED:
        raise ValueError(
            f"att_mask_value must be {_MASKED} or less, so that tokens do not see what is masked, "
            f"got {layer.mask_value}"
        )
