"""The choice of blocks, as InfLLM-V2 defines it (arXiv 2509.24663).

For query i of a document, kv head g with query heads h, scale s, block b and kernel j:

    KC1_j = mean of keys 16 j .. 16 j + 31        KC2_j = mean of keys 64 j .. 64 j + 127
    L_ih  = log sum_j exp(s q_ih . KC2_j)          over the visible j; 0 if there are none
    S_igj = sum_h exp(s q_ih . KC1_j - L_ih)       for the visible j
    A_igb = max S_igj over the visible j that overlap block b

A kernel is visible if its last token is at or before i. The numbers are those of the default
`InfLLMV2`. Each query takes the blocks that are always chosen, then those with the largest A. Of
equal blocks it takes the lower one. Equal ones are common, because a kernel overlaps two blocks.

A choice does not depend on ranks or layouts, bit for bit: keys are summed up one after the other,
and a score does not depend on the queries that are computed with it. Sums are fp32, or fp64 for
fp64 inputs. The released code rounds them to the inputs' dtype. A GPU and a CPU may choose
differently where scores are nearly equal. Below fp64, blocks with S beyond fp32 are equal: those
with a kernel that has a scaled score of more than L_ih + 88.

Letters: T tokens, H query heads, G kv heads, D head size, B batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.arguments import DTYPES, as_positive, check_tensor
from ..base.registry import Modules
from ..base.streams import send_to_device
from ..blocks.documents import documents, find_fault, find_longest
from ..sequence.mask import Mask
from .compressed import CompressedKeys, compress, sum_strides
from .config import Constants
from .queries import Choosers

_MODULES = Modules(__package__, {"triton": "triton_choice", "torch": "torch_choice"})


def choose(
    q: Tensor, k: Tensor, mask: Mask, sparse: Constants, *, softmax_scale: float | None = None
) -> Tensor:
    """Return the blocks that each query of whole sequences attends to.

    Args:
        q: (T, H, D) queries, or (B, T, H, D).
        k: (T, G, D) keys, or (B, T, G, D). With `use_nope`, pass both without rotary positions.
        mask: causal documents of T tokens: Mask.causal or Mask.documents.
        softmax_scale: factor of the scores, positive and finite, by default 1 / sqrt(D).

    Returns:
        (T, G, topk + window_size // block_size) int32, or with a leading B: the chosen blocks of
        each query and kv head, rising, counted from the start of the query's document. Entries at
        the end are -1 where there are fewer.

    Raises:
        ValueError: if the call is dense, because its longest document has fewer than dense_len
            tokens; for another mask or softmax_scale; for shapes, dtypes and devices that do not
            fit.
        TypeError: for anything but tensors, a Mask, an InfLLMV2 and a number.
    """
    _check_choose(q, k, mask, sparse)
    if softmax_scale is not None:
        softmax_scale = as_positive("softmax_scale", softmax_scale)
    if q.dim() == 4:
        rows = zip(q, k, strict=True)
        return torch.stack([choose(*x, mask, sparse, softmax_scale=softmax_scale) for x in rows])
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    shape = len(q), k.shape[1], sparse.most_blocks
    chosen = torch.full(shape, -1, dtype=torch.int32, device=q.device)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for start, stop in documents(mask):
            keys = compress(sum_strides(k[start:stop], sparse), sparse)
            places = torch.arange(stop - start)
            chosen[start:stop] = choose_in_document(q[start:stop], places, keys, sparse, scale)
    return chosen


def choose_in_document(
    q: Tensor, places: Tensor, keys: CompressedKeys, sparse: Constants, scale: float
) -> Tensor:
    """Return the chosen blocks of some queries of a document: (T, G, most_blocks) int32.

    Queries that see at most `most_blocks` blocks take them all. Scores decide for the others.

    q       (T, H, D)
    places  (T,) int64, rising: the places of the queries in the document. The host reads them.
    """
    groups, most = keys.scored.shape[1], sparse.most_blocks
    own = places // sparse.block_size
    first = int(torch.searchsorted(own, most))  # the first query that sees more blocks
    everything = torch.arange(most, device=q.device, dtype=torch.int32).expand(len(q), groups, most)
    later = everything > send_to_device(own, q.device).view(-1, 1, 1)
    chosen = everything.masked_fill(later, -1)
    if first < len(q):
        choosers = Choosers.of_document(places[first:], len(keys.scored) + 1)
        chosen[first:] = choose_by_score(q[first:], choosers, keys, sparse, scale)
    return chosen


def choose_by_score(
    q: Tensor, choosers: Choosers, keys: CompressedKeys, sparse: Constants, scale: float
) -> Tensor:
    """Return the blocks that `choosers` among the queries q (T, H, D) choose: (F, G, most_blocks)
    int32, rising, -1 at the end where there are fewer.

    keys  those of the choosers' documents, one after the other
    """
    chosen: Tensor = _MODULES.find(q).choose_by_score(q, choosers, keys, sparse, scale)
    return chosen


def _check_choose(q: Tensor, k: Tensor, mask: Mask, sparse: Constants) -> None:
    check_tensor("q", q)
    check_tensor("k", k)
    if not isinstance(mask, Mask):
        raise TypeError(f"expected mask to be a Mask, got {type(mask).__name__}")
    if not isinstance(sparse, Constants):
        raise TypeError(f"expected sparse to be an InfLLMV2, got {type(sparse).__name__}")
    if q.dtype not in DTYPES or q.dtype != k.dtype or q.device != k.device:
        raise ValueError(
            "expected q and k of one floating point dtype on one device, got "
            f"{q.dtype} on {q.device} and {k.dtype} on {k.device}"
        )
    fits = q.dim() in (3, 4) and q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1]
    if not (fits and q.numel() and k.numel() and q.shape[-2] % k.shape[-2] == 0):
        raise ValueError(
            "expected q and k (tokens, heads, head size), with or without a batch, of equal tokens "
            "and head sizes, at least one head in k, and a multiple of k's heads in q; got shapes "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    if mask.seq_len != q.shape[-3]:
        raise ValueError(f"expected a mask of {q.shape[-3]} tokens, got one of {mask.seq_len}")
    mask.check_one_length("sparse attention")
    if fault := find_fault(mask):
        raise ValueError(fault)
    if sparse.is_dense(longest := find_longest(mask)):
        raise ValueError(
            f"expected a document of at least dense_len={sparse.dense_len} tokens, got at most "
            f"{longest}: this call is dense, and chooses nothing"
        )
