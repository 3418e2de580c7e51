"""The model of a run and its kind, by a configuration or a folder of weights (--init-from)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from models.config import CPMConfig
from models.cpm_live.config import HF_FIELDS as LIVE_HF_FIELDS
from models.cpm_live.config import HF_KINDS, LiveConfig
from models.hf_config import config_from_hf
from models.huggingface import CONFIG, expect, read_config, read_fields, read_folder
from models.model_center import config_from_model_center, is_model_center
from models.tensor_files import is_file
from models.weights import Expected
from train.base.wording import naming
from train.registry import KINDS, Kind, load

ModelConfig = CPMConfig | LiveConfig
PRESETS: dict[str, ModelConfig] = {
    name: preset for kind in KINDS for name, preset in load(kind.presets).items()
}
DEFAULT_MODEL = "cpm-tiny"  # of a run that names none, and resumes none


def kind_of(config: ModelConfig) -> Kind:
    return next(kind for kind in KINDS if type(config) is load(kind.config))


def config_of(values: Any, accept: Collection[str] = ()) -> ModelConfig:
    """Return the configuration in a JSON file of any kind, which its `model_type` names. Files of
    CPM-Live, of ModelCenter and of older versions lack it, and have fields of their own.

    `accept` names unknown fields of a Hugging Face config.json that change nothing. Raises
    ValueError or TypeError.
    """
    if not isinstance(values, dict):
        raise ValueError(f"expected names and values, got {type(values).__name__}")
    if live := _live_kind(values):
        config = load(live.config)
        return config.from_hf(values) if _is_hf(values) else config.from_dict(values)
    if is_model_center(values):
        return config_from_model_center(values)
    if "dim_model" in values:
        names = ", ".join(kind.name for kind in KINDS[1:])
        raise ValueError(
            f"the kind of this model is ambiguous: add model_type, one of {names}, or "
            "the pos_bias_type of ModelCenter's Llama"
        )
    is_other = values.get("model_type", KINDS[0].name) != KINDS[0].name
    if is_other or "num_hidden_layers" in values or "architectures" in values:
        return config_from_hf(values, accept)
    return CPMConfig.from_dict(values)


def _live_kind(values: Mapping[str, Any]) -> Kind | None:
    """Return the kind of CPM-Live that a file has, or None for other files."""
    named = str(values.get("model_type"))
    by_field = "model_type" not in values and not is_model_center(values)
    for kind in KINDS[1:]:
        if kind.name == HF_KINDS.get(named, named) or (by_field and kind.own & values.keys()):
            return kind
    return None


def _is_hf(values: Mapping[str, Any]) -> bool:
    return values.get("model_type") in [*HF_KINDS]


def saved_model(path: Path, state: Any) -> ModelConfig:
    """Return the model in the state of checkpoint `path`. Raises ValueError if it has none."""
    with naming(f"{path} holds an unknown model", KeyError, TypeError):
        # fields that the checkpoint lacks have the value that was implied then
        return config_of(state["model"])


def read_model(folder: Path, accept: Collection[str] = ()) -> ModelConfig:
    """Return the model of a folder of weights, or raise ValueError if none here computes it."""
    values = read_folder(folder)
    if _live_kind(values) is None:
        return read_config(folder, accept)
    with naming(folder / CONFIG, TypeError):
        return config_of(values)


def expected_weights(source: Path, model: ModelConfig, name: str, untie: bool) -> Expected:
    """Return how to check the weights in `source`: against `model`, which messages call `name`
    unless the folder has a config.json. With `untie` its head may be missing.
    """
    kind = kind_of(model).name
    if is_file(source):
        beside = [source.parent / file for file in ("model.json", CONFIG)]
        found = next((f" {file}" for file in beside if file.is_file()), None)
        advice = f": give --model{found or ' with the configuration of these weights'}"
        return Expected(model, kind, name, {}, untie, advice)
    values = read_folder(source)
    fields = read_fields(source)
    if _live_kind(values):
        fields = LIVE_HF_FIELDS if _is_hf(values) else {}
    return expect(source, model, kind, fields, untie)
