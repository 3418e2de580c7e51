"""The models that can be enabled, why others cannot, and their change in place."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ...ranks.sequence_parallel import SequenceParallel
from ..enabling import find_base, put_before, refuse_by_name
from .configs import give_own_configs
from .model import EnabledBase, EnabledCausalLM, EnabledModel, EnabledRotary

_NAMES = (
    *("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "MiniCPM3"),
    *("Gemma2", "Gemma3", "GptOss"),
)
_SUFFIXES = {("Gemma3", "Model"): "TextModel"}  # of a model that takes text alone
_KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}
_BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings with angles that depend on the longest row

_ENABLE_FIRST = "enable the model before another package changes it, or do without"
_REFUSED = {
    "MiniCPMForCausalLM": "the code that comes with its weights does not ask transformers for its "
    "attention; train/export.py without --keep-scalings makes a Llama of a MiniCPM",
}
# functions that packages put around a forward: their modules and names, and what they do
_WRAPPERS = {
    ("trl.trainer.utils", "add_fused_lm_head.<locals>._fused_forward"): "head",
    ("accelerate.utils.operations", "convert_outputs_to_fp32.<locals>.forward"): "autocast",
    ("torch.amp.autocast_mode", "autocast_decorator.<locals>.decorate_autocast"): "autocast",
}


@dataclass(frozen=True)
class Target:
    """The model that `enable` changes."""

    model: Any  # a causal language model, or a model without a head
    enabled: type[EnabledModel]  # the class that is put before the model's own
    tested: bool  # whether the model's family is in the list


def _find_families(suffix: str) -> dict[type[nn.Module], type[nn.Module]]:
    """Return the known models that this transformers has, and the classes of their attention."""
    found = {}
    for name in _NAMES:
        if causal_lm := getattr(transformers, f"{name}ForCausalLM", None):
            module = sys.modules[causal_lm.__module__]
            model = getattr(module, name + _SUFFIXES.get((name, suffix), suffix))
            found[model] = getattr(module, f"{name}Attention")
    return found


_CAUSAL_LMS, _BASES = _find_families("ForCausalLM"), _find_families("Model")
_FAMILIES = _CAUSAL_LMS | _BASES
_BASE_OF = dict(zip(_CAUSAL_LMS, _BASES, strict=True))


def find_target(model: Any, untested: bool) -> Target:
    """Return the parts of `model` to change. Raises TypeError or ValueError if there are none.

    untested  whether models outside the list are accepted
    """
    name = type(model).__name__
    inner = model.base_model if isinstance(model, PreTrainedModel) else None
    if isinstance(inner, EnabledModel):
        raise ValueError(f"this {name} is already enabled, for {inner._sp.size} ranks")
    if inner is not None and not isinstance(model, tuple(_FAMILIES)):
        if isinstance(inner, tuple(_BASES)):
            model = inner  # any head above whole hidden states
        elif untested:
            return _find_untested(model, inner)
    hint = ": call burst_attn_func in the attention of other models"
    if inner is not None:
        hint = ": untested=True compares a small copy of it with the plain one, and then enables it"
    own = next((base for base in _BASES if isinstance(model, base)), None)
    own = own or find_base(model, EnabledModel, _CAUSAL_LMS, _REFUSED, "transformers'", hint)
    _check_forward(own, model, name)
    base = _BASE_OF.get(own, own)
    if not _has_forward_of(base, model.base_model):
        raise TypeError(
            f"the {type(model.base_model).__name__} of this {name} has another forward than "
            f"transformers' {base.__name__}, which may need whole sequences"
        )
    _check_layers(model)
    for layer in model.base_model.layers:
        attention = getattr(layer, "self_attn", None)
        if not _has_forward_of(_FAMILIES[own], attention):
            of_peft = type(attention).__module__.startswith("peft.")
            hint = "use LoRA instead of this adapter" if of_peft else _ENABLE_FIRST
            raise TypeError(
                f"a layer's attention, a {type(attention).__name__}, has another forward than "
                f"transformers' {_FAMILIES[own].__name__}, which asks for its attention by name: "
                f"{hint}"
            )
    return _make_target(model, tested=True)


def _find_untested(model: Any, inner: Any) -> Target:
    """Return the parts of a model outside the list."""
    is_causal_lm = model.get_output_embeddings() is not None
    part = model if is_causal_lm else inner
    own = next(base for base in type(part).__mro__ if base.__module__.startswith("transformers."))
    refuse_by_name(part, _REFUSED)
    _check_forward(own, part, type(part).__name__)
    for module in part.modules():
        if module is not part and "forward" in vars(module):
            raise TypeError(
                f"a {type(module).__name__} of this {type(part).__name__} has its own forward, "
                "which the comparison of small copies would not see"
            )
    _check_layers(part)
    return _make_target(part, tested=False)


def _make_target(model: Any, tested: bool) -> Target:
    """Raises ValueError if the loss of a causal language model is not transformers' own."""
    has_head = model.base_model is not model
    if has_head and model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"this {type(model).__name__} has another loss than transformers' ForCausalLMLoss, "
            "which would be lost"
        )
    return Target(model, EnabledCausalLM if has_head else EnabledBase, tested)


