"""The language models inside of what trainers and loops prepare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ....ranks.agreement import run_together
from ....ranks.rings import make_rings
from ....ranks.sequence_parallel import SequenceParallel
from ..changing import set_options, take_head
from ..enabling import enable
from ..model import EnabledModel
from .options import Options


def find_enabled(model: nn.Module) -> EnabledModel | None:
    """Return the enabled model inside of wrappers such as DDP and PEFT, or None."""
    for found in _find_models(model):
        for part in (found, found.base_model):
            if isinstance(part, EnabledModel):
                return part
    return None


def enable_inside(model: nn.Module, sp: SequenceParallel, options: Options) -> None:
    """Enable the models of transformers inside of wrappers over the ranks of `sp`, unless this was
    done. Other modules see whole outputs, and need no change.

    Calls without labels return whole outputs: the caller computes its own loss or metrics.

    Raises the errors of `enable`, and ValueError for a model that was enabled by hand for other
    groups, and for adapters that put tokens before a sequence, such as prefix tuning.
    """
    rings = make_rings(sp.process_group, sp.double_group)
    run_together(rings, "the preparation of a model", lambda: _enable_inside(model, sp, options))


def _enable_inside(model: nn.Module, sp: SequenceParallel, options: Options) -> None:
    _check_adapters(model)
    for found in _find_models(model):
        enabled = find_enabled(found)
        if enabled is None:
            enable(found, sp, **options.of_enable)
            enabled = find_enabled(found)
            assert enabled is not None, "enabled above"
            enabled._whole_by_default = True
        elif enabled._whole_by_default:  # by another trainer
            take_head(enabled)
            set_options(enabled, sp, options.balanced, options.of_attention)
        elif enabled._sp is not sp:
            raise ValueError(
                f"this {type(found).__name__} is already enabled, for other groups: pass a model "
                "that is not enabled, since sequence_parallel enables it"
            )


def _find_models(module: nn.Module) -> Iterator[Any]:
    """Yield the models of transformers in a module that are not inside of another one."""
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from _find_models(child)


def _check_adapters(model: nn.Module) -> None:
    for part in model.modules():
        adapters = getattr(part, "peft_config", None)
        for name, config in adapters.items() if isinstance(adapters, dict) else ():
            if getattr(config, "is_prompt_learning", False):
                raise ValueError(
                    f"the adapter {name!r} is {config.peft_type.value}, which puts tokens before "
                    "each sequence, and sequences are cut over ranks: use LoRA"
                )
