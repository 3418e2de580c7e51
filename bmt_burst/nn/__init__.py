"""Layers: rotary embedding by explicit positions, SwiGLU, and sequence parallel self-attention.

rotary     rotary embedding
modules    the base of layers over ranks, SwiGLU
parts      the part of a sequence that a model computes, from its arguments
heads      projections to heads and back, and gates
attention  softmax attention
lightning  lightning attention
"""

from ..sequence.rows import Layouts, Masks
from .attention import BurstAttention
from .heads import SelfAttention
from .lightning import LightningAttention
from .modules import SequenceParallelModule, swiglu
from .parts import Part, find_part
from .rotary import apply_rope, rope_frequencies, rope_tables, rotations

__all__ = [
    "BurstAttention",
    "Layouts",
    "LightningAttention",
    "Masks",
    "Part",
    "SelfAttention",
    "SequenceParallelModule",
    "apply_rope",
    "find_part",
    "rope_frequencies",
    "rope_tables",
    "rotations",
    "swiglu",
]
