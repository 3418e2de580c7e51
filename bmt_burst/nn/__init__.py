"""Layers: rotary embedding by explicit positions, SwiGLU and RMSNorm (all of `fused/functions.py`),
and sequence parallel self-attention.

heads      the base of layers: projections to heads and back, gates, the part that they compute
attention  softmax attention
lightning  lightning attention
"""

from ..fused.functions import (
    RMSNorm,
    apply_rope,
    rope_frequencies,
    rope_tables,
    rotations,
    swiglu,
)
from ..memories.keys import Softmax
from ..sequence.rows import Layouts, Masks
from .attention import BurstAttention
from .heads import Part, SelfAttention, SequenceParallelModule, find_part
from .lightning import LightningAttention

__all__ = [
    "BurstAttention",
    "Layouts",
    "LightningAttention",
    "Masks",
    "Part",
    "RMSNorm",
    "SelfAttention",
    "SequenceParallelModule",
    "Softmax",
    "apply_rope",
    "find_part",
    "rope_frequencies",
    "rope_tables",
    "rotations",
    "swiglu",
]
