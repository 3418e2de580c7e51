"""The memory and the time of one lightning attention, by what its kernel allocates and moves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bmt_burst.lightning.triton_kernel import longest_piece
from bmt_burst.transport import LANES
from train.loop.measure import LIGHTNING_BACKWARD, lightning_flops

from .attention import AttentionMemory

_RUNS = 2  # of a rank, in zigzag
_FP32 = 4
# The launches of the Triton kernel read and write these tensors of q's size, and states:
#
#   forward   sum_pieces  reads k, v
#             attend      reads q, k, v, writes out
#   backward  sum_pieces  reads q, dout
#             attend_back reads q, k, v, dout, writes dk, dv
#             sum_pieces  reads k, v
#             attend      reads dout, k, v, writes dq
#
# Programs of other columns of a head, and those of dk and dv, read the same rows. They run side by
# side, so the L2 cache has a row for all but the first. Of heads that decay fast, sum_pieces reads
# the last tokens of a piece only. It writes the states before pieces, chain_states reads and writes
# them, and the next attend reads them.
_FORWARD_TENSORS, _BACKWARD_TENSORS = 6, 14
_FORWARD_STATES, _BACKWARD_STATES = 4, 8
_STATES_RATE = 150e9  # bytes a second at which states are exchanged, an assumption


@dataclass(frozen=True)
class LightningShape:
    """A lightning attention of one rank of several.

    tokens   those of the whole sequence, or of a chunk
    chunked  whether they are one of several chunks, whose state every rank adds up
    """

    batch: int
    tokens: int
    heads: int
    head_size: int
    dtype: torch.dtype
    ranks: int = 1
    chunked: bool = False

    @property
    def rank_tokens(self) -> int:
        """The most tokens of a rank, in all rows."""
        return self.batch * -(-self.tokens // self.ranks)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state."""
        return self.heads * self.head_size**2 * _FP32

    @property
    def piece_bytes(self) -> int:
        """Bytes of the states before pieces."""
        tokens = self.rank_tokens
        return -(-tokens // longest_piece(tokens, self.heads)) * self.state_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes of the states with which its runs begin. They are saved for the backward."""
        runs = _RUNS if self.ranks > 1 else int(self.chunked)
        return runs * self.batch * self.state_bytes

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of the states of the runs of all ranks. The two at the middle of zigzag are one."""
        return (_RUNS * self.ranks - 1) * self.batch * self.state_bytes if self.ranks > 1 else 0

    def count_kept(self, chunks: int) -> int:
        """Return the most bytes of states that all `chunks` keep: one before each but the first,
        and of the chunk whose backward runs, its last state and the gradients of both.
        """
        return (chunks + 2) * self.batch * self.state_bytes


def lightning_memory(shape: LightningShape) -> AttentionMemory:
    """Return the memory of a lightning attention, with the Triton kernel.

    A forward has the states before pieces, and those that it sends. Last, a backward has both again
    for dq, the gradients of the states before pieces, and three of those next to segments: the sent
    ones, the taken ones, and the latter divided by the scale. In a chunk, every rank receives the
    states of all runs, and has a copy of those of a row while it adds them up.
    """
    taken, exchanged = shape.taken_bytes, shape.exchanged_bytes
    forward, backward = shape.piece_bytes + taken, 2 * shape.piece_bytes + 4 * taken
    if not shape.chunked:
        # a slot has the states of the runs of all other ranks
        return AttentionMemory(forward, backward, LANES["visit"] * taken * (shape.ranks - 1))
    added = forward + (exchanged + 2 * taken) // shape.batch
    return AttentionMemory(added, max(backward, added), LANES["visit"] * exchanged)


def lightning_seconds(shape: LightningShape, run: str, products: float, traffic: float) -> float:
    """Return the seconds of a "forward", "backward", or "again". It is bound by memory or by matrix
    products, at these rates in bytes and operations a second. In a chunk, the exchange of all
    states follows. The few states of a whole sequence are not counted.
    """
    tensors, states, factor = _FORWARD_TENSORS, _FORWARD_STATES, 1.0
    if run == "backward":
        tensors, states, factor = _BACKWARD_TENSORS, _BACKWARD_STATES, LIGHTNING_BACKWARD
    entries = shape.rank_tokens * shape.heads * shape.head_size
    nbytes = tensors * entries * shape.dtype.itemsize + states * shape.piece_bytes
    operations = factor * shape.rank_tokens * lightning_flops(shape.heads, shape.head_size)
    exchange = shape.exchanged_bytes / _STATES_RATE if shape.chunked else 0.0
    return max(nbytes / traffic, operations / products) + exchange
