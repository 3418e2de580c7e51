"""The kinds of models that are trained here, and what a run needs to know of each. A new kind is an
entry of KINDS.
"""

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

    name           as their "model_type" says
    config, model  classes
    read           from values, as a JSON file has them, to a configuration; raises ValueError or
                   TypeError
    own            fields by which a JSON file without a model_type is known to be one's
    open           a data folder: (folder, run's configuration, model's) to what Dealer reads
    batches        the class of what deals that to ranks
    refused        options of a run that say nothing of such a model, with the reason
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
        "documents": "what tokens see is said by its instances",
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
    return next(kind for kind in KINDS if type(config) is kind.config)


def config_of(values: Any) -> ModelConfig:
    """The configuration that a JSON file holds, or `to_dict` gave: of CPMConfig, or of CPM-Live
    with or without its model_type. Raises ValueError or TypeError if it is none, ValueError if it
    is not clear of which kind.
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
        raise ValueError(
            f"it is not clear of which kind this model is: give model_type, one of {names}"
        )
    return fitting[0].read(values)


def keep_documents_apart(data: Opened, told: bool, bos: int | None) -> Opened:
    """Return sequences of text with documents `told` apart or not, and begin token `bos`; instances
    as they are.
    """
    return (
        dataclasses.replace(data, documents=told, bos=bos) if isinstance(data, Sequences) else data
    )
