"""New tokens of a cache, which every rank computes: where their keys are, and merges over ranks.

Letters: B batch, S new tokens, T keys of a rank, H query heads, D head size, N partial results.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..base.streams import send_to_device
from ..kernels.few_queries import Partials, find_kernels
from ..ranks.rings import Rings
from ..ranks.sequence_parallel import SequenceParallel

if TYPE_CHECKING:
    from ..sparse.triton_decoding import KeysAtHand  # it needs the package triton

BLOCK = 64  # neighbouring new tokens whose keys stay on one rank


@dataclass
class NewTokens:
    """The tokens that layers compute now, S of them.

    start      their first position
    places     for each token, the place of its key in this rank's memory. -1: another rank keeps it
    stops      for each token, the number of this rank's keys up to it
    on_device  the places, (S,) int64, on the keys' device once they are used there
    spans      the keys that the tokens see, (S, 2) int64, there as well, by the window of a layer
    first      `start`, (1,) int64, there as well
    prepared   what layers of sparse attention share
    """

    start: int
    places: list[int]
    stops: list[int]
    on_device: Tensor | None = None
    spans: dict[int | None, Tensor] = field(default_factory=dict)
    first: Tensor | None = None
    prepared: dict[Any, Any] = field(default_factory=dict)

    def first_on(self, device: torch.device) -> Tensor:
        if self.first is None:
            self.first = send_to_device(torch.tensor([self.start]), device)
        return self.first


class Positions:
    """The positions of this rank's keys, also of those that are still to come: int64, rising. They
    are computed once they are used, when there is memory for the keys of `limit` tokens.

    prompt  those of this rank's keys of the prompt
    start   the position of the first new token
    count   the number of keys so far
    """

    def __init__(self, sp: SequenceParallel, prompt: Tensor, start: int, limit: int):
        self.count, self._prompt = len(prompt), prompt
        self._sp, self._start, self._limit = sp, start, limit
        self._on_device: Tensor | None = None
        self._in_blocks: dict[int, KeysAtHand] = {}

    @functools.cached_property
    def on_host(self) -> Tensor:
        new = torch.arange(self._start, self._limit)
        new = new[new // BLOCK % self._sp.size == self._sp.rank]
        return torch.cat((self._prompt, new))

    def on(self, device: torch.device) -> Tensor:
        if self._on_device is None:
            self._on_device = send_to_device(self.on_host, device)
        return self._on_device

    def in_blocks(self, block_size: int, device: torch.device) -> KeysAtHand:
        from ..sparse.triton_decoding import KeysAtHand

        if block_size not in self._in_blocks:
            self._in_blocks[block_size] = KeysAtHand.of(self.on(device), self._limit, block_size)
        return self._in_blocks[block_size]


def merge_ranks(
    rings: Rings, parts: Partials, q: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Return the merge of all ranks' partial results in rank order: out (B, S, H, D), by default in
    the accumulator's dtype, and lse (B, S, H).
    """
    few, wide, rows = find_kernels(q), accumulator_dtype(q.dtype), q.shape[:-1]
    if rings.size > 1:
        mine = q.new_empty(1, q.numel() + rows.numel(), dtype=wide)
        few.merge(parts, *(x[0] for x in _unpack(mine, q)))
        parts = _unpack(rings.gather_equal(mine[0]), q)
    out, lse = q.new_empty(q.shape, dtype=dtype or wide), q.new_empty(rows, dtype=wide)
    few.merge(parts, out, lse)
    return out, lse


def _unpack(packed: Tensor, q: Tensor) -> Partials:
    """Return views of N partial results for q (B, S, H, D): packed has (N, B * S * H * (D + 1))."""
    outs, lses = packed.split([q.numel(), packed.shape[1] - q.numel()], 1)
    return outs.view(-1, *q.shape), lses.view(-1, *q.shape[:-1])