def _check_layers(model: Any) -> None:
    """Raise TypeError for layers that are not attention over all earlier tokens or a window."""
    others = {*(getattr(model.config, "layer_types", None) or ())} - _KINDS_OF_LAYERS
    if others:
        raise TypeError(
            f"this {type(model).__name__} has layers of {' and '.join(sorted(others))}: expected "
            "layers of full_attention and sliding_attention; other layers need whole sequences, so "
            "train this model without sequence parallelism"
        )


def _check_forward(own: type[nn.Module], model: Any, name: str) -> None:
    """Raise TypeError if the model has another forward than its class in transformers."""
    if not _has_forward_of(own, model):
        raise TypeError(
            f"this {name} has another forward than transformers' {own.__name__}, which would be "
            f"lost: {_ENABLE_FIRST}"
        )


def _has_forward_of(base: type[nn.Module], module: Any) -> bool:
    """Whether the module is a `base` with transformers' forward, in the class and in the object."""
    if not isinstance(module, base):
        return False
    if "forward" in vars(module) and not known_forwards(module):
        return False
    # a function that wraps the class's has its __module__
    place = getattr(base.forward, "__globals__", {}).get("__name__", "")
    is_own = place.startswith("transformers.") and base.forward.__module__ == base.__module__
    return type(module).forward is base.forward and is_own


def known_forwards(module: nn.Module) -> list[str]:
    """Return what was put around the module's forward, in the object: "head" or "autocast", TRL's
    and accelerate's. The list is empty if there is anything else, or another module's forward.
    """
    function: Any = getattr(vars(module).get("forward"), "__func__", None)
    owner: Any = module
    found: list[str] = []
    while function is not None and function is not type(module).forward:
        # not __module__ and __qualname__, which functools.wraps sets to those of the forward
        code = getattr(function, "__code__", None)
        kind = code and _WRAPPERS.get((function.__globals__["__name__"], code.co_qualname))
        if type(function).__name__ == "ConvertOutputsToFp32":
            kind = "autocast"
        if kind is None:
            return []
        found.append(kind)
        if kind == "head":  # it wraps the class's forward by name, and calls this one
            function = inspect.getclosurevars(function).nonlocals["original_forward"]
            owner = getattr(function, "__self__", None)
            function = getattr(function, "__func__", function)
        else:
            function = getattr(function, "__wrapped__", None)
    # a head alone is called with fused_lm_head only, and calls no forward then
    return found if owner is module or found == ["head"] else []


def change_model(
    model: nn.Module, target: Target, sp: SequenceParallel, balanced: bool, options: dict[str, Any]
) -> EnabledModel:
    """Enable the target's model, inside of `model`, and return it."""
    enabled: Any = target.model
    give_own_configs(model, enabled)
    for part in enabled.base_model.modules():
        if _depends_on_length(part):
            part.__class__ = put_before(EnabledRotary, type(part))
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
