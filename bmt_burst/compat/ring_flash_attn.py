"""The functions of ring-flash-attention 0.1.8 (zhuzilin/ring-flash-attention), computed by this
library.

    from bmt_burst.compat.ring_flash_attn import zigzag_ring_flash_attn_func    # was: from
    ring_flash_attn import ...

They take the arguments of that package, in its order and with its defaults, and return what it
returns: out, or with return_attn_probs (out, softmax_lse, None). `Options` in
bmt_burst.compat.flash tells what each option is. Each function has a form for packed tensors; k and
v are views of these.

Which tokens a rank r of W has, of a batch (B, S, ...):

    ring      chunk r of W
    zigzag    chunks r and 2W - 1 - r of 2W; causal only
    stripe    tokens r, r + W, r + 2W, ...; causal only

Of packed documents (T, ...), with the cu_seqlens of the rank's own tokens, the same on all ranks,
(0, ..., T):

    ring      chunk r of W of each document
    zigzag    chunks r and 2W - 1 - r of 2W of each document; causal only
    llama3    chunk r of W of the sequence, with cu_seqlens as llama3_flash_attn_prepare_cu_seqlens
              makes them

max_seqlen and heads_k_stride are for the kernels of that package: nothing is computed from them.

substitute_hf_flash_attn and update_ring_flash_attn_params are for models of transformers, which
they import.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import as_bool, as_int
from ..ranks.agreement import admit_one_thread, gather_terms, read_terms
from ..ranks.rings import Group, Rings
from ..sequence.layout import Layout, Stacked
from .flash import Bounds, Options, Placing, attention, numbers, tokens_of, with_options

_MOST_LAYOUTS = 64  # that are kept
_STARTS_A_MESSAGE = 256  # of which a message holds the positions, whatever they are

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]


_with_options = functools.partial(
    with_options, names=[x.name for x in fields(Options) if x.name != "softcap"]
)


@_with_options
def ring_flash_attn_func(q, k, v, options):
    """q (B, S, H, D), k and v (B, S, G, D) of a batch; the ranks have contiguous chunks."""
    return attention((q, k, v), options, _batch("contiguous", options))


@_with_options
def ring_flash_attn_kvpacked_func(q, kv, options):
    """ring_flash_attn_func of q (B, S, H, D) and kv (B, S, 2, G, D)."""
    return attention((q, kv), options, _batch("contiguous", options))


@_with_options
def ring_flash_attn_qkvpacked_func(qkv, options):
    """ring_flash_attn_func of qkv (B, S, 3, H, D)."""
    return attention((qkv,), options, _batch("contiguous", options))


@_with_options
def zigzag_ring_flash_attn_func(q, k, v, options):
    """q (B, S, H, D), k and v (B, S, G, D) of a batch, S even; each rank has an early and a late
    chunk.
    """
    return attention((q, k, v), options, _batch("zigzag", options))


@_with_options
def zigzag_ring_flash_attn_kvpacked_func(q, kv, options):
    """zigzag_ring_flash_attn_func of q (B, S, H, D) and kv (B, S, 2, G, D)."""
    return attention((q, kv), options, _batch("zigzag", options))


@_with_options
def zigzag_ring_flash_attn_qkvpacked_func(qkv, options):
    """zigzag_ring_flash_attn_func of qkv (B, S, 3, H, D)."""
    return attention((qkv,), options, _batch("zigzag", options))


@_with_options
def stripe_flash_attn_func(q, k, v, options):
    """q (B, S, H, D), k and v (B, S, G, D) of a batch; rank r of W has tokens r, r + W, r + 2W, ..."""
    return attention((q, k, v), options, _batch("striped", options))


@_with_options
def stripe_flash_attn_kvpacked_func(q, kv, options):
    """stripe_flash_attn_func of q (B, S, H, D) and kv (B, S, 2, G, D)."""
    return attention((q, kv), options, _batch("striped", options))


@_with_options
def stripe_flash_attn_qkvpacked_func(qkv, options):
    """stripe_flash_attn_func of qkv (B, S, 3, H, D)."""
    return attention((qkv,), options, _batch("striped", options))


@_with_options
def ring_flash_attn_varlen_func(q, k, v, cu_seqlens, max_seqlen, options):
    """q (T, H, D), k and v (T, G, D) of packed documents, of each of which the ranks have
    contiguous chunks.
    """
    return attention((q, k, v), options, _documents("contiguous", cu_seqlens, options))


@_with_options
def ring_flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, max_seqlen, options):
    """ring_flash_attn_varlen_func of q (T, H, D) and kv (T, 2, G, D)."""
    return attention((q, kv), options, _documents("contiguous", cu_seqlens, options))


@_with_options
def ring_flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, options):
    """ring_flash_attn_varlen_func of qkv (T, 3, H, D)."""
    return attention((qkv,), options, _documents("contiguous", cu_seqlens, options))


@_with_options
def zigzag_ring_flash_attn_varlen_func(q, k, v, cu_seqlens, max_seqlen, options):
    """q (T, H, D), k and v (T, G, D) of packed documents, of each of which a rank has an early and
    a late chunk.
    """
    return attention((q, k, v), options, _documents("zigzag", cu_seqlens, options))


@_with_options
def zigzag_ring_flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, max_seqlen, options):
    """zigzag_ring_flash_attn_varlen_func of q (T, H, D) and kv (T, 2, G, D)."""
    return attention((q, kv), options, _documents("zigzag", cu_seqlens, options))


@_with_options
def zigzag_ring_flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, options):
    """zigzag_ring_flash_attn_varlen_func of qkv (T, 3, H, D)."""
    return attention((qkv,), options, _documents("zigzag", cu_seqlens, options))


@_with_options
def llama3_flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    heads_k_stride,
    local_k_slice,
    options,
):
    """q (T, H, D), k and v (T, G, D) of packed documents, as they follow one another in the ranks'
    chunks.

    cu_seqlens_q, cu_seqlens_k and local_k_slice are those of llama3_flash_attn_prepare_cu_seqlens,
    for this rank and the same `causal`. The ranks tell each other in every call which documents
    they have. Raises ValueError on every rank if what they say does not fit together.
    """
    return attention(
        (q, k, v), options, _in_sequence(cu_seqlens_q, cu_seqlens_k, local_k_slice, options)
    )


@_with_options
def llama3_flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    heads_k_stride,
    local_k_slice,
    options,
):
    """llama3_flash_attn_varlen_func of q (T, H, D) and kv (T, 2, G, D)."""
    return attention(
        (q, kv), options, _in_sequence(cu_seqlens_q, cu_seqlens_k, local_k_slice, options)
    )


@_with_options
def llama3_flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    heads_k_stride,
    local_k_slice,
    options,
):
    """llama3_flash_attn_varlen_func of qkv (T, 3, H, D)."""
    return attention(
        (qkv,), options, _in_sequence(cu_seqlens_q, cu_seqlens_k, local_k_slice, options)
    )


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """What llama3_flash_attn_varlen_func takes on a rank, for the cu_seqlens (0, ..., tokens) of
    the whole sequence.

    Returns cu_seqlens_q of the rank's tokens, cu_seqlens_k of the keys that these may see, both
    with cu_seqlens' dtype and device, the lengths of the longest document in each, and which of all
    keys these keys are. Raises ValueError if the ranks do not divide the tokens.
    """
    whole = _rising(numbers("cu_seqlens", cu_seqlens))
    of_q, of_k, keys = _part(
        whole, as_bool("causal", causal), as_int("rank", rank), as_int("world_size", world_size)
    )
    like = {"dtype": cu_seqlens.dtype, "device": cu_seqlens.device}
    longest = (max(_lengths(bounds)) for bounds in (of_q, of_k))
    return torch.tensor(of_q, **like), torch.tensor(of_k, **like), *longest, keys


def substitute_hf_flash_attn(process_group: Group | None, heads_k_stride: int) -> None:
    """Puts attention over the ranks of `process_group` in the place of transformers'
    flash_attention_2, in all models.

    Their attention is causal and of packed documents, which update_ring_flash_attn_params tells
    before each forward. Each rank gives a model its chunk of the tokens and of their position_ids,
    (1, T) / ranks, and no padding. Models that were made with another attn_implementation keep
    their own attention, of this rank's tokens alone.
    """
    from . import hf_adapter

    hf_adapter.substitute(process_group)


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Group | None) -> None:
    """Tells models what their next tokens are: documents that begin at cu_seqlens (0, ..., T), of
    the whole sequence.

    Raises ValueError if these do not rise from 0, if the ranks do not divide the tokens, or if
    `process_group` has other ranks than substitute_hf_flash_attn was given; RuntimeError if that
    was not called yet.
    """
    from . import hf_adapter

    hf_adapter.update(_rising(numbers("cu_seqlens", cu_seqlens)), process_group)


def _batch(layout: str, options: Options) -> Placing:
    """A sequence of so many tokens on each rank."""

    def placing(rings: Rings, q: Tensor) -> tuple[Bounds, str]:
        tokens = tokens_of(q, 4)
        check_kind(layout, options.causal, [tokens])
        return (0, tokens * rings.size), layout

    return placing


def _documents(layout: str, cu_seqlens: Any, options: Options) -> Placing:
    """Documents of so many tokens on each rank."""

    def placing(rings: Rings, q: Tensor) -> tuple[Bounds, Layout]:
        bounds = _rising(numbers("cu_seqlens", cu_seqlens))
        if bounds[-1] != tokens_of(q, 3):
            raise ValueError(
                f"cu_seqlens, those of this rank's tokens, end at {bounds[-1]}, but q has {len(q)} tokens"
            )
        check_kind(layout, options.causal, _lengths(bounds))
        whole = tuple(bound * rings.size for bound in bounds)
        return whole, _of_each(layout, whole, rings.size)

    return placing


def _in_sequence(
    cu_seqlens_q: Any, cu_seqlens_k: Any, local_k_slice: slice, options: Options
) -> Placing:
    """Documents one after the other, of which each rank knows its own."""

    def placing(rings: Rings, q: Tensor) -> tuple[Bounds, str]:
        tokens = tokens_of(q, 3)
        of_q, of_k = numbers("cu_seqlens_q", cu_seqlens_q), numbers("cu_seqlens_k", cu_seqlens_k)
        if len(of_q) < 2 or of_q[-1] != tokens:
            raise ValueError(
                f"cu_seqlens_q must be (0, ..., {tokens}), as many tokens as q has, got {of_q}"
            )
        if not isinstance(local_k_slice, slice):
            raise TypeError(f"local_k_slice must be a slice, got {type(local_k_slice).__name__}")
        first = rings.rank * tokens
        begins = local_k_slice.start == first  # a document, with the first token
        starts = [first + bound for bound in (of_q if begins else of_q[1:])[:-1]]
        whole = _rising((*sorted(_of_all_ranks(rings, starts)), tokens * rings.size))
        expected = _part(whole, options.causal, rings.rank, rings.size)
        if (of_q, of_k, local_k_slice) != expected:
            raise ValueError(
                "cu_seqlens_q, cu_seqlens_k and local_k_slice must be what llama3_flash_attn_prepare_cu_seqlens makes "
                f"for rank {rings.rank} of {rings.size} and causal={options.causal}; the ranks' documents begin at "
                f"{whole[:-1]}, so they should be {expected}, got {(of_q, of_k, local_k_slice)}"
            )
        return whole, "contiguous"

    return placing


def check_kind(layout: str, causal: bool, lengths: Sequence[int]) -> None:
    """Raises ValueError for what that package does not compute either: its halves and stripes are
    for causal masks.
    """
    if layout != "contiguous" and not as_bool("causal", causal):
        raise ValueError(
            f"{layout} attention is causal: give causal=True, or call a ring_flash_attn function"
        )
    if layout == "zigzag" and any(length % 2 for length in lengths):
        raise ValueError(
            f"a rank has two chunks of equal length of each sequence, but here are {list(lengths)} tokens"
        )


def _of_all_ranks(rings: Rings, mine: Sequence[int]) -> list[int]:
    """The numbers of all ranks, in rank order."""
    found: list[list[int]] = [[] for _ in range(rings.size)]
    at, most, doing = 0, 1, "a call of llama3_flash_attn_varlen_func"
    with admit_one_thread(rings, doing):
        while at < most:
            part = {"count": len(mine), "numbers": list(mine[at : at + _STARTS_A_MESSAGE])}
            said = read_terms(gather_terms(rings, doing, lambda part=part: part))
            for numbers_of_rank, theirs in zip(found, said, strict=True):
                numbers_of_rank += theirs["numbers"]
            at, most = at + _STARTS_A_MESSAGE, max(theirs["count"] for theirs in said)
    return [number for numbers_of_rank in found for number in numbers_of_rank]


def _part(whole: Bounds, causal: bool, rank: int, size: int) -> tuple[Bounds, Bounds, slice]:
    """cu_seqlens of a rank's queries, of the keys that these may see, and which of all keys these
    are.
    """
    if size < 1 or whole[-1] % size:
        raise ValueError(f"{size} ranks do not divide the {whole[-1]} tokens of cu_seqlens")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is none of {size}")
    tokens = whole[-1] // size
    first, stop = rank * tokens, (rank + 1) * tokens
    left = max(bound for bound in whole if bound <= first)
    right = stop if causal else min(bound for bound in whole if bound >= stop)
    inner = [bound for bound in whole if first < bound < stop]
    of_q = (0, *(bound - first for bound in inner), tokens)
    of_k = (0, *(bound - left for bound in inner), right - left)
    return of_q, of_k, slice(left, right)


@functools.lru_cache(maxsize=_MOST_LAYOUTS)
def _of_each(layout: str, whole: Bounds, size: int) -> Layout:
    """Each document cut over the ranks as a sequence of its own."""
    return Stacked([Layout.named(layout, length, size) for length in _lengths(whole)])


def _rising(bounds: Bounds) -> Bounds:
    """cu_seqlens without documents that have no tokens. Raises ValueError if they do not rise from
    0.
    """
    if len(bounds) < 2 or bounds[0] != 0 or list(bounds) != sorted(bounds) or bounds[-1] < 1:
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, got {bounds}")
    return tuple(dict.fromkeys(bounds))


def _lengths(bounds: Bounds) -> list[int]:
    return [after - before for before, after in itertools.pairwise(bounds)]
