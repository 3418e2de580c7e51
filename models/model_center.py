"""config.json of ModelCenter's Llama, to CPMConfig, which computes it as it is by default.

Other settings are refused by name, and so are ModelCenter's other models, CPM1 for example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import CPMConfig
from .fields import check_sizes

# Names of CPMConfig's fields in ModelCenter's config.json
MODEL_CENTER_FIELDS = {
    "hidden_size": "dim_model",
    "intermediate_size": "dim_ff",
    "num_kv_heads": "num_heads",
    "head_dim": "dim_head",
    "tie_embeddings": "tied",
}
_SIZES = ("vocab_size", "dim_model", "num_heads", "dim_head", "dim_ff", "num_layers")
# The values that a dense CPM computes, which are the defaults of ModelCenter's Llama
_COMPUTED: dict[str, Any] = {
    "pos_bias_type": "rotary",
    "ffn_activate_fn": "gated_silu",
    "attn_scale": True,
    "cls_head": None,
    "dropout_p": 0,
    **dict.fromkeys(("norm_bias", "proj_bias", "length_scale", "post_layer_norm", "int8"), False),
}
_OWN = {"pos_bias_type", "ffn_activate_fn", "norm_eps", "norm_bias", "att_bias", "ffn_bias"}


def is_model_center(values: Mapping[str, Any]) -> bool:
    """Whether a config.json has fields that only ModelCenter's models have."""
    return "dim_model" in values and bool(_OWN & values.keys())


def config_from_model_center(values: Mapping[str, Any]) -> CPMConfig:
    """Make a CPMConfig from the config.json of ModelCenter's Llama, or raise ValueError."""
    check_sizes(values, _SIZES, _SIZES)
    if others := [name for name, ours in _COMPUTED.items() if values.get(name, ours) != ours]:
        expected, got = ({name: place[name] for name in others} for place in (_COMPUTED, values))
        raise ValueError(
            f"expected ModelCenter's Llama with {expected}, which a dense CPM computes, got {got}"
        )
    if tables := sorted(name for name in values if name.startswith("position_bias_")):
        raise ValueError(
            f"expected ModelCenter's Llama, got {tables} of a model with a learned bias by distance"
        )
    names = {name: name for name in ("vocab_size", "num_layers", "num_heads")} | MODEL_CENTER_FIELDS
    return CPMConfig(
        **{ours: values[theirs] for ours, theirs in names.items() if theirs in _SIZES},
        rms_norm_eps=values.get("norm_eps", 1e-6),
        tie_embeddings=values.get("tied", False),
        qkv_bias=values.get("att_bias", False),
        o_bias=values.get("att_bias", False),
        mlp_bias=values.get("ffn_bias", False),
    )
