"""Families of Hugging Face's models: one entry of FAMILIES for each `model_type`.

An entry says what a family's config.json has besides the fields that all families have, which
hf_config.py reads and writes. A family fits a model if reading what it writes gives the same model.
Weights have the names of transformers' Llama in all families.

To add a family, write its entry, and add it to FAMILIES of tests/test_families.py, which compares
logits with those of transformers, and to OF_FAMILIES of tests/test_export.py. If it computes what
CPM does not, add a field to CPMConfig. Then:

- `read` comes last, and overrides what all families read, such as both biases of attention.
- `write` also returns defaults of transformers' class that would act otherwise, such as a dropout
  or a pad token. Leave these out of `names`: then --accept-field takes them.
- A new entry may fit models that were refused before, which a test may hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bmt_burst import InfLLMV2

from . import hf_windows
from .config import CPMConfig, shortest_pattern
from .hf_sala import SALA_FIELDS, has_mixers, mixers_to_hf, read_mixers
from .rope import LongRope

EXPORTED_CODE = "modeling_burst_minicpm"  # the module in an exported MiniCPM's folder
_BIASES = ("attention_bias", "mlp_bias")


@dataclass(frozen=True)
class Fields:
    """Fields of config.json that some families have.

    names     their names
    read      returns fields of CPMConfig by a config.json without its nulls. Raises ValueError
    write     returns them by a CPMConfig
    required  those that a config.json must have
    """

    names: tuple[str, ...]
    read: Callable[[dict[str, Any]], dict[str, Any]]
    write: Callable[[CPMConfig], dict[str, Any]]
    required: tuple[str, ...] = ()


def _no_reasons(config: CPMConfig) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Family:
    """Models of one `model_type`.

    architecture   the class that computes them
    fields         what their config.json has
    read_windows   returns the windows as fields of CPMConfig, by a config.json with its nulls
    write_windows  returns them as fields of config.json
    biases         which of attention_bias and mlp_bias it has
    always         fields of CPMConfig that are True for all its models
    ties           whether a head is tied to the embeddings if config.json does not say it
    head_dim       the head size if config.json does not say it. None: hidden_size over heads
    refuses        returns fields of a CPMConfig that its code does not compute, with the reasons,
                   as far as config.json has them
    releases_code  whether releases bring their own code
    exported_code  the module that an export brings, if transformers has no such model
    """

    architecture: str
    fields: tuple[Fields, ...] = ()
    read_windows: Callable[[dict[str, Any]], dict[str, Any]] = hf_windows.read_none
    write_windows: Callable[[CPMConfig], dict[str, Any]] = lambda config: {}
    biases: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    ties: bool = False
    head_dim: int | None = None
    refuses: Callable[[CPMConfig], dict[str, str]] = _no_reasons
    releases_code: bool = False
    exported_code: str | None = None

    @property
    def names(self) -> set[str]:
        """The names of config.json's fields that only some families have, and this one."""
        return {name for fields in self.fields for name in fields.names}


def _refuse_odd_heads(config: CPMConfig) -> dict[str, str]:
    """Refuse numbers of heads that transformers' Llama refuses."""
    heads, width = config.num_heads, config.hidden_size
    return {"num_heads": f"{heads}, which do not divide {width}"} if width % heads else {}


def _write_scalings(config: CPMConfig) -> dict[str, Any]:
    return {
        "scale_emb": config.scale_emb,
        "scale_depth": config.scale_depth or config.num_layers**0.5,
        "dim_model_base": config.dim_model_base or config.hidden_size,
    }


_SCALING_NAMES = ("scale_emb", "scale_depth", "dim_model_base")
_SCALINGS = Fields(
    _SCALING_NAMES,
    lambda hf: {name: hf[name] for name in _SCALING_NAMES},
    _write_scalings,
    # without these MiniCPM's own code uses 1, transformers 12, 1.4 and 256
    required=_SCALING_NAMES,
)


def _read_sparse(hf: dict[str, Any]) -> dict[str, Any]:
    if "sparse_config" not in hf:
        return {}
    try:
        return {"sparse": InfLLMV2.from_dict(hf["sparse_config"])}
    except (TypeError, ValueError) as error:
        raise ValueError(f"sparse_config: {error}") from error


_SPARSE = Fields(
    ("sparse_config",),
    _read_sparse,
    lambda config: {"sparse_config": config.infllm.to_dict()} if config.infllm else {},
)
_MIXERS = Fields(SALA_FIELDS, read_mixers, mixers_to_hf)


def _refuse_factors(config: CPMConfig) -> dict[str, str]:
    """Refuse a LongRoPE with a factor that MiniCPM's code does not have."""
    scaling = config.rope_scaling
    if not isinstance(scaling, LongRope):
        return {}
    follows = dataclasses.replace(scaling, attention_factor=None).attention_scale
    if math.isclose(follows, scaling.attention_scale, rel_tol=1e-6):
        return {}
    return {
        "rope_scaling": f"longrope with attention_factor {scaling.attention_scale:.6g} instead of "
        f"{follows:.6g}, which follows from its factor"
    }


def _refuse_short_factors(config: CPMConfig) -> dict[str, str]:
    """Refuse a LongRoPE with several divisors: MiniCPM-SALA's code computes its tables once."""
    scaling = config.rope_scaling
    if not isinstance(scaling, LongRope) or scaling.short_factor == scaling.long_factor:
        return _refuse_factors(config)
    if scaling.extended_length <= scaling.original_length:
        return _refuse_factors(config)
    return {
        "rope_scaling": "longrope with another short_factor, where its code has the long_factor at "
        "every length: give both the same divisors, or export.py --format bmtrain"
    }


