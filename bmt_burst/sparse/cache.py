"""Sparse attention of new tokens to a cache of keys and values, for generation on one process."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..merging.merge import empty_lse
from ..merging.sinks import with_sinks
from .blocks import FarBlocks
from .choice import choose_in_document
from .compressed import compress, sum_strides
from .config import InfLLMV2
from .far import add_far_outputs


@torch.no_grad()
def attend_to_cache(
    q: Tensor, k: Tensor, v: Tensor, sparse: InfLLMV2, sinks: Tensor | None = None
) -> Tensor:
    """Return the sparse attention of the last tokens of a document: (B, S, H, D), in q's dtype.

    q      (B, S, H, D), the last S of T tokens
    k, v   (B, T, G, D)
    sinks  (H,) in the accumulator's dtype, or None

    No gradient flows through it.
    """
    scale = q.shape[-1] ** -0.5
    positions = torch.arange(k.shape[1] - q.shape[1], k.shape[1])
    places = positions.to(q.device)
    out = torch.zeros_like(q, dtype=accumulator_dtype(q.dtype))
    lse = empty_lse(q).fill_(-torch.inf)
    with torch.autocast(q.device.type, enabled=False):
        for row, keys, values, of_row, lse_of_row in zip(q, k, v, out, lse, strict=True):
            compressed = compress(sum_strides(keys, sparse), sparse)
            chosen = choose_in_document(row, positions, compressed, sparse, scale)
            blocks = FarBlocks.of_choice(chosen, places * 0, places + 1, sparse.block_size)
            add_far_outputs(row, keys, values, blocks, 0, scale, of_row, lse_of_row)
    if sinks is not None:
        out, _ = with_sinks(out, lse, sinks)
    return out.to(q.dtype)
