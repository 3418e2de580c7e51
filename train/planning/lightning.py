"""The memory and the time of one lightning attention, by estimates of its kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bmt_burst.transport import LANES
from train.run.measure import LIGHTNING_BACKWARD, lightning_flops

from .attention import AttentionMemory

_PIECE = 2048  # tokens, for each of which the Triton kernel keeps a state
_RUNS = 2  # of a rank, in zigzag
_FP32 = 4
# Tensors of the size of q that kernels read and write: their inputs, results and states.
_FORWARD_TENSORS, _BACKWARD_TENSORS = 10, 34


@dataclass(frozen=True)
class LightningShape:
    """A lightning attention of one rank of several. `tokens` are those of the whole sequence."""

    batch: int
    tokens: int
    heads: int
    head_size: int
    dtype: torch.dtype
    ranks: int = 1

    @property
    def rank_tokens(self) -> int:
        """The most tokens of a rank, in all rows."""
        return self.batch * -(-self.tokens // self.ranks)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state."""
        return self.heads * self.head_size**2 * _FP32

    @property
    def taken_bytes(self) -> int:
        """Bytes of the states of other ranks that it takes, and saves for the backward."""
        return _RUNS * self.batch * self.state_bytes if self.ranks > 1 else 0


def lightning_memory(shape: LightningShape) -> AttentionMemory:
    """Return the memory of a lightning attention."""
    states = -(-shape.rank_tokens // _PIECE) * shape.state_bytes
    # a slot has the states of the runs of all other ranks
    held = LANES["visit"] * shape.taken_bytes * (shape.ranks - 1)
    return AttentionMemory(states, 2 * states + shape.taken_bytes, held)


def lightning_seconds(shape: LightningShape, run: str, products: float, traffic: float) -> float:
    """Return the seconds of a "forward", "backward", or "again". It is bound by memory or by matrix
    products, at these rates in bytes and operations a second.
    """
    is_backward = run == "backward"
    tensors = _BACKWARD_TENSORS if is_backward else _FORWARD_TENSORS
    nbytes = tensors * shape.heads * shape.head_size * shape.dtype.itemsize
    operations = lightning_flops(shape.heads, shape.head_size)
    operations *= LIGHTNING_BACKWARD if is_backward else 1.0
    return shape.rank_tokens * max(nbytes / traffic, operations / products)
