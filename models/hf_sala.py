"""config.json of MiniCPM-SALA, whose layers have lightning or sparse attention.

`hf_config.py` reads and writes the fields that it shares with MiniCPM.
"""

from __future__ import annotations

from typing import Any

from .config import ATTENTION, LIGHTNING, CPMConfig

_MIXERS = {ATTENTION: "minicpm4", LIGHTNING: "lightning-attn"}
_NAMES = {
    **{theirs: ours for ours, theirs in _MIXERS.items()},
    **dict.fromkeys(("lightning", "lightning_attn"), LIGHTNING),
}
# what LightningAttention of a CPM computes
_COMPUTED = {
    "lightning_scale": "1/sqrt(d)",
    "lightning_use_rope": True,
    "qk_norm": True,
    "use_output_gate": True,
    "use_output_norm": True,
}
_OF_ATTENTION = {"attn_use_rope": "attention_rotary", "attn_use_output_gate": "attention_gate"}
_NOT_COMPUTED = ("lightning_layerwise_decay", "attn_logits_scaling")
# names of config.json that are read here
SALA_FIELDS = (
    *("mixer_types", "initializer_range", "lightning_nh", "lightning_nkv", "lightning_head_dim"),
    *_COMPUTED,
    *_OF_ATTENTION,
    *_NOT_COMPUTED,
)


def read_mixers(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the mixers of a config.json without its nulls, as fields of CPMConfig. Raises
    ValueError for fields with another meaning than CPM computes.
    """
    _check_computed(hf)
    _check_heads(hf)
    names: Any = hf.get("mixer_types")
    count = hf["num_hidden_layers"]
    known = isinstance(names, list) and all(
        isinstance(name, str) and name in _NAMES for name in names
    )
    if not known or len(names) != count:
        found = f"{len(names)} names" if known else repr(names)
        raise ValueError(
            f"mixer_types must be one of {', '.join(_NAMES)} for each of {count} layers "
            f"(num_hidden_layers), got {found}"
        )
    of_attention = {ours: hf[theirs] for theirs, ours in _OF_ATTENTION.items()}
    init_std = {"init_std": hf["initializer_range"]} if "initializer_range" in hf else {}
    return {"mixers": tuple(_NAMES[name] for name in names), **of_attention, **init_std}


def _check_computed(hf: dict[str, Any]) -> None:
    """Raise ValueError for a setting that CPM does not compute."""
    for name, expected in _COMPUTED.items():
        if hf.get(name) != expected or type(hf[name]) is not type(expected):
            raise ValueError(
                f"{name} must be {_show(expected)}, as lightning layers compute it, got "
                f"{_show(hf.get(name))}"
            )
    for name in _OF_ATTENTION:
        if type(hf.get(name)) is not bool:
            raise ValueError(f"{name} must be true or false, got {_show(hf.get(name))}")
    for name in _NOT_COMPUTED:
        if hf.get(name) not in (None, False):
            raise ValueError(f"{name} is not computed: expected null or false, got {hf[name]!r}")


def _check_heads(hf: dict[str, Any]) -> None:
    """Raise ValueError unless lightning layers have the heads of the others' queries."""
    heads = hf["num_attention_heads"]
    kv_heads = hf.get("num_key_value_heads", heads)
    head_dim = hf.get("head_dim", hf["hidden_size"] // heads)
    count = hf.get("lightning_nh", heads)
    for name, expected, found, of in (
        ("lightning_nh", heads, count, "num_attention_heads"),
        ("lightning_nkv", count, hf.get("lightning_nkv", kv_heads), "lightning_nh"),
        ("lightning_head_dim", head_dim, hf.get("lightning_head_dim", head_dim), "head_dim"),
    ):
        if found != expected:
            default = "" if name in hf else ", from num_key_value_heads"
            raise ValueError(
                f"{name} must be {of}, {expected}, got {_show(found)}{default}: other lightning "
                "heads are not computed"
            )


def mixers_to_hf(config: CPMConfig) -> dict[str, Any]:
    """Return the fields of config.json that MiniCPM does not have."""
    return {
        "mixer_types": [_MIXERS[mixer] for mixer in config.mixer_of_layers],
        "lightning_nh": config.num_heads,
        "lightning_nkv": config.num_heads,
        "lightning_head_dim": config.head_dim,
        **_COMPUTED,
        **{theirs: getattr(config, ours) for theirs, ours in _OF_ATTENTION.items()},
        "mup_denominator": config.num_layers,
        "initializer_range": config.init_std,
        "attention_bias": False,
    }


def has_mixers(config: CPMConfig) -> bool:
    """Whether a model needs fields that MiniCPM does not have."""
    differs = config.attention_gate or not config.attention_rotary
    return differs or config.lightning_layers > 0


def _show(value: Any) -> str:
    names = {True: "true", False: "false", None: "nothing"}
    return names[value] if value is None or isinstance(value, bool) else repr(value)