_MULTIPLIERS = (
    *("embedding_multiplier", "residual_multiplier"),
    *("logits_scaling", "attention_multiplier"),
)


def _read_multipliers(hf: dict[str, Any]) -> dict[str, Any]:
    values = {name: hf.get(name, 1.0) for name in _MULTIPLIERS}
    for name, value in values.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    embedding, residual, logits, attention = values.values()
    return {
        "scale_emb": embedding,
        "scale_depth": residual * hf["num_hidden_layers"] ** 0.5,
        "dim_model_base": hf["hidden_size"] / logits,
        "softmax_scale": attention,
    }


def _write_multipliers(config: CPMConfig) -> dict[str, Any]:
    scale = config.softmax_scale or config.head_dim**-0.5
    values = (config.scale_emb, config.residual_scale, config.width_scale, scale)
    # CPMConfig's scalings are these times a root, which a product with its inverse rounds
    return {n: float(f"{x:.14g}") for n, x in zip(_MULTIPLIERS, values, strict=True)}


def _read_rotary_layers(hf: dict[str, Any]) -> dict[str, Any]:
    """Return which layers of a SmolLM3 have rotary positions: no_rope_layers has 1 for them."""
    count, every = hf["num_hidden_layers"], hf.get("no_rope_layer_interval", 4)
    if "no_rope_layers" not in hf:
        if type(every) is not int or every < 1:
            raise ValueError(f"no_rope_layer_interval must be a positive int, got {every!r}")
        return {"rotary_pattern": _letters([(i + 1) % every for i in range(count)])}
    layers = hf["no_rope_layers"]
    known = isinstance(layers, list) and all(layer in (0, 1) for layer in layers)
    if not known or len(layers) != count:
        raise ValueError(f"no_rope_layers must be 0 or 1 for each of {count} layers, got {layers}")
    return {"rotary_pattern": _letters(layers)}


def _write_rotary_layers(config: CPMConfig) -> dict[str, Any]:
    # by default transformers pads with token 128,004, whatever the vocabulary
    return {"no_rope_layers": [*map(int, config.rotary_layers)], "pad_token_id": None}


def _letters(rotated: list[Any]) -> str:
    return shortest_pattern("".join("r" if has else "n" for has in rotated))


def _has_smollm_window(hf: dict[str, Any]) -> list[bool]:
    """Return which layers of a SmolLM3 have a window by default: those that are not rotated."""
    pattern = _read_rotary_layers({n: x for n, x in hf.items() if x is not None})["rotary_pattern"]
    return [pattern[i % len(pattern)] == "n" for i in range(hf["num_hidden_layers"])]


def _read_seed_biases(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the biases of a Seed-OSS: attention_bias is for q, k and v only, and on by default."""
    o_bias = hf.get("attention_out_bias", False)
    if type(o_bias) is not bool:
        raise ValueError(f"attention_out_bias must be true or false, got {o_bias!r}")
    return {"qkv_bias": hf.get("attention_bias", True), "o_bias": o_bias}


def _write_seed_biases(config: CPMConfig) -> dict[str, Any]:
    # by default transformers drops a tenth in training, as no model was trained here, and token 1
    # is padding
    off = {"attention_dropout": 0.0, "residual_dropout": 0.0, "pad_token_id": None}
    return {"attention_out_bias": config.o_bias, **off}


# The first one that fits is written, if a model is not of a family that does.
FAMILIES = {
    "llama": Family("LlamaForCausalLM", biases=_BIASES, refuses=_refuse_odd_heads),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        read_windows=hf_windows.read_qwen,
        write_windows=hf_windows.write_qwen,
        always=("qkv_bias",),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        read_windows=hf_windows.read_qwen,
        write_windows=hf_windows.write_qwen,
        biases=("attention_bias",),
        always=("qk_norm",),
        head_dim=128,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        read_windows=hf_windows.read_always,
        write_windows=hf_windows.write_always,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        read_windows=hf_windows.read_by_layer,
        write_windows=hf_windows.write_by_layer,
    ),
    "minicpm": Family(
        "MiniCPMForCausalLM",
        (_SCALINGS, _SPARSE),
        ties=True,
        refuses=_refuse_factors,
        releases_code=True,
        exported_code=EXPORTED_CODE,
    ),
    "minicpm_sala": Family(
        "MiniCPMSALAForCausalLM",
        (_SCALINGS, _SPARSE, _MIXERS),
        ties=True,
        refuses=_refuse_short_factors,
        releases_code=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        (
            Fields(
                ("no_rope_layers", "no_rope_layer_interval"),
                _read_rotary_layers,
                _write_rotary_layers,
            ),
        ),
        read_windows=lambda hf: hf_windows.read_switched(hf, _has_smollm_window),
        write_windows=hf_windows.write_switched,
        biases=_BIASES,
        ties=True,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        (Fields(_MULTIPLIERS, _read_multipliers, _write_multipliers),),
        biases=_BIASES,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        # not its dropouts: --accept-field takes only what no family reads
        (Fields(("attention_out_bias",), _read_seed_biases, _write_seed_biases),),
        biases=_BIASES,
        head_dim=128,
    ),
}


def keeps_scalings(config: CPMConfig) -> bool:
    """Whether a family has the scalings of a model that no Llama computes without them."""
    return has_mixers(config) or config.softmax_scale is not None
