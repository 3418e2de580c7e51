"""Compressed keys: means of neighbouring keys of a document. `choice.py` defines them.

Letters: B batch, S new tokens, n tokens, strides or kernels of a document, G kv heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..sequence.span import Span, length
from .config import Constants


class CompressedKeys(NamedTuple):
    """The compressed keys of documents one after the other: (n, G, D) each, in fp32 (fp64)."""

    scored: Tensor
    normalizing: Tensor

    def of_document(self, strides: Span) -> CompressedKeys:
        """Return the compressed keys of a document with these `strides`, as `ChoosingDocument` has
        them. The others are those of other documents, or mix two documents.
        """
        (first, _), count = strides, length(strides)
        scored = self.scored[first:][: max(count - 1, 0)]
        return CompressedKeys(scored, self.normalizing[first // 4 :][: max(count - 4, 0) // 4])


def sum_strides(k: Tensor, sparse: Constants) -> Tensor:
    """Return the sums of each `kernel_stride` keys of a document: (n // stride, G, D), wide.

    k  (n, G, D), from the start of a document or from a multiple of the stride on
    """
    count = len(k) // sparse.kernel_stride
    wide = k[: count * sparse.kernel_stride].to(accumulator_dtype(k.dtype))
    strides = wide.view(count, sparse.kernel_stride, *k.shape[1:])
    total = torch.zeros_like(strides[:, 0])
    for i in range(sparse.kernel_stride):
        total += strides[:, i]
    return total


def compress(strides: Tensor, sparse: Constants) -> CompressedKeys:
    """Return the compressed keys of documents from their `sum_strides` (n, ...): a scored one from
    each stride on, (n - 1, ...), and a normalizing one from each fourth, (n // 4 - 1, ...).
    """
    scored = _sum_neighbours(strides, 2, 1) / (2 * sparse.kernel_stride)
    return CompressedKeys(scored, _sum_neighbours(strides, 8, 4) / (8 * sparse.kernel_stride))


def _sum_neighbours(strides: Tensor, count: int, step: int) -> Tensor:
    """Return the sums of `count` neighbours, beginning at every `step`-th."""
    kernels = max((len(strides) - count) // step + 1, 0)
    total = strides.new_zeros(kernels, *strides.shape[1:])
    for i in range(count):
        total += strides[i : i + step * kernels : step]
    return total


class KeySums:
    """The sums of a cache's keys, to each of which a key is added once: a new token need not read
    all keys. On GPUs `triton_decoding.py` has them.

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

    def compress(self, row: int) -> CompressedKeys:
        """Return the compressed keys of a row of the batch."""
        assert self._strides is not None, "extend comes first"
        return compress(self._strides[:, row], self.sparse)
