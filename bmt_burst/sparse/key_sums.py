"""Sums of keys, by which new tokens choose. On GPUs `triton_decoding.py` has them.

Letters: B batch, S new tokens, T tokens of the cache, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
        return [self.compress_row(row) for row in range(self._strides.shape[1])]

    def compress_row(self, row: int) -> CompressedKeys:
        """Return the compressed keys of a row."""
        assert self._strides is not None, "extend comes first"
        return compress(self._strides[:, row], self.sparse)
