"""config.json of Hugging Face's folders, to CPMConfig and back (docs/weights.md).

`config_to_hf` writes the family that a model was read from, if it still fits, otherwise the first
one that does (hf_families.py). So a Llama whose heads do not divide its hidden size, which
transformers refuses, becomes a Mistral without a window. Other models are refused, and the error
names the fields.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from .config import CPMConfig
from .fields import check_sizes
from .hf_families import FAMILIES, Family
from .hf_fields import check_unknown, find_refused
from .hf_rope import ROPE_FIELDS, longest_to_hf, partial_factors, read_rope, rope_to_hf
from .hf_windows import WINDOW_FIELDS
from .rope import Linear

_SAME_NAME = ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps")
_RENAMED = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
# Names of CPMConfig's fields in config.json
HF_FIELDS = {
    **_RENAMED,
    "tie_embeddings": "tie_word_embeddings",
}
_BIASES = ("attention_bias", "mlp_bias")
# names in config.json that are read for all models
_READ = {
    *("model_type", "head_dim", "hidden_act", "max_position_embeddings"),
    *("tie_word_embeddings", "use_mup", "mup_denominator"),
    *_BIASES,
    *WINDOW_FIELDS,
    *_SAME_NAME,
    *_RENAMED.values(),
    *ROPE_FIELDS,
}
_STEMS = "|".join(family.architecture.removesuffix("ForCausalLM") for family in FAMILIES.values())
_HEADS = "Model|For(CausalLM|(Sequence|Token)Classification|QuestionAnswering)"
_CLASS = re.compile(f"({_STEMS})({_HEADS})", re.IGNORECASE)  # older files have LLaMAForCausalLM
_NOTES = ("init_std", "max_position_embeddings", "family")  # fields that change no result
_PATTERNS = ("window_pattern", "rotary_pattern")


def config_from_hf(hf: dict[str, Any], accept: Collection[str] = ()) -> CPMConfig:
    """Make a CPMConfig from a config.json.

    `accept` names fields that are left out of account, though they are unknown. Raises ValueError
    if CPM does not compute that model, and for other unknown fields (hf_fields.py).
    """
    hf = {"model_type": _by_architecture(hf), **hf}
    whole, hf = hf, {name: value for name, value in hf.items() if value is not None}
    _refuse_others(hf)
    family = FAMILIES[hf["model_type"]]
    check_unknown(whole, {*_READ, *family.names, *_own_code(hf)}, accept)
    theta, scaling = read_rope(hf, computes_once=_has_released_code(hf))
    required = {*_SAME_NAME, *_RENAMED.values()} - {"num_key_value_heads"}
    required |= {name for fields in family.fields for name in fields.required}
    check_sizes(hf, required, {*_SAME_NAME, *_RENAMED.values(), "head_dim"} - {"rms_norm_eps"})
    for name in {"tie_word_embeddings", *_BIASES} & hf.keys():
        if type(hf[name]) is not bool:
            raise ValueError(f"{name} must be true or false, got {hf[name]!r}")
    heads, has_bias = hf["num_attention_heads"], hf.get("attention_bias", False)
    values = {
        **{name: hf[name] for name in _SAME_NAME},
        "num_kv_heads": heads,
        **{name: hf[theirs] for name, theirs in _RENAMED.items() if theirs in hf},
        "head_dim": hf.get("head_dim", family.head_dim or hf["hidden_size"] // heads),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": hf.get("tie_word_embeddings", family.ties),
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "mlp_bias": hf.get("mlp_bias", False),
        "max_position_embeddings": hf.get("max_position_embeddings"),
        "family": hf["model_type"],
        **dict.fromkeys(family.always, True),
        **family.read_windows(whole),
    }
    for fields in family.fields:
        values |= fields.read(hf)
    return CPMConfig(**values)


def _by_architecture(hf: dict[str, Any]) -> str | None:
    """Return the model_type of a config.json that lacks it, as MiniCPM 1's and 2's do."""
    said = hf.get("architectures")
    return next((kind for kind, family in FAMILIES.items() if said == [family.architecture]), None)


def _refuse_others(hf: dict[str, Any]) -> None:
    """Refuse models that CPM does not compute. Raises ValueError."""
    kind = hf.get("model_type")
    family = (FAMILIES.get(kind) if isinstance(kind, str) else None) or Family("")
    is_known = bool(family.architecture)
    scales, layers = "scale_emb" in family.names, hf.get("num_hidden_layers")
    partial = partial_factors(hf)
    unsupported = {
        "model_type": not is_known,
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
        **{name: bool(hf.get(name)) and name not in family.biases for name in _BIASES},
        "sparse_config": "sparse_config" in hf and "sparse_config" not in family.names,
        "use_mup": hf.get("use_mup", scales) != scales,
        "mup_denominator": hf.get("mup_denominator", layers) != layers,
        "partial_rotary_factor": any(factor != 1 for factor in partial),
    }
    effects = find_refused({name: x for name, x in hf.items() if name not in family.names})
    refused = [name for name, is_refused in unsupported.items() if is_refused] + [*effects]
    if refused:
        shown = hf | {"partial_rotary_factor": partial}
        values = {name: shown.get(name) for name in refused}
        known = ", ".join(FAMILIES)
        expected = f"a {kind} that CPM computes" if is_known else f"one of {known}"
        why = "; ".join(dict.fromkeys(effects.values()))
        raise ValueError(
            f"expected {expected}, got unsupported fields {values}{f' ({why})' if why else ''}"
        )


def _own_code(hf: dict[str, Any]) -> set[str]:
    """Return which of the fields that name code name only that of the families read here. Other
    code may compute another model: gte-Qwen2's lets tokens attend to later ones, and no other field
    says so.
    """
    code, classes = hf.get("auto_map"), hf.get("architectures") or []
    own = {"auto_map", "architectures"}
    has_models = any(name.startswith("AutoModel") for name in code or ())
    if has_models and not FAMILIES[hf["model_type"]].releases_code:
        own.remove("auto_map")
    if not all(_CLASS.fullmatch(str(name)) for name in classes):
        own.remove("architectures")
    return own


def _has_released_code(hf: dict[str, Any]) -> bool:
    """Whether a release's code computes a model, and not the code that exports bring."""
    family, code = FAMILIES[hf["model_type"]], hf.get("auto_map")
    classes = [str(name) for name in code.values()] if isinstance(code, dict) else []
    exported = family.exported_code
    return family.releases_code and not (exported and any(exported in name for name in classes))


