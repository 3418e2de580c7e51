"""Sparse attention of new tokens to a cache of keys and values.

`attend_to_cache` is for a cache on one rank, `attend_to_chosen` for a part of one that is cut over
ranks. On GPUs `triton_decoding.py` computes the latter.

Letters: B batch, S new tokens, T tokens of the cache, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..base.compiled import not_compiled
from ..base.dtypes import accumulator_dtype
from ..base.growing import Growing
from ..kernels.few_queries import attend_grouped
from ..merging.merge import empty_lse
from ..merging.sinks import with_sinks
from ..spec import Spec
from .blocks import FarBlocks, FarKeys
from .choice import choose_in_document
from .compressed import (
    CompressedKeys,
    compress,
    compress_normalizing,
    compress_scored,
    sum_strides,
)
from .config import InfLLMV2
from .far import find_kernels


class KeySums:
    """The compressed keys that a layer chooses by. They grow with a cache.

    Each key is added once, so that a new token need not read all keys to compress them.

    tokens  the number of keys so far
    """

    def __init__(self, sparse: InfLLMV2):
        self.tokens = 0
        self.sparse = sparse
        self._rest: Tensor | None = None  # (T % stride, B, G, D), keys of an unfinished stride
        # (n, B, G, D), sums of the last strides, which begin compressed keys that are not finished
        self._strides: Tensor | None = None
        self._first = 0  # the number of the first of them
        self._compressed: tuple[Growing, Growing] | None = None  # (n, B, G, D), as CompressedKeys

    @torch.no_grad()
    def extend(self, keys: Tensor) -> None:
        """Append the keys (B, S, G, D) of new tokens."""
        self.tokens += keys.shape[1]
        fresh = keys.transpose(0, 1)
        if self._rest is not None:
            fresh = torch.cat((self._rest, fresh))
        count = len(fresh) // self.sparse.kernel_stride
        if count or self._compressed is None:
            sums = sum_strides(fresh.flatten(1, 2), self.sparse).unflatten(1, fresh.shape[1:3])
            self._compress(sums)
        self._rest = fresh[count * self.sparse.kernel_stride :].clone()

    def _compress(self, strides: Tensor) -> None:
        """Add the compressed keys that new strides finish."""
        if self._strides is not None:
            strides = torch.cat((self._strides, strides))
        if self._compressed is None:
            found = CompressedKeys(*compress(strides, self.sparse))
            self._compressed = Growing(found.scored), Growing(found.normalizing)
        else:
            scored, normalizing = self._compressed
            later = strides[scored.count - self._first :]
            scored.add(compress_scored(later, self.sparse))
            normalizing.add(compress_normalizing(strides, self.sparse))
        unfinished = 4 * self._compressed[1].count
        self._strides, self._first = strides[unfinished - self._first :].clone(), unfinished

    def unfinished(self) -> tuple[int, Tensor]:
        """Return the sums of strides that later compressed keys need, (n, B, G, D), after the
        number of the first one. If a stride has not ended, the last one is the sum of its keys.
        """
        assert self._strides is not None and self._rest is not None, "extend comes first"
        last = torch.zeros_like(self._rest[:1], dtype=self._strides.dtype)
        for keys in self._rest:
            last += keys
        return self._first, torch.cat((self._strides, last))

    def compress(self) -> list[CompressedKeys]:
        """Return the compressed keys of each row."""
        assert self._compressed is not None, "extend comes first"
        rows = (x.rows.unbind(1) for x in self._compressed)
        return [CompressedKeys(*(x.contiguous() for x in row)) for row in zip(*rows, strict=True)]


@runtime_checkable
class SparseKVCache(Protocol):
    """A `bmt_burst.nn.KVCache` that also keeps sums of keys, so that sparse layers do not add all
    keys up again for each new token.

    It begins with an empty dict. The layers fill it.
    """

    key_sums: dict[int, KeySums]  # by layer

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Do what KVCache.extend does."""


def check_cache(
    cache: Any, sparse: InfLLMV2 | None, choose_by: tuple[Tensor, Tensor] | None
) -> None:
    """Raise ValueError if a sparse layer cannot attend to this cache."""
    if sparse is None or not sparse.use_nope:
        return
    if choose_by is None:
        raise ValueError(f"expected choose_by with {sparse}, got none")
    if not isinstance(cache, SparseKVCache):
        raise ValueError(
            f"expected a SparseKVCache with {sparse}, since a KVCache has only rotated keys, got "
            f"{type(cache).__name__}"
        )


def sum_keys(cache: Any, layer: int, new_keys: Tensor, keys: Tensor, sparse: InfLLMV2) -> KeySums:
    """Return the sums of all keys of a layer to choose by.

    new_keys  those of the new tokens, which the cache's sums lack
    keys      all of the cache. They are summed up if it keeps no sums.
    """
    sums = KeySums(sparse)
    if isinstance(cache, SparseKVCache):
        sums = cache.key_sums.setdefault(layer, sums)
    else:
        new_keys = keys
    sums.extend(new_keys)
    if sums.tokens != keys.shape[1]:
        raise ValueError(
            f"expected a cache whose key_sums have its {keys.shape[1]} tokens, got {sums.tokens}"
        )
    return sums


@not_compiled
@torch.no_grad()
def attend_to_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_q: Tensor,
    sums: KeySums,
    sparse: InfLLMV2,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the sparse attention of the last tokens of a document, without gradient: (B, S, H, D),
    in q's dtype.

    q      (B, S, H, D), the last S of T tokens
    k, v   (B, T, G, D)
    by_q   (B, S, H, D), to choose by
    sums   of the T keys to choose by
    sinks  (H,) in the accumulator's dtype, or None
    """
    scale = q.shape[-1] ** -0.5
    positions = torch.arange(k.shape[1] - q.shape[1], k.shape[1])
    places, queries = positions.to(q.device), torch.arange(q.shape[1], device=q.device)
    out = torch.zeros_like(q, dtype=accumulator_dtype(q.dtype))
    lse = empty_lse(q).fill_(-torch.inf)
    with torch.autocast(q.device.type, enabled=False):
        for row, compressed in enumerate(sums.compress()):
            chosen = choose_in_document(by_q[row], positions, compressed, sparse, scale)
            blocks = FarBlocks.of_choice(
                chosen, places * 0, queries, places + 1, sparse.block_size, k.shape[1]
            )
            far = FarKeys(k[row], v[row], blocks, 0, scale)
            find_kernels(q[row], far).add_far_outputs(q[row], far, out[row], lse[row])
    if sinks is not None:
        out, _ = with_sinks(out, lse, sinks)
    return out.to(q.dtype)


def attend_to_chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    places: Tensor,
    chosen: Tensor,
    sparse: InfLLMV2,
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
