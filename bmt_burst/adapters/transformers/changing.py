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
    model: nn.Module,
    target: Target,
    sp: SequenceParallel,
    balanced: bool,
    options: dict[str, Any],
) -> EnabledModel:
    """Enable the target's model, inside of `model`, and return it.

    options  those of burst_attn_func
    """
    give_own_configs(model, target.model, target.base)
    for part in target.base.modules():
        if _depends_on_length(part):
            part.__class__ = put_before(EnabledRotary, type(part))
    enabled: Any = target.model
    forwards = known_forwards(enabled)
    enabled.__class__ = put_before(target.enabled, type(enabled))
    assert isinstance(enabled, EnabledModel)
    enabled._sp, enabled._balanced, enabled._options = sp, balanced, options
    enabled._whole_by_default = False
    vars(enabled).pop("_original_forward", None)  # accelerate's unwrap_model would set it
    forward = vars(enabled).pop("forward", None)
    enabled._forward = forward if "autocast" in forwards else None
    enabled._fused = forward if "head" in forwards else None
    return enabled


def _depends_on_length(part: nn.Module) -> bool:
    rope_type = getattr(part, "rope_type", None)
    types = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)  # a kind of layer's
    return any(kind in _BY_LENGTH for kind in types)