def config_to_hf(config: CPMConfig, longest: int | None = None) -> dict[str, Any]:
    """Return the content of config.json for `config`.

    `longest` is the number of tokens of the longest sequence. If `config` was made for longer ones,
    its own number is written instead. If it was made for shorter ones, and its rotary scaling has
    no original length, its own number is written as original_max_position_embeddings.

    Raises ValueError if no Hugging Face model fits, and names the fields that the nearest one does
    not have. With MiniCPM's scalings these are for example windows, biases, and norms of q and k.
    """
    kinds = [kind for kind in (config.family, *FAMILIES) if kind in FAMILIES]
    missing: dict[str, list[str]] = {}
    for kind in kinds:
        hf = _write(config, kind, longest)
        missing[kind] = _find_missing(config, hf)
        if not missing[kind]:
            return hf
    fewest = min(map(len, missing.values()))
    nearest: dict[str, list[str]] = {}
    for kind, fields in missing.items():
        if len(fields) == fewest:
            nearest.setdefault(", ".join(fields), []).append(kind)
    found = (f"{', '.join(kinds)} without {fields}" for fields, kinds in nearest.items())
    raise ValueError(f"no Hugging Face model is like this one. The nearest: {'; '.join(found)}")


def _find_missing(config: CPMConfig, hf: dict[str, Any]) -> list[str]:
    """Return what a model has, and the model in config.json that was written for it has not."""
    family = FAMILIES[hf["model_type"]]
    reasons = family.refuses(config)
    code = {"auto_map": {"AutoModel": family.exported_code}} if family.exported_code else {}
    ours, theirs = _describe(config), _describe(config_from_hf(hf | code))
    differ = {name: str(getattr(config, name)) for name in ours if ours[name] != theirs[name]}
    return [f"{name}={why}" for name, why in {**differ, **reasons}.items()]


def _describe(config: CPMConfig) -> dict[str, Any]:
    """Return what a model computes, equal for all ways to say it."""
    values = {n: x for n, x in config.to_dict().items() if n not in (*_NOTES, *_PATTERNS)}
    return values | {
        # sums and products of other fields, which are rounded
        "scale_depth": f"{config.residual_scale:.12g}",
        "dim_model_base": f"{config.width_scale:.12g}",
        "softmax_scale": f"{config.softmax_scale or config.head_dim**-0.5:.12g}",
        "window": config.windows,
        "mixers": config.mixer_of_layers,
        "attention_rotary": [config.rotary_layers[layer] for layer in config.attention_layers],
    }


def _write(config: CPMConfig, kind: str, longest: int | None) -> dict[str, Any]:
    """Return the config.json of a family, without what it does not have."""
    family = FAMILIES[kind]
    original = config.max_position_embeddings or 0
    most = longest_to_hf(
        config.rope_scaling, family.releases_code, max(longest or 0, original) or None
    )
    hf: dict[str, Any] = {
        "model_type": kind,
        "architectures": [family.architecture],
        **{name: getattr(config, name) for name in _SAME_NAME},
        **{theirs: getattr(config, name) for name, theirs in _RENAMED.items()},
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        **rope_to_hf(config, most),
        **family.write_windows(config),
    }
    biases = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    hf |= {name: biases[name] for name in family.biases}
    for fields in family.fields:
        hf |= fields.write(config)
    if most is not None:
        hf["max_position_embeddings"] = most
        if 0 < original < most and isinstance(config.rope_scaling, Linear | None):
            hf["original_max_position_embeddings"] = original
    return hf
