"""InfLLM-V2 over ranks.

The tokens that choose do so by compressed keys: ranks gather all keys in spans of the sequence, and
sum them up. The choice depends neither on ranks nor on spans (see `choice.py`).

Letters: B batch, S tokens of a rank, F of them that choose, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..base.streams import send_to_device
from ..blocks.documents import find_longest
from ..blocks.far import packed_dtype
from ..blocks.plan import BlockPlan
from ..kernels.packed import prepare_once
from ..ranks.rings import Rings
from ..strategies import Plan, Problem
from .choice import choose_by_score
from .compressed import CompressedKeys, compress, sum_strides
from .config import Constants
from .queries import Choosers


class SparsePlan(BlockPlan):
    """The part of one rank in calls of InfLLM-V2. It keeps the first `topk` blocks of a choice,
    with all that are far, in `packed_dtype`.
    """

    def __init__(self, problem: Problem, sparse: Constants, rank: int, near: Plan, span_bytes: int):
        super().__init__(problem, rank, near, sparse.block_size, sparse.kernel_stride, span_bytes)
        self.sparse = sparse

    def choose_rows(self, rings: Rings, q: Tensor, k: Tensor) -> Tensor:
        keys = self._compress(rings, k)
        return torch.stack([self._choose_row(*row) for row in zip(q, keys, strict=True)])

    def _compress(self, rings: Rings, k: Tensor) -> list[CompressedKeys]:
        """Return the compressed keys of each row, for the documents of this rank's `choosers`."""
        sums = [k.new_empty(len(k), 0, *k.shape[2:], dtype=accumulator_dtype(k.dtype))]
        for number in range(len(self.spans.spans)):
            [whole] = self.spans.gather(rings, [k], number)
            strides = self._strides(number, k.device)
            if len(strides):
                at_any = whole.unfold(1, self.sparse.kernel_stride, 1).movedim(-1, 2)
                tokens = at_any.index_select(1, strides).flatten(1, 2)
                sums.append(torch.stack([sum_strides(row, self.sparse) for row in tokens]))
        return [compress(row, self.sparse) for row in torch.cat(sums, 1)]

    def _choose_row(self, q: Tensor, keys: CompressedKeys) -> Tensor:
        """Return the chosen blocks of a row's q (S, H, D) that may be far: (F, G, topk)."""
        chosen = choose_by_score(q, self.choosers, keys, self.sparse, self.problem.spec.scale)
        # The last `window_blocks` places of a list have blocks that lie in the window as a whole.
        blocks = -(-find_longest(self.problem.mask) // self.sparse.block_size)
        return chosen[..., : self.sparse.topk].to(packed_dtype(blocks), copy=True)

    @functools.cached_property
    def choosers(self) -> Choosers:
        """This rank's queries that choose."""
        return Choosers.of_tokens(self.positions, self.problem.mask, self.sparse)

    def find_ends(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        send = functools.partial(send_to_device, device=device)

        def make() -> tuple[Tensor, Tensor, Tensor]:
            stops = self.positions - self.sparse.window_size
            return send(self.choosers.starts()), send(self.choosers.tokens), send(stops)

        return prepare_once(self.choosers, ("ends",), device, make)

    def _strides(self, number: int, device: torch.device) -> Tensor:
        """Return the first tokens of the strides of `choosers` in a span, counted from there."""

        def make() -> Tensor:
            strides = self.choosers.strides(self.sparse.kernel_stride)
            start, stop = self.spans.spans[number]
            inside = strides[(strides >= start) & (strides < stop)] - start
            return send_to_device(inside, device)

        return prepare_once(self.choosers, ("strides", number), device, make)
