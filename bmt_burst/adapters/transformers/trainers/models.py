"""The language models inside of what trainers and loops prepare."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ....ranks.agreement import run_together
from ....ranks.sequence_parallel import SequenceParallel
from ..configs import ask_for_own_attention
from ..enabling import enable
from ..model import Enabled, EnabledModel
from ..requests import WantedOutputs
from ..supported import set_options, take_head
from .options import Options

# packages with modules that return the outputs of a model as they are
_READ_NOTHING = {"torch", "accelerate", "peft", "transformers", "huggingface_hub"}


def find_enabled(model: nn.Module, inside: bool = True) -> EnabledModel | None:
    """Return the enabled model inside of wrappers such as DDP and PEFT, or None. With `inside`, it
    may also be inside of a module of unknown code.
    """
    for found, is_inside in _find_models(model):
        for part in (found, found.base_model):
            if isinstance(part, EnabledModel) and (inside or not is_inside):
                return part
    return None


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Let the enabled models inside of `model` compute as plain ones, on each rank alone. So they
    take caches, and generate.

        with plain(trainer.model):
            tokens = trainer.model.generate(prompts, max_new_tokens=64)

    A model that is not enabled does not change. Ranks may have other inputs, and take other steps,
    except under FSDP2: there all ranks must generate together, and take as many steps. A backward
    that computes layers again must end in this context.
    """
    changed = [x for x in model.modules() if isinstance(x, Enabled) and not x._is_plain]
    with ExitStack() as stack:
        for x in changed:
            x._is_plain = True
            if isinstance(x, EnabledModel):
                stack.enter_context(ask_for_own_attention(x))
        try:
            yield
        finally:
            for x in changed:
                x._is_plain = False


def enable_inside(model: nn.Module, sp: SequenceParallel, options: Options) -> None:
    """Enable the models of transformers inside of wrappers over the ranks of `sp`, if they are not.

    Calls without labels return whole outputs: the caller computes its own loss or metrics. Calls
    inside of other modules always return them, unless `loss_only` is among the options.

    Raises the errors of `enable`, and ValueError for models of other groups and some adapters.
    """
    doing = "the preparation of a model"
    run_together(sp.rings, doing, lambda: _enable_inside(model, sp, options))


def _enable_inside(model: nn.Module, sp: SequenceParallel, options: Options) -> None:
    _check_adapters(model)
    for found, is_inside in _find_models(model):
        enabled = find_enabled(found)
        if enabled is None:
            balanced, untested = options.balanced, options.untested
            enable(found, sp, balanced=balanced, untested=untested, **options.of_attention)
            enabled = find_enabled(found)
            assert enabled is not None, "enabled above"
            enabled._without_targets = WantedOutputs.WHOLE
        elif enabled._without_targets is not None:  # by another trainer
            take_head(enabled)
            set_options(enabled, sp, options.balanced, options.of_attention)
        elif enabled._sp is not sp:
            raise ValueError(
                f"this {type(found).__name__} is already enabled, for other groups: pass a model "
                "that is not enabled, since sequence_parallel enables it"
            )
        enabled._folds = options.fold
        if enabled._without_targets is not None:
            enabled._with_targets = WantedOutputs.WHOLE_FOR_OTHERS if is_inside else None
            if options.loss_only:
                enabled._with_targets = WantedOutputs.LOSS_ONLY


def _find_models(module: nn.Module, is_inside: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield the models of transformers in a module that are not inside of another one, and whether
    they are inside of a module of unknown code, which may read their outputs.
    """
    if isinstance(module, PreTrainedModel):
        yield module, is_inside
    else:
        packages = {base.__module__.partition(".")[0] for base in type(module).__mro__}
        is_inside |= not packages <= _READ_NOTHING | sys.stdlib_module_names
        for child in module.children():
            yield from _find_models(child, is_inside)


def _check_adapters(model: nn.Module) -> None:
    for part in model.modules():
        adapters = getattr(part, "peft_config", None)
        for name, config in adapters.items() if isinstance(adapters, dict) else ():
            if getattr(config, "is_prompt_learning", False):
                raise ValueError(
                    f"the adapter {name!r} is {config.peft_type.value}, which puts tokens before "
                    "each sequence, and sequences are cut over ranks: use LoRA"
                )
