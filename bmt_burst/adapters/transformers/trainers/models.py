"""The language models inside of what trainers and loops prepare."""

from __future__ import annotations

from typing import Any

from torch import nn

from ....ranks.sequence_parallel import SequenceParallel
from ..enabling import enable
from ..model import EnabledModel
from .options import Switch


def find_inner(model: nn.Module) -> Any:
    """Return the model inside of wrappers: torch.compile, DDP and PEFT.

    Raises ValueError for adapters that put tokens before a sequence, as prefix tuning.
    """
    found: Any = model
    while True:
        if (inner := getattr(found, "_orig_mod", None)) is not None:
            found = inner
        elif isinstance(found, nn.parallel.DistributedDataParallel):
            found = found.module
        elif hasattr(found, "get_base_model") and hasattr(found, "peft_config"):
            _check_adapters(found)
            found = found.get_base_model()
        else:
            return found


def find_enabled(model: nn.Module) -> EnabledModel | None:
    """Return the enabled model inside of wrappers, or None."""
    inner = find_inner(model)
    for part in (inner, getattr(inner, "base_model", None)):
        if isinstance(part, EnabledModel):
            return part
    return None


def enable_inside(model: nn.Module, sp: SequenceParallel, switch: Switch) -> None:
    """Enable the model inside of wrappers over the ranks of `sp`, unless this was done.

    Without labels its outputs are whole, since who passes none computes a loss or metrics of them.

    Raises the errors of `enable`, and ValueError for a model that was enabled by hand.
    """
    inner = find_inner(model)
    enabled = find_enabled(inner)
    if enabled is None:
        enable(inner, sp, **switch.of_enable)
        enabled = find_enabled(inner)
        assert enabled is not None, "enabled above"
        enabled._whole_by_default = True
    elif enabled._sp is not sp:
        raise ValueError(
            f"this {type(inner).__name__} is already enabled, for other groups: pass a model that "
            "is not enabled, since sequence_parallel enables it"
        )


def _check_adapters(model: Any) -> None:
    for name, config in model.peft_config.items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"the adapter {name!r} is {config.peft_type.value}, which puts tokens before each "
                "sequence, and sequences are cut over ranks: use LoRA"
            )
