"""The change of a model in place."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...ranks.sequence_parallel import SequenceParallel
from ..enabling import put_before
from .configs import give_own_configs
from .model import EnabledModel, EnabledRotary
from .supported import Target, known_forwards

# rotary embeddings with angles that depend on the longest sequence
_BY_LENGTH = ("dynamic", "longrope")


def change_model(
    model: nn.Module, target: Target, sp: SequenceParallel, balanced: bool, options: dict[str, Any]
) -> EnabledModel:
    """Enable the target's model, inside of `model`, and return it."""
    give_own_configs(model, target.model, target.base)
    for part in target.base.modules():
        if _depends_on_length(part):
            part.__class__ = put_before(EnabledRotary, type(part))
    enabled: Any = target.model
    forwards = known_forwards(enabled)
    enabled.__class__ = put_before(target.enabled, type(enabled))
    assert isinstance(enabled, EnabledModel)
    set_options(enabled, sp, balanced, options)
    enabled._with_targets = enabled._without_targets = None
    vars(enabled).pop("_original_forward", None)  # accelerate's unwrap_model would set it
    forward = vars(enabled).pop("forward", None)
    enabled._forward = forward if "autocast" in forwards else None
    enabled._fused = forward if "head" in forwards else None
    return enabled


def set_options(
    enabled: EnabledModel, sp: SequenceParallel, balanced: bool, options: dict[str, Any]
) -> None:
    """Let an enabled model run over the ranks of `sp`, with other options."""
    enabled._sp, enabled._balanced, enabled._options = sp, balanced, options


def take_head(enabled: EnabledModel) -> None:
    """Take the fused head that a second trainer of TRL put on an enabled model. Raises TypeError
    for another forward.
    """
    if "forward" not in vars(enabled):
        return
    forwards = known_forwards(enabled)
    if not forwards:
        raise TypeError(
            f"this enabled {type(enabled).__name__} has a forward that another package set: remove "
            "it, or pass a model that is not enabled"
        )
    if "head" in forwards:
        enabled._fused = vars(enabled).pop("forward")
        vars(enabled).pop("_original_forward", None)


def _depends_on_length(part: nn.Module) -> bool:
    rope_type = getattr(part, "rope_type", None)
    types = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)  # a kind of layer's
    return any(kind in _BY_LENGTH for kind in types)
