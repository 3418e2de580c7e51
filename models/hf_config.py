"""config.json of Hugging Face's folders, to CPMConfig and back (docs/pretraining.md).

`config_to_hf` writes the first model type that fits a CPMConfig. A Mistral without a window becomes
a Llama if its heads divide its hidden size, as transformers requires of Llamas. Other models are
refused, and the error names the field.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection
from typing import Any

from bmt_burst import InfLLMV2

from .config import CPMConfig
from .fields import check_sizes
from .hf_fields import check_unknown, find_refused
from .hf_rope import ROPE_FIELDS, longest_to_hf, partial_factors, read_rope, rope_to_hf
from .hf_sala import ARCHITECTURE, KIND, SALA_FIELDS, has_mixers, mixers_to_hf, read_mixers
from .rope import Linear, LongRope, RopeScaling

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
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    KIND: ARCHITECTURE,
}
MINICPMS = ("minicpm", KIND)  # models with MiniCPM's scalings
EXPORTED_CODE = "modeling_burst_minicpm"  # the module in an exported MiniCPM's folder
_QWEN = ("qwen2", "qwen3")
# models with windows -> the fields that say which layers have one
_WINDOWED = {"mistral": set(), "ministral": {"layer_types"}}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_SCALINGS = ("scale_emb", "scale_depth", "dim_model_base")
_QWEN3_HEAD_DIM = 128  # if a Qwen3's config.json does not say it
# names in config.json that are read for all models, and for some
_READ = {
    *("model_type", "head_dim", "hidden_act", "max_position_embeddings"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("sparse_config", "use_mup", "mup_denominator"),
    *_SAME_NAME,
    *_RENAMED.values(),
    *ROPE_FIELDS,
}
_STEMS = "|".join(name.removesuffix("ForCausalLM") for name in _ARCHITECTURES.values())
_HEADS = "Model|For(CausalLM|(Sequence|Token)Classification|QuestionAnswering)"
_CLASS = re.compile(f"({_STEMS})({_HEADS})", re.IGNORECASE)  # older files have LLaMAForCausalLM
_READ_BY = {"minicpm": _SCALINGS, KIND: (*_SCALINGS, *SALA_FIELDS)}


def config_from_hf(hf: dict[str, Any], accept: Collection[str] = ()) -> CPMConfig:
    """Make a CPMConfig from a config.json.

    `accept` names fields that are left out of account, though they are unknown. Raises ValueError
    if CPM does not compute that model, and for other unknown fields (hf_fields.py).
    """
    hf = {"model_type": _by_architecture(hf), **hf}
    whole, hf = hf, {name: value for name, value in hf.items() if value is not None}
    _refuse_others(hf)
    read = {*_READ, *_READ_BY.get(hf["model_type"], ()), *_own_code(hf)}
    check_unknown(whole, read, accept)
    theta, scaling = read_rope(hf, computes_once=_has_code_of_minicpm(hf))
    required = {*_SAME_NAME, *_RENAMED.values()} - {"num_key_value_heads"}
    if hf["model_type"] in MINICPMS:
        # without these MiniCPM's own code uses 1, transformers 12, 1.4 and 256
        required |= {*_SCALINGS}
    check_sizes(hf, required, {*_SAME_NAME, *_RENAMED.values(), "head_dim"} - {"rms_norm_eps"})
    for name in {"tie_word_embeddings", "attention_bias", "mlp_bias"} & hf.keys():
        if type(hf[name]) is not bool:
            raise ValueError(f"{name} must be true or false, got {hf[name]!r}")
    heads, kind = hf["num_attention_heads"], hf["model_type"]
    same = (*_SAME_NAME, *_SCALINGS) if kind in MINICPMS else _SAME_NAME
    renamed = {name: hf[theirs] for name, theirs in _RENAMED.items() if theirs in hf}
    head_dim = _QWEN3_HEAD_DIM if kind == "qwen3" else hf["hidden_size"] // heads
    return CPMConfig(
        **{name: hf[name] for name in same},
        **{"num_kv_heads": heads, **renamed},
        head_dim=hf.get("head_dim", head_dim),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=hf.get("tie_word_embeddings", kind in MINICPMS),
        qkv_bias=kind == "qwen2" or hf.get("attention_bias", False),
        o_bias=kind != "qwen2" and hf.get("attention_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
        qk_norm=kind == "qwen3",
        max_position_embeddings=hf.get("max_position_embeddings"),
        sparse=_sparse(hf),
        **(_qwen_windows(whole) if kind in _QWEN else _windows(whole)),
        **read_mixers(hf),
    )


def _by_architecture(hf: dict[str, Any]) -> str | None:
    """Return the model_type of a config.json that lacks it, as MiniCPM 1's and 2's do."""
    said = hf.get("architectures")
    return next((kind for kind, name in _ARCHITECTURES.items() if said == [name]), None)


def _refuse_others(hf: dict[str, Any]) -> None:
    """Refuse models that CPM does not compute. Raises ValueError."""
    kind = hf.get("model_type")
    scales, layers = kind in MINICPMS, hf.get("num_hidden_layers")
    partial = partial_factors(hf)
    unsupported = {
        "model_type": not isinstance(kind, str) or kind not in _ARCHITECTURES,
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(hf.get("attention_bias")) and kind not in ("llama", "qwen3"),
        "mlp_bias": bool(hf.get("mlp_bias")) and kind != "llama",
        "sparse_config": hf.get("sparse_config") is not None and not scales,
        "use_mup": hf.get("use_mup", scales) != scales,
        "mup_denominator": hf.get("mup_denominator", layers) != layers,
        "partial_rotary_factor": any(factor != 1 for factor in partial),
    }
    effects = find_refused(hf)
    refused = [name for name, is_refused in unsupported.items() if is_refused] + [*effects]
    if refused:
        shown = hf | {"partial_rotary_factor": partial}
        values = {name: shown.get(name) for name in refused}
        known = ", ".join(_ARCHITECTURES)
        expected = f"one of {known}" if unsupported["model_type"] else f"a {kind} that CPM computes"
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
    # OpenBMB releases its models with their code
    has_models = any(name.startswith("AutoModel") for name in code or ())
    if has_models and hf["model_type"] not in MINICPMS:
        own.remove("auto_map")
    if not all(_CLASS.fullmatch(str(name)) for name in classes):
        own.remove("architectures")
    return own


def _has_code_of_minicpm(hf: dict[str, Any]) -> bool:
    """Whether OpenBMB's code computes a model, and not the code that exports bring."""
    code = hf.get("auto_map")
    classes = [str(name) for name in code.values()] if isinstance(code, dict) else []
    return hf["model_type"] in MINICPMS and not any(EXPORTED_CODE in name for name in classes)


