"""The configurations inside an enabled model."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
)

from .attention import ATTENTION


class _LayerConfig:
    """The configuration of a module inside an enabled model, which names ATTENTION.

    All else is read from `config`, and written to it. That one may be the model's own, and other
    models can be made of it, since it names an attention of transformers.
    """

    _attn_implementation = ATTENTION

    def __init__(self, config: PreTrainedConfig):
        object.__setattr__(self, "config", config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.config, name, value)

    def __reduce__(self) -> tuple:
        return _LayerConfig, (self.config,)


def _give_own_configs(model: PreTrainedModel) -> None:
    """Let the modules inside `model` name their attention, without other models that have the same
    configurations.

    Modules that share a configuration still do. A model need not have that of its layers, which may
    come from elsewhere.
    """
    known: dict[int, Any] = {}
    for module, config in _configs(model):
        own = copy.deepcopy(config, known)
        module.config = own if module is model else _LayerConfig(own)
    model._attention = model.config._attn_implementation


def _check_configs(model: PreTrainedModel) -> None:
    """Raise ValueError if a module would ask for another attention, which sees this rank's tokens
    alone.
    """
    for module, config in _configs(model):
        if config._attn_implementation != (model._attention if module is model else ATTENTION):
            raise ValueError(
                f"the configuration of a {type(module).__name__} asks for {config._attn_implementation!r} attention, "
                "which would see this rank's tokens alone: neither replace modules and configurations of an enabled "
                "model nor set their _attn_implementation"
            )


def _configs(model: PreTrainedModel) -> list[tuple[nn.Module, Any]]:
    """The modules that have a configuration, each with its own."""
    found = ((module, vars(module).get("config")) for module in model.modules())
    return [
        (module, config)
        for module, config in found
        if isinstance(config, PreTrainedConfig | _LayerConfig)
    ]
