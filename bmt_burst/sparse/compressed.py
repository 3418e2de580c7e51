"""Compressed keys: means of neighbouring keys of a document. `choice.py` defines them.

Letters: n tokens or kernels of a document, G kv heads, D head size.
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
        first, count = strides[0], length(strides)
        normal = first // 4
        return CompressedKeys(
            self.scored[first : first + max(count - 1, 0)],
            self.normalizing[normal : normal + max(count - 4, 0) // 4],
        )


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