def _sparse(hf: dict[str, Any]) -> InfLLMV2 | None:
    """Return sparse_config. Raises ValueError if CPM does not compute such sparse attention."""
    if (said := hf.get("sparse_config")) is None:
        return None
    try:
        return InfLLMV2.from_dict(said)
    except (TypeError, ValueError) as error:
        raise ValueError(f"sparse_config: {error}") from error


def _windows(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the window of a config.json and its layers, as fields of CPMConfig.

    `sliding_window` counts tokens as CPMConfig's window does. Raises ValueError if it is ambiguous
    which layers have it.
    """
    window, kind, layers = hf.get("sliding_window"), hf["model_type"], hf.get("layer_types")
    if kind not in _WINDOWED and (window is None or hf.get("use_sliding_window") is False):
        if layers is not None and _pattern(layers, hf["num_hidden_layers"]).strip("f"):
            raise ValueError(
                f"layer_types give layers of this {kind} a window, but sliding_window is off"
            )
        return {}
    if "sliding_window" not in hf:
        raise ValueError("config.json lacks ['sliding_window']: expected tokens, or null for none")
    names = "use_sliding_window", "max_window_layers", "layer_types"
    said = {name: hf[name] for name in names if hf.get(name) is not None}
    if kind not in _WINDOWED or said.keys() - _WINDOWED[kind]:
        values = {"sliding_window": window, **said}
        raise ValueError(f"cannot tell which layers of a {kind} have a window: {values}")
    count = hf["num_hidden_layers"]
    if layers is None:
        layers = [_FULL if window is None else _SLIDING] * count
    return _window_fields(window, _pattern(layers, count))


def _qwen_windows(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a Qwen's window and its layers: those in layer_types, or from max_window_layers on."""
    count, layers = hf["num_hidden_layers"], hf.get("layer_types")
    if not hf.get("use_sliding_window"):
        return _windows({name: value for name, value in hf.items() if name != "sliding_window"})
    if layers is None:
        first = hf.get("max_window_layers")
        if type(first) is not int or first < 0:
            raise ValueError(
                f"max_window_layers must be the number of layers without a window, got {first!r}"
            )
        layers = [_SLIDING if layer >= first else _FULL for layer in range(count)]
    return _window_fields(hf.get("sliding_window"), _pattern(layers, count))


def _pattern(layers: Any, count: int) -> str:
    """Return CPMConfig's letter for each entry of layer_types."""
    known = isinstance(layers, list) and all(layer in (_SLIDING, _FULL) for layer in layers)
    if not known or len(layers) != count:
        raise ValueError(
            f"layer_types must be {_SLIDING} or {_FULL} for each of {count} layers, got {layers!r}"
        )
    return "".join("w" if layer == _SLIDING else "f" for layer in layers)


def _window_fields(window: Any, pattern: str) -> dict[str, Any]:
    """Return CPMConfig's fields for a window in the layers of a pattern."""
    if "w" not in pattern:
        return {}
    if type(window) is not int or window < 1:
        raise ValueError(f"sliding_window must be a positive int, got {window!r}")
    starts = (pattern[:count] for count in range(1, len(pattern) + 1))
    shortest = next(start for start in starts if (start * len(pattern)).startswith(pattern))
    return {"window": window, "window_pattern": shortest}


def config_to_hf(config: CPMConfig, longest: int | None = None) -> dict[str, Any]:
    """Return the content of config.json for `config`.

    `longest` is the number of tokens of the longest sequence. If `config` was made for longer ones,
    its own number is written instead. If it was made for shorter ones, and its rotary scaling has
    no original length, its own number is written as original_max_position_embeddings.

    Raises ValueError if no Hugging Face model fits. With MiniCPM's scalings these are windows,
    biases, norms of q and k, and a LongRoPE with another attention_factor. Without them these are
    some combinations of biases, windows and numbers of heads.
    """
    kind = _kind(config)
    original = config.max_position_embeddings or 0
    most = longest_to_hf(config.rope_scaling, kind in MINICPMS, max(longest or 0, original) or None)
    hf: dict[str, Any] = {
        "model_type": kind,
        "architectures": [_ARCHITECTURES[kind]],
        **{name: getattr(config, name) for name in _SAME_NAME},
        **{theirs: getattr(config, name) for name, theirs in _RENAMED.items()},
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        **rope_to_hf(config, most),
        **_windows_to_hf(config, kind),
    }
    if kind in ("llama", "qwen3"):
        hf["attention_bias"] = config.qkv_bias
    if kind == "llama":
        hf["mlp_bias"] = config.mlp_bias
    if kind in MINICPMS:
        hf |= {
            "scale_emb": config.scale_emb,
            "scale_depth": config.scale_depth or config.num_layers**0.5,
            "dim_model_base": config.dim_model_base or config.hidden_size,
        }
        if config.sparse:
            hf["sparse_config"] = config.sparse.to_dict()
    if kind == KIND:
        hf |= mixers_to_hf(config)
    if most is not None:
        hf["max_position_embeddings"] = most
        if 0 < original < most and isinstance(config.rope_scaling, Linear | None):
            hf["original_max_position_embeddings"] = original
    return hf


def _kind(config: CPMConfig) -> str:
    """Return the model_type that fits `config`."""
    biases = [name for name in ("qkv_bias", "o_bias", "mlp_bias") if getattr(config, name)]
    has = biases + ["qk_norm"] * config.qk_norm
    scalings = (config.scale_emb, config.residual_scale, config.width_scale)
    if has_mixers(config) or scalings != (1.0, 1.0, 1.0) or config.sparse:
        advice = "no other model is sparse" if config.sparse else "fold the scalings"
        if has_mixers(config):
            advice = "no other model has its layers"
        if config.window:
            raise ValueError(
                "Hugging Face's MiniCPM has no window, this one has "
                f"{config.window}: fold the scalings"
            )
        if has:
            raise ValueError(f"Hugging Face's MiniCPM has none of {has}: {advice}")
        kind = KIND if has_mixers(config) else "minicpm"
        _check_longrope(config.rope_scaling, kind, advice)
        return kind
    if config.qk_norm and biases in ([], ["qkv_bias", "o_bias"]):
        return "qwen3"
    if has == ["qkv_bias"]:
        return "qwen2"
    divides = config.hidden_size % config.num_heads == 0
    if config.qkv_bias == config.o_bias and not config.qk_norm and not config.window and divides:
        return "llama"
    if not has:
        return "ministral" if config.window and None in config.windows else "mistral"
    beside = f" and a window of {config.window}" if config.window else ""
    if not divides:
        beside += f" and {config.num_heads} heads, which do not divide {config.hidden_size}"
    raise ValueError(f"no Hugging Face model has {has}{beside}")


def _check_longrope(scaling: RopeScaling | None, kind: str, advice: str) -> None:
    """Raise ValueError unless MiniCPM's own code computes such a LongRoPE.

    MiniCPM-SALA's code has the long divisors at every length. A MiniCPM's folder has other code.
    """
    if not isinstance(scaling, LongRope):
        return
    is_longer = scaling.extended_length > scaling.original_length
    if kind == KIND and is_longer and scaling.short_factor != scaling.long_factor:
        raise ValueError(
            "MiniCPM-SALA's code has the long_factor of longrope at every length, this one has "
            "another short_factor: give both the same divisors, or export.py --format bmtrain"
        )
    expected = dataclasses.replace(scaling, attention_factor=None).attention_scale
    if not math.isclose(expected, scaling.attention_scale, rel_tol=1e-6):
        raise ValueError(
            f"Hugging Face's MiniCPM has a longrope with attention_factor {expected:.6g}, as "
            f"follows from its factor, this one has {scaling.attention_scale:.6g}: {advice}"
        )


def _windows_to_hf(config: CPMConfig, kind: str) -> dict[str, Any]:
    """Return the fields of config.json for windows."""
    layers = [_SLIDING if window else _FULL for window in config.windows]
    if kind in _QWEN:
        first = layers.index(_SLIDING) if config.window else config.num_layers
        switch = {"use_sliding_window": config.window is not None, "max_window_layers": first}
        return {"sliding_window": config.window, **switch, "layer_types": layers}
    if kind == "mistral":
        return {"sliding_window": config.window}
    return {"sliding_window": config.window, "layer_types": layers} if kind == "ministral" else {}
