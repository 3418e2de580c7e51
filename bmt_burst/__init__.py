"""Exact attention over sequences that are cut over many ranks, for pretraining on long contexts."""

import importlib
from types import ModuleType

from . import errors as errors
from . import kernels as kernels
from . import loss as loss
from . import nn as nn
from . import offload as offload
from . import sparse as sparse
from .attention import (
    burst_attn_func,
    burst_attn_kvpacked_func,
    burst_attn_qkvpacked_func,
    burst_attn_varlen_func,
)
from .folding import fold_prefixes
from .lightning import alibi_slopes, lightning_attn_func
from .parts.cache import Cache
from .parts.chunks import Chunks
from .parts.decoder import Decoder
from .ranks.groups import init_sequence_parallel
from .ranks.sequence_parallel import SequenceParallel
from .ranks.simulation import simulate
from .scores import Scores
from .sequence.layout import IGNORE_INDEX, Layout, shard, shift_labels, unshard
from .sequence.mask import Mask, Slice
from .sparse import InfLLMV2
from .transport import Transport

__version__ = "0.1.0"

__all__ = [
    "IGNORE_INDEX",
    "Cache",
    "Chunks",
    "Decoder",
    "InfLLMV2",
    "Layout",
    "Mask",
    "Scores",
    "SequenceParallel",
    "Slice",
    "Transport",
    "alibi_slopes",
    "burst_attn_func",
    "burst_attn_kvpacked_func",
    "burst_attn_qkvpacked_func",
    "burst_attn_varlen_func",
    "fold_prefixes",
    "init_sequence_parallel",
    "lightning_attn_func",
    "shard",
    "shift_labels",
    "simulate",
    "unshard",
]


def __getattr__(name: str) -> ModuleType:
    """Import bmt_burst.bmtrain, which needs BMTrain, when it is first used."""
    if name != "bmtrain":
        raise AttributeError(f"module 'bmt_burst' has no attribute {name!r}")
    try:
        return importlib.import_module(".bmtrain", __package__)
    except ImportError as error:
        raise AttributeError(f"bmt_burst.bmtrain cannot be imported: {error}") from error
