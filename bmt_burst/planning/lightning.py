"""The memory of one lightning attention, by what its kernel allocates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..lightning.triton_kernel import longest_piece
from ..transport import LANES
from .attention import AttentionMemory

_RUNS = 2  # of a rank, in zigzag
_FP32 = 4


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

    @property
    def memory(self) -> AttentionMemory:
        """The memory of a forward and a backward, with the Triton kernel.

        A forward has the states before pieces, and those that it sends. Last, a backward has both
        again for dq, the gradients of the states before pieces, and three of those next to
        segments: the sent ones, the taken ones, and the latter divided by the scale. In a chunk,
        every rank receives the states of all runs, and has a copy of those of a row while it adds
        them up.
        """
        taken, exchanged = self.taken_bytes, self.exchanged_bytes
        forward, backward = self.piece_bytes + taken, 2 * self.piece_bytes + 4 * taken
        if not self.chunked:
            # a slot has the states of the runs of all other ranks
            return AttentionMemory(forward, backward, LANES["visit"] * taken * (self.ranks - 1))
        added = forward + (exchanged + 2 * taken) // self.batch
        return AttentionMemory(added, max(backward, added), LANES["visit"] * exchanged)
