"""The kind of a model, by its configuration. train/registry.py lists the kinds."""

from __future__ import annotations

from typing import Any

from models.config import CPMConfig
from models.cpm_live.config import HF_KINDS, LiveConfig
from models.hf_config import config_from_hf
from models.model_center import config_from_model_center, is_model_center
from train.registry import KINDS, Kind, load

ModelConfig = CPMConfig | LiveConfig
PRESETS: dict[str, ModelConfig] = {
    name: preset for kind in KINDS for name, preset in load(kind.presets).items()
}


def kind_of(config: ModelConfig) -> Kind:
    """Return the kind of a model by its configuration."""
    return next(kind for kind in KINDS if type(config) is load(kind.config))


def config_of(values: Any) -> ModelConfig:
    """Return the configuration in a JSON file: CPMConfig's, CPM-Live's, Hugging Face's or
    ModelCenter's. Raises ValueError or TypeError for others.
    """
    if not isinstance(values, dict):
        raise ValueError(f"expected names and values, got {type(values).__name__}")
    named = values.get("model_type")
    if is_model_center(values):
        return config_from_model_center(values)
    if isinstance(named, str) and named in HF_KINDS:
        kind = next(kind for kind in KINDS if kind.name == HF_KINDS[named])
        found: ModelConfig = load(kind.config).from_hf(values)
        return found
    if "dim_model" in values:
        kind = _kind_of_values(values)
    elif "num_hidden_layers" in values or "architectures" in values:
        return config_from_hf(values)
    else:
        kind = KINDS[0]
    config: ModelConfig = load(kind.config).from_dict(values)
    return config


def _kind_of_values(values: dict[str, Any]) -> Kind:
    fitting = [k for k in KINDS if values.get("model_type") == k.name] or [
        k for k in KINDS if k.own & values.keys()
    ]
    if len(fitting) != 1:
        names = ", ".join(kind.name for kind in KINDS[1:])
        raise ValueError(
            f"the kind of this model is ambiguous: add model_type, one of {names}, or "
            "the pos_bias_type of ModelCenter's Llama"
        )
    return fitting[0]
