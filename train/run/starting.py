"""The model of the weights that a run starts from (--init-from)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.cpm_live.config import HF_FIELDS as LIVE_HF_FIELDS
from models.cpm_live.config import HF_KINDS
from models.huggingface import CONFIG, read_config, read_fields, read_folder
from models.model_center import is_model_center
from models.origins import TABLE
from models.tensor_files import is_file, open_folder
from models.weights import Expected
from train.run.kinds import ModelConfig, config_of, kind_of


def read_model(folder: Path) -> ModelConfig:
    """Return the model of a folder of weights. Raises ValueError if no model here computes it."""
    values = read_folder(folder)
    if not _is_live(folder, values):
        return read_config(folder)
    try:
        return config_of(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error


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
    live = LIVE_HF_FIELDS if values.get("model_type") in HF_KINDS else {}
    fields = live if _is_live(source, values) else read_fields(source)
    return Expected(model, kind, str(source / CONFIG), fields, untie)


def _is_live(folder: Path, values: dict[str, Any]) -> bool:
    """Whether a folder has a model of CPM-Live. Sizes do not tell, but names of weights do."""
    if "dim_model" not in values:
        return values.get("model_type") in list(HF_KINDS)
    if is_model_center(values) or values.get("model_type") in list(HF_KINDS.values()):
        return not is_model_center(values)
    return any(name.endswith(TABLE) for name in open_folder(folder))
