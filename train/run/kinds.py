"""The kinds of models that train/ pretrains. To add a kind, add an entry to KINDS."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from models import config as dense
from models.config import CPMConfig
from models.cpm import CPM
from models.cpm_ant import CPMAnt
from models.cpm_bee import CPMBee
from models.cpm_live import config as live
from models.cpm_live.config import AntConfig, BeeConfig, LiveConfig
from train.cpm_live.batches import AntBatches, BeeBatches
from train.cpm_live.data import InstanceFile
from train.cpm_live.rows import AntRows, BeeRows, PackedRows
from train.data.batches import Batches, Dealer
from train.data.folder import Sequences, TokenFile

ModelConfig = CPMConfig | LiveConfig
Opened = Sequences | PackedRows


@dataclass(frozen=True)
class Kind:
    """One kind of models.

    name           the "model_type" of its configurations
    config, model  its classes
    read           turns the values of a JSON file into a configuration; raises ValueError or
                   TypeError
    own            field names that only this kind has, for JSON files without a model_type
    open           opens a data folder: (folder, model's configuration, seq_len, seed) to sequences
    batches        the class that deals these sequences to ranks
    refused        options that have no meaning for such a model, each with the reason
    """

    name: str
    config: type
    model: type[nn.Module]
    read: Callable[[Mapping[str, Any]], ModelConfig]
    own: frozenset[str]
    open: Callable[[str, ModelConfig, int, int], Opened]
    batches: type[Dealer]
    refused: Mapping[str, str] = field(default_factory=dict)


def _open_text(folder: str, _model: ModelConfig, seq_len: int, seed: int) -> Sequences:
    return Sequences(TokenFile(folder), seq_len, seed)


def _live(
    config: type,
    model: type[nn.Module],
    rows: type[PackedRows],
    batches: type[Dealer],
    own: set[str],
) -> Kind:
    name = config.model_type

    def open_instances(folder: str, model: ModelConfig, seq_len: int, seed: int) -> PackedRows:
        assert isinstance(model, LiveConfig)
        return rows(InstanceFile(folder, name), model, seq_len, seed)

    refused = {
        "documents": "its instances say which tokens see each other",
        "bos": "its instances say themselves how they begin",
        **dict.fromkeys(("rope_theta", "rope_scaling"), "it has no rotary positions"),
        "window": "its layers have no windows",
    }
    return Kind(
        name, config, model, config.from_dict, frozenset(own), open_instances, batches, refused
    )


KINDS = (
    Kind(
        "cpm",
        CPMConfig,
        CPM,
        lambda values: CPMConfig(**values),
        frozenset({"hidden_size"}),
        _open_text,
        Batches,
    ),
    _live(BeeConfig, CPMBee, BeeRows, BeeBatches, {"position_bias_num_segment_buckets"}),
    _live(
        AntConfig, CPMAnt, AntRows, AntBatches, {"prompt_types", "prompt_length", "segment_types"}
    ),
)
PRESETS: dict[str, ModelConfig] = dense.PRESETS | live.PRESETS


def kind_of(config: ModelConfig) -> Kind:
    """Return the kind of a model by its configuration."""
    return next(kind for kind in KINDS if type(config) is kind.config)


def config_of(values: Any) -> ModelConfig:
    """Return the configuration in the values of a JSON file, or in those that `to_dict` returned.

    The values are those of CPMConfig, or those of CPM-Live with or without a model_type. Raises
    ValueError or TypeError if they are neither, and ValueError if the kind is ambiguous.
    """
    if not isinstance(values, dict):
        raise ValueError(f"expected names and values, got {type(values).__name__}")
    if "dim_model" not in values:
        return KINDS[0].read(values)
    fitting = [k for k in KINDS if values.get("model_type") == k.name] or [
        k for k in KINDS if k.own & values.keys()
    ]
    if len(fitting) != 1:
        names = ", ".join(kind.name for kind in KINDS[1:])
        raise ValueError(f"the kind of this model is ambiguous: add model_type, one of {names}")
    return fitting[0].read(values)


def keep_documents_apart(data: Opened, apart: bool, bos: int | None) -> Opened:
    """Return sequences of text that keep documents apart if `apart`, with begin token `bos`. Return
    instances unchanged.
    """
    return (
        dataclasses.replace(data, documents=apart, bos=bos) if isinstance(data, Sequences) else data
    )
