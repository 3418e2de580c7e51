"""The configurations inside an enabled model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

ATTENTION = "bmt_burst"  # the name under which transformers knows attention over ranks


class _LayerConfig:
    """The configuration of a module inside an enabled model, which asks for ATTENTION.

    All other attributes are those of `config`, perhaps the model's own. It still asks for an
    attention of transformers, so that other models can be made from it.
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


def give_own_configs(model: nn.Module, enabled: Any) -> None:
    """Let the base model of `enabled`, inside of `model`, ask for ATTENTION, without a change in
    other models that share their configurations.
    """
    known: dict[int, Any] = {}  # modules that share a configuration still share one
    inside = {*enabled.base_model.modules()}
    for module, config in _find_configs(model):
        own = copy.deepcopy(config, known)
        module.config = _LayerConfig(own) if module in inside else own
    enabled._attention = enabled.config._attn_implementation


@contextmanager
def ask_for_own_attention(model: nn.Module) -> Iterator[None]:
    """Let the modules of an enabled model ask for an attention of transformers in this context."""
    given = [(x, config) for x, config in _find_configs(model) if isinstance(config, _LayerConfig)]
    for module, config in given:
        module.config = config.config
    try:
        yield
    finally:
        for module, config in given:
            module.config = config


def check_configs(model: Any) -> None:
    """Raise ValueError if a module of an enabled model asks for the attention of one rank."""
    for module, config in _find_configs(model):
        outside = module is model and model.has_head
        if config._attn_implementation != (model._attention if outside else ATTENTION):
            raise ValueError(
                f"the configuration of a {type(module).__name__} asks for "
                f"{config._attn_implementation!r} attention, which would see only this rank's "
                "tokens: neither replace modules and configurations of an enabled model nor set "
                "their _attn_implementation"
            )


def find_window(config: Any) -> int | None:
    """Return the window of a model's layers, or None if all of them see whole documents."""
    kinds = getattr(config, "layer_types", None)
    has_windows = kinds is None or "sliding_attention" in kinds
    return getattr(config, "sliding_window", None) if has_windows else None


def _find_configs(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the modules that have a configuration, each with its configuration."""
    found = ((module, vars(module).get("config")) for module in model.modules())
    return [
        (module, config)
        for module, config in found
        if isinstance(config, PreTrainedConfig | _LayerConfig)
    ]
