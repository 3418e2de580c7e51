"""The memory of attention before there is a GPU, and of layers: plans and layers run on tensors
without values, which allocate what they would on a GPU.

    shape = AttentionShape(
        1, 1 << 20, heads=32, kv_heads=2, head_size=128, dtype=torch.bfloat16, ranks=8, inner=8
    )
    print(shape.saved_bytes, shape.memory)

attention  one softmax attention, dense, sparse or in chunks
lightning  one lightning attention
ledger     counts the bytes of any code on tensors without values
part       a part of a sequence for layers, whose attention only allocates
"""

from .attention import AttentionMemory, AttentionShape, choice_dtype, chunk_tokens, find_refusal
from .ledger import META, Ledger, Work
from .lightning import LightningShape
from .part import CHUNKS, PlannedPart

__all__ = [
    "CHUNKS",
    "META",
    "AttentionMemory",
    "AttentionShape",
    "Ledger",
    "LightningShape",
    "PlannedPart",
    "Work",
    "choice_dtype",
    "chunk_tokens",
    "find_refusal",
]
