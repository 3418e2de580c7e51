"""bmt_burst: exact attention over sequences that are cut over many ranks, for pretraining on long contexts."""

from .attention import burst_attn_func
from .groups import SequenceParallel, init_sequence_parallel
from .layout import IGNORE_INDEX, Layout, shard, shift_labels, unshard
from .schedule import Schedule
from .simulation import simulate
from .transport import Transport

__version__ = "0.1.0"

__all__ = [
    "IGNORE_INDEX",
    "Layout",
    "Schedule",
    "SequenceParallel",
    "Transport",
    "burst_attn_func",
    "init_sequence_parallel",
    "shard",
    "shift_labels",
    "simulate",
    "unshard",
]
