"""The models that can be enabled, and why others cannot."""

from __future__ import annotations

import sys
from typing import Any

import transformers
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from ..enabling import find_base
from .model import EnabledModel

_NAMES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "MiniCPM3", "Gemma2", "GptOss")


def _find_families() -> dict[type[nn.Module], type[nn.Module]]:
    """Return the known models that this transformers has, and the classes of their attention."""
    found = {}
    for name in _NAMES:
        if model := getattr(transformers, f"{name}ForCausalLM", None):
            found[model] = getattr(sys.modules[model.__module__], f"{name}Attention")
    return found


_FAMILIES = _find_families()

_REFUSED = {
    "MiniCPMForCausalLM": "the code that comes with its weights does not ask transformers for its "
    "attention; train/export.py without --keep-scalings makes a Llama of a MiniCPM",
}


def check_model(model: Any) -> None:
    """Raise TypeError or ValueError if `model` cannot be enabled."""
    name = type(model).__name__
    hint = ": call burst_attn_func in the attention of other models"
    base = find_base(model, EnabledModel, _FAMILIES, _REFUSED, "transformers'", hint)
    if not _has_forward_of(base, model):
        raise TypeError(
            f"this {name} has another forward than transformers' {base.__name__}, which would be "
            "lost"
        )
    for layer in model.model.layers:
        attention = getattr(layer, "self_attn", None)
        if not _has_forward_of(_FAMILIES[base], attention):
            raise TypeError(
                f"a layer's attention, a {type(attention).__name__}, has another forward than "
                f"transformers' {_FAMILIES[base].__name__}, which asks for its attention by name"
            )
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"this {name} has another loss than transformers' ForCausalLMLoss, which would be lost"
        )


def _has_forward_of(base: type[nn.Module], module: Any) -> bool:
    """Whether the module is a `base` with the forward that transformers defines. Some packages
    replace the forward in the class.
    """
    if not isinstance(module, base) or "forward" in vars(module):
        return False
    return type(module).forward is base.forward and base.forward.__module__ == base.__module__
