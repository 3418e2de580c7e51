"""The choice of blocks, as InfLLM-V2 defines it (arXiv 2509.24663).

For query i of a document, kv head g with query heads h, scale s, block b and kernel j:

    KC1_j = mean of keys 16 j .. 16 j + 31        KC2_j = mean of keys 64 j .. 64 j + 127
    L_ih  = log sum_j exp(s q_ih . KC2_j)          over the visible j; 0 if there are none
    S_igj = sum_h exp(s q_ih . KC1_j - L_ih)       for the visible j
    A_igb = max S_igj over the visible j that overlap block b

A kernel is visible if its last token is at or before i. The numbers are those of the default
`InfLLMV2`. Each query takes the blocks that are always chosen, then those with the largest A. Of
equal blocks it takes the lower one. Equal ones are common, because a kernel overlaps two blocks.

A choice does not depend on ranks or layouts, bit for bit. Sums have a fixed order: keys are summed
up one after the other, and scores are computed in tiles of one shape, whatever the queries in them.
Sums are fp32, or fp64 for fp64 inputs. The released code rounds them to the inputs' dtype.

Letters: T tokens, H query heads, G kv heads, D head size, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..base.arguments import check_tensor
from ..base.dtypes import accumulator_dtype
from ..sequence.mask import Mask
from ..sequence.span import Span, length
from .config import InfLLMV2

_QUERIES = 64  # of a tile of scores
_KERNELS = 512  # of a tile of scores
_ALIGNED = 16  # a tile's head size is a multiple of this


class CompressedKeys(NamedTuple):
    """The compressed keys of one document: (n, G, D) each, in the accumulator's dtype."""

    scored: Tensor
    normalizing: Tensor


def choose(
    q: Tensor,
    k: Tensor,
    mask: Mask,
    sparse: InfLLMV2,
    *,
    softmax_scale: float | None = None,
) -> Tensor:
    """Return the blocks that each query of whole sequences attends to.

    Args:
        q: (T, H, D) queries, or (B, T, H, D).
        k: (T, G, D) keys, or (B, T, G, D). With `use_nope`, pass both without rotary positions.
        mask: causal documents of T tokens: Mask.causal or Mask.documents.
        softmax_scale: positive factor of the scores, by default 1 / sqrt(D).

    Returns:
        (T, G, topk + window_size // block_size) int32, or with a leading B: the chosen blocks of
        each query and kv head, rising, counted from the start of the query's document. Entries at
        the end are -1 where there are fewer.

    Raises:
        ValueError: if the call is dense as a whole, because its longest document has fewer than
            dense_len tokens; for another mask; for shapes that do not fit.
        TypeError: for anything but tensors, a Mask and an InfLLMV2.
    """
    _check_choose(q, k, mask, sparse)
    if q.dim() == 4:
        rows = [
            choose(*row, mask, sparse, softmax_scale=softmax_scale)
            for row in zip(q, k, strict=True)
        ]
        return torch.stack(rows)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    shape = len(q), k.shape[1], sparse.most_blocks
    chosen = torch.full(shape, -1, dtype=torch.int32, device=q.device)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for start, stop in documents(mask):
            keys = compress(sum_strides(k[start:stop], sparse), sparse)
            places = torch.arange(stop - start, device=q.device)
            chosen[start:stop] = choose_in_document(q[start:stop], places, keys, sparse, scale)
    return chosen


def documents(mask: Mask) -> list[Span]:
    """Return the documents of a mask. Tokens in none of them, such as padding, see nothing."""
    return [s.q for s in mask.slices]


def find_fault(mask: Mask) -> str | None:
    """Return why sparse attention cannot use this mask, or None if it can."""
    for s in mask.slices:
        if s.q != s.kv or s.low != 0 or s.high is not None:
            return (
                "sparse attention needs causal documents, whole sequences or Mask.documents("
                f"..., causal=True); got a mask with Slice{tuple(s)}"
            )
    return None


def find_longest(mask: Mask) -> int:
    """Return the number of tokens of the longest document."""
    return max(map(length, documents(mask)), default=0)


def sum_strides(k: Tensor, sparse: InfLLMV2) -> Tensor:
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


