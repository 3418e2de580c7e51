"""Sparse attention of new tokens to a cache, in torch. On GPUs `triton_decoding.py` computes it.

Letters: B batch, S new tokens, T tokens of the cache, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..kernels.few_queries import attend_grouped
from ..spec import Spec
from .compressed import CompressedKeys, compress, sum_strides
from .config import Constants


class KeySums:
    """The sums of keys that a layer chooses by. They grow with a cache.

    Each key is added once, so that a new token need not read all keys.

    tokens  the number of keys so far
    """

    def __init__(self, sparse: Constants):
        self.sparse, self.tokens = sparse, 0
        self._strides: Tensor | None = None  # (n, B, G, D), the sums of whole strides
        self._rest: Tensor | None = None  # (T % stride, B, G, D), keys of an unfinished stride

    @torch.no_grad()
    def extend(self, keys: Tensor) -> None:
        """Append the keys (B, S, G, D) of new tokens."""
        self.tokens += keys.shape[1]
        fresh = keys.transpose(0, 1)
        if self._rest is not None:
            fresh = torch.cat((self._rest, fresh))
        count = len(fresh) // self.sparse.kernel_stride
        if count or self._strides is None:
            sums = sum_strides(fresh.flatten(1, 2), self.sparse).unflatten(1, fresh.shape[1:3])
            self._strides = sums if self._strides is None else torch.cat((self._strides, sums))
        self._rest = fresh[count * self.sparse.kernel_stride :].clone()

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows (N,) int64 of the batch."""
        if self._rest is not None and self._strides is not None:
            at = rows.to(self._rest.device)
            self._rest, self._strides = self._rest[:, at], self._strides[:, at]

    def strides(self) -> Tensor:
        """Return the sums of all strides, (n, B, G, D). The last one is unfinished, perhaps 0."""
        assert self._strides is not None and self._rest is not None, "extend comes first"
        last = torch.zeros_like(self._rest[:1], dtype=self._strides.dtype)
        for keys in self._rest:
            last += keys
        return torch.cat((self._strides, last))

    def compress(self) -> list[CompressedKeys]:
        """Return the compressed keys of each row."""
        assert self._strides is not None, "extend comes first"
        return [compress(row, self.sparse) for row in self._strides.unbind(1)]


def attend_to_chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    places: Tensor,
    chosen: Tensor,
    sparse: Constants,
    spec: Spec,
) -> tuple[Tensor, Tensor]:
    """Return the attention of a few queries to those keys in their blocks that are at hand: out (S,
    H, D) and lse (H, S), in the accumulator's dtype.

    q          (S, H, D)
    k, v       (T, G, D), some keys of a document
    positions  (T,) int64, rising, on q's device: their positions in the document
    places     (S,) int64: those of the queries
    chosen     (S, G, N) int32: blocks of the document, -1 for none
    """
    (queries, heads, _), groups, size = q.shape, k.shape[1], sparse.block_size
    out = torch.zeros_like(q, dtype=accumulator_dtype(q.dtype))
    lse = out.new_full((heads, queries), -torch.inf)
    if not len(k):
        return out, lse
    inside = torch.arange(size, device=q.device)
    group = torch.arange(groups, device=q.device).unsqueeze(1)
    for n, place in enumerate(places.tolist()):  # one query at a time, as keys are copied
        tokens = (chosen[n].long().unsqueeze(-1) * size + inside).flatten(1)  # (G, N * size)
        at = torch.searchsorted(positions, tokens).clamp_max(len(k) - 1)
        seen = (positions[at] == tokens) & (tokens <= place)
        rows = q[n].unflatten(0, (groups, -1))  # (G, H / G, D)
        found = attend_grouped(rows, k[at, group], v[at, group], seen.unsqueeze(1), spec)
        out[n], lse[:, n] = (x.flatten(0, 1) for x in found)
    return out, lse
