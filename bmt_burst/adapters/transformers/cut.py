"""The cut of a batch: which tokens of each row a rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ranks.sequence_parallel import SequenceParallel
from ...sequence.layout import Layout, Stacked


@dataclass(frozen=True)
class Cut:
    """B rows of S tokens, cut over the ranks of `sp` by one layout, or by one for each row."""

    sp: SequenceParallel
    size: int
    layouts: Layout | tuple[Layout, ...]

    @property
    def seq_len(self) -> int:
        layouts = self.layouts if isinstance(self.layouts, tuple) else (self.layouts,)
        return layouts[0].seq_len

    def shard(self, x: Tensor) -> Tensor:
        """Return this rank's part of x (B, S, ...) or (1, S): (B, S_local, ...) or (1, S_local)."""
        if isinstance(self.layouts, Layout):
            return self.layouts.shard(x, self.sp.rank, 1)
        pairs = zip(self.layouts, x.expand(self.size, *x.shape[1:]), strict=True)
        return torch.stack([layout.shard(row, self.sp.rank, 0) for layout, row in pairs])

    def unshard(self, x: Tensor) -> Tensor:
        """Return the whole of x (B, S_local, ...), in the order of the input, on every rank.

        Its gradient follows the rule of `SequenceParallel.unshard`.
        """
        if isinstance(self.layouts, Layout):
            return self.sp.with_layout(self.layouts).unshard(x, self.seq_len)
        stacked = self.sp.with_layout(Stacked(self.layouts))
        whole = stacked.unshard(x.flatten(0, 1), self.size * self.seq_len, 0)
        # unflatten would return a view, and FSDP2 loses the gradient of one that changes in place
        return torch.ops.aten._unsafe_view(whole, (self.size, self.seq_len, *whole.shape[1:]))