def compress(strides: Tensor, sparse: InfLLMV2) -> CompressedKeys:
    """Return the compressed keys of a document from its `sum_strides`."""
    tokens = sparse.kernel_stride
    return CompressedKeys(
        scored=_sum_neighbours(strides, 2, 1) / (2 * tokens),
        normalizing=_sum_neighbours(strides, 8, 4) / (8 * tokens),
    )


def _sum_neighbours(strides: Tensor, count: int, step: int) -> Tensor:
    """Return the sums of `count` neighbours, beginning at every `step`-th."""
    kernels = max((len(strides) - count) // step + 1, 0)
    total = strides.new_zeros(kernels, *strides.shape[1:])
    for i in range(count):
        total += strides[i : i + step * kernels : step]
    return total


def choose_in_document(
    q: Tensor, places: Tensor, keys: CompressedKeys, sparse: InfLLMV2, scale: float
) -> Tensor:
    """Return the chosen blocks of some queries of a document: (T, G, most_blocks) int32.

    q       (T, H, D)
    places  (T,) int64, rising: the places of the queries in the document
    """
    groups, most = keys.scored.shape[1], sparse.most_blocks
    own = places // sparse.block_size
    everything = torch.arange(most, device=q.device, dtype=torch.int32).expand(len(q), groups, most)
    chosen = everything.masked_fill(everything > own.view(-1, 1, 1), -1)
    first = int(torch.searchsorted(own, most))  # the first query that sees more blocks
    if first < len(q):
        scored = [
            _Scorer(q[first:], places[first:], keys, group, sparse, scale).choose()
            for group in range(groups)
        ]
        chosen[first:] = torch.stack(scored, 1)
    return chosen


class _Scorer:
    """The choice of one kv head for some queries of a document."""

    def __init__(
        self,
        q: Tensor,
        places: Tensor,
        keys: CompressedKeys,
        group: int,
        sparse: InfLLMV2,
        scale: float,
    ):
        heads = q.shape[1] // keys.scored.shape[1]
        wide = keys.scored.dtype
        self.q = q[:, group * heads : (group + 1) * heads].to(wide) * scale
        self.places, self.sparse = places, sparse
        self.scored = _lay_out(keys.scored[:, group])
        self.normalizing = _lay_out(keys.normalizing[:, group])

    def choose(self) -> Tensor:
        """Return the chosen blocks of all queries: (T, most_blocks) int32."""
        found = []
        for start in range(0, len(self.q), _QUERIES):
            q, places = self.q[start : start + _QUERIES], self.places[start : start + _QUERIES]
            lacking = _QUERIES - len(q)
            q = functional.pad(q, (0, -q.shape[-1] % _ALIGNED, 0, 0, 0, lacking))
            # A query of the padding sees nothing.
            places = functional.pad(places, (0, lacking), value=-1)
            scores = self._score_blocks(q, places)
            found.append(_take_largest(scores, self.sparse.most_blocks)[: _QUERIES - lacking])
        return torch.cat(found)

    def _score_blocks(self, q: Tensor, places: Tensor) -> Tensor:
        """Return A of a tile of queries (64, heads, D): (64, blocks), -inf for blocks that begin
        after the query, inf for those that are always chosen.
        """
        sparse, stride = self.sparse, self.sparse.kernel_stride
        last = int(places.max())
        normalizer = q.new_full(q.shape[:2], -math.inf)
        for kernels, scores in _score(q, self.normalizing, last, 4 * stride, 8 * stride):
            hidden = kernels > places.unsqueeze(1)
            scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
            normalizer = torch.logaddexp(normalizer, scores.logsumexp(-1))
        normalizer = normalizer.masked_fill(normalizer == -math.inf, 0.0)
        sums = [q.new_empty(len(q), 0)]
        for kernels, scores in _score(q, self.scored, last, stride, 2 * stride):
            total = (scores - normalizer.unsqueeze(-1)).exp().sum(1)
            sums.append(total.masked_fill(kernels > places.unsqueeze(1), -1.0))
        return self._find_largest(torch.cat(sums, 1), places, last // sparse.block_size + 1)

    def _find_largest(self, sums: Tensor, places: Tensor, blocks: int) -> Tensor:
        """Return A from the sums S (64, kernels), which are -1 for kernels that are not visible."""
        sparse = self.sparse
        each = sparse.block_size // sparse.kernel_stride
        lacking = blocks * each - sums.shape[1]
        sums = functional.pad(sums.nan_to_num(-1.0), (1, lacking), value=-1.0)
        largest = sums.unfold(1, each + 1, each).amax(-1)
        block = torch.arange(blocks, device=sums.device)
        own = (places // sparse.block_size).unsqueeze(1)
        always = (block < sparse.init_blocks) | (block >= own - sparse.window_blocks)
        return largest.masked_fill(always, math.inf).masked_fill(block > own, -math.inf)


def _lay_out(keys: Tensor) -> Tensor:
    """Return compressed keys (n, D) as columns, padded to tiles of one shape: (D, kernels)."""
    return functional.pad(
        keys.T, (0, -len(keys) % _KERNELS, 0, -keys.shape[1] % _ALIGNED)
    ).contiguous()


def _score(
    q: Tensor, keys: Tensor, last: int, stride: int, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the scores of a tile of queries (64, heads, D) and each tile of kernels that is visible
    at place `last`: the last tokens of the kernels (512,), and the scores (64, heads, 512).
    """
    rows = q.flatten(0, 1)
    for start in range(0, keys.shape[1], _KERNELS):
        ends = torch.arange(start, start + _KERNELS, device=q.device) * stride + size - 1
        if start * stride + size - 1 > last:
            return
        columns = keys[:, start : start + _KERNELS].contiguous()
        yield ends, (rows @ columns).unflatten(0, q.shape[:2])


def _take_largest(scores: Tensor, most: int) -> Tensor:
    """Return the `most` blocks with the largest scores (T, blocks), the lower of equal ones.

    They are int32 in rising order. A score of -inf is never taken. Missing blocks are -1.
    """
    blocks = scores.shape[1]
    values, order = scores.sort(dim=1, descending=True, stable=True)
    taken = order[:, :most].masked_fill(values[:, :most] == -math.inf, blocks)
    taken = functional.pad(taken, (0, max(most - blocks, 0)), value=blocks).sort(1).values
    return taken.masked_fill(taken == blocks, -1).int()


def _check_choose(q: Tensor, k: Tensor, mask: Mask, sparse: InfLLMV2) -> None:
    for name, x in (("q", q), ("k", k)):
        check_tensor(name, x)
        if x.dim() not in (3, 4):
            raise ValueError(
                f"expected {name} (tokens, heads, head size), with or without a batch, "
                f"got shape {tuple(x.shape)}"
            )
    if not isinstance(mask, Mask):
        raise TypeError(f"expected mask to be a Mask, got {type(mask).__name__}")
    if not isinstance(sparse, InfLLMV2):
        raise TypeError(f"expected sparse to be an InfLLMV2, got {type(sparse).__name__}")
    if q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1] or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            "expected q and k of equal tokens and head sizes, and a multiple of k's heads in q; "
            f"got shapes {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if mask.seq_len != q.shape[-3]:
        raise ValueError(f"expected a mask of {q.shape[-3]} tokens, got one of {mask.seq_len}")
    if fault := find_fault(mask):
        raise ValueError(fault)
    if sparse.is_dense(longest := find_longest(mask)):
        raise ValueError(
            f"expected a document of at least dense_len={sparse.dense_len} tokens, got at most "
            f"{longest}: this call is dense, and chooses nothing"
        )


def documents_in(positions: Tensor, mask: Mask) -> Iterator[tuple[Span, Span]]:
    """Yield the documents with some of the rising `positions` (S,): the document's span of the
    sequence, and the span of indices of `positions` in it.
    """
    spans = documents(mask)
    bounds = torch.tensor(spans, dtype=torch.int64).view(-1, 2)
    for span, indices in zip(spans, torch.searchsorted(positions, bounds).tolist(), strict=True):
        if indices[0] < indices[1]:
            yield span, (indices[0], indices[1])
