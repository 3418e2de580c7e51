"""The registry of the kinds of models that train/ pretrains. To add a kind, add an entry to KINDS.

Parts are imported when they are used: data is prepared without torch. This imports nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """One kind of model: its name, its parts, and the fields that identify it.

    name        the "model_type" of its configurations
    config      the class of its configurations, with from_dict and to_dict
    presets     configurations by name
    model       the torch module, made as (config, sp, saving, **options of burst_attn_func)
    tokenizers  the classes of its tokenizers over a vocabulary, by PREFIX of --tokenizer
                PREFIX:FILE. They name the kind in `instances`
    reader      turns records and texts into documents or instances (train.data.text.Reader)
    writer      writes a data folder (train.data.stored.DataWriter)
    data        opens a data folder by its method `open` (train.data.source.Stored)
    batches     deals the sequences of `data` to ranks (train.data.batches.Dealer)
    generator   answers a prompt (train.generation.decoding.Generator)
    own         field names that only its configurations have, for files without a model_type
    """

    name: str
    config: str
    presets: str
    model: str
    tokenizers: Mapping[str, str]
    reader: str
    writer: str
    data: str
    batches: str
    generator: str
    own: frozenset[str]


# The first kind reads documents. The others read instances of their own.
KINDS = (
    Kind(
        "cpm",
        config="models.config:CPMConfig",
        presets="models.config:PRESETS",
        model="models.cpm:CPM",
        tokenizers={},
        reader="train.data.text:DocumentReader",
        writer="train.data.stored:TokenWriter",
        data="train.data.folder:Sequences",
        batches="train.data.batches:Batches",
        generator="train.generation.decoding:continue_text",
        own=frozenset({"hidden_size"}),
    ),
    Kind(
        "cpm-bee",
        config="models.cpm_live.config:BeeConfig",
        presets="models.cpm_live.config:PRESETS",
        model="models.cpm_bee:CPMBee",
        tokenizers={"cpm-bee": "train.cpm_live.tokenizers:BeeTokenizer"},
        reader="train.cpm_live.instances:BeeReader",
        writer="train.cpm_live.stored:InstanceWriter",
        data="train.cpm_live.rows:BeeRows",
        batches="train.cpm_live.batches:BeeBatches",
        generator="train.cpm_live.generate:fill_in",
        own=frozenset({"position_bias_num_segment_buckets"}),
    ),
    Kind(
        "cpm-ant",
        config="models.cpm_live.config:AntConfig",
        presets="models.cpm_live.config:PRESETS",
        model="models.cpm_ant:CPMAnt",
        tokenizers={
            "cpm-ant": "train.cpm_live.tokenizers:AntTokenizer",
            "cpm-ant-greedy": "train.cpm_live.tokenizers:AntGreedyTokenizer",
        },
        reader="train.cpm_live.instances:AntReader",
        writer="train.cpm_live.stored:AntWriter",
        data="train.cpm_live.rows:AntRows",
        batches="train.cpm_live.batches:AntBatches",
        generator="train.cpm_live.generate:continue_text",
        own=frozenset({"prompt_types", "prompt_length", "segment_types"}),
    ),
)


def load(part: str) -> Any:
    """Import a part of a kind, named as "module:name", and return it."""
    module, _, name = part.partition(":")
    return getattr(importlib.import_module(module), name)


def kind_of_data(instances: str | None) -> Kind:
    """Return the kind of models that read these instances, or documents for None."""
    return next(kind for kind in KINDS if kind.name == (instances or KINDS[0].name))
