"""The functions of ring-flash-attention 0.1.8 (zhuzilin/ring-flash-attention), computed by this
library.

    # before: from ring_flash_attn import zigzag_ring_flash_attn_func
    from bmt_burst.compat.ring_flash_attn import zigzag_ring_flash_attn_func

They take the arguments of that package, in its order and with its defaults. They return the same
results: out, or with return_attn_probs (out, softmax_lse, None). `Options` in
bmt_burst.compat.flash describes the options. Each function has forms for packed tensors, which are
not copied.

Rank r of W has these tokens of a batch (B, S, ...):

    ring      chunk r of W
    zigzag    chunks r and 2W - 1 - r of 2W; causal only
    stripe    tokens r, r + W, r + 2W, ...; causal only

It has these tokens of packed documents (T, ...). Their cu_seqlens (0, ..., T) count the tokens of
one rank, and are the same on all ranks:

    ring      chunk r of W of each document
    zigzag    chunks r and 2W - 1 - r of 2W of each document; causal only
    llama3    chunk r of W of the sequence; see llama3_flash_attn_prepare_cu_seqlens

max_seqlen and heads_k_stride are for that package's kernels, and ignored here.

substitute_hf_flash_attn and update_ring_flash_attn_params are for models of transformers, and
import that package.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.arguments import as_bool, as_int
from ..ranks.agreement import admit_one_thread, gather_terms, read_terms
from ..ranks.rings import Group, Rings
from ..sequence.layout import Layout, Stacked
from .flash import Bounds, Cut, Result, count_tokens, make_function, read_numbers

_MOST_LAYOUTS = 64  # that are kept
_STARTS_A_MESSAGE = 256  # positions that fit into a message, whatever they are

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


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Prepare the arguments of llama3_flash_attn_varlen_func on a rank.

    cu_seqlens  (0, ..., tokens) of the whole sequence

    Returns cu_seqlens_q of the rank's tokens, cu_seqlens_k of the keys that these may see, the
    lengths of the longest document in each, and the slice of these keys among all keys. Both
    cu_seqlens have the dtype and device of the given ones. Raises ValueError if the tokens do not
    divide by the ranks.
    """
    whole = _check_rising(read_numbers("cu_seqlens", cu_seqlens))
    of_q, of_k, keys = _prepare(
        whole, as_bool("causal", causal), as_int("rank", rank), as_int("world_size", world_size)
    )
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor(bounds, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        for bounds in (of_q, of_k)
    )
    return cu_seqlens_q, cu_seqlens_k, max(_lengths(of_q)), max(_lengths(of_k)), keys


def substitute_hf_flash_attn(process_group: Group | None, heads_k_stride: int) -> None:
    """Replace transformers' flash_attention_2 in all models by attention over the ranks of
    `process_group`.

    The attention is causal, over packed documents. Call update_ring_flash_attn_params before each
    forward to say where they begin. Each rank gives a model its chunk of the tokens and of their
    position_ids, (1, T) / ranks, without padding. Models that were made with another
    attn_implementation keep their own attention, over the tokens of this rank alone.
    """
    from . import hf_adapter

    hf_adapter.substitute(process_group)


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Group | None) -> None:
    """Set the documents of the next forward: they begin at cu_seqlens (0, ..., T) of the whole
    sequence.

    Raises ValueError if cu_seqlens do not rise from 0, if the tokens do not divide by the ranks, or
    if substitute_hf_flash_attn was given a group of other ranks. Raises RuntimeError before
    substitute_hf_flash_attn.
    """
    from . import hf_adapter

    hf_adapter.update(_check_rising(read_numbers("cu_seqlens", cu_seqlens)), process_group)


def _place_sequences(layout: str, rings: Rings, q: Tensor, causal: bool) -> tuple[Bounds, str]:
    """Place a batch of sequences with equally many tokens on each rank."""
    tokens = count_tokens(q, 4)
    _check_layout(layout, causal, [tokens])
    return (0, tokens * rings.size), layout


def _place_documents(
    layout: str, rings: Rings, q: Tensor, causal: bool, cu_seqlens: Tensor, max_seqlen: int
) -> tuple[Bounds, Layout]:
    """Place packed documents. Each document is cut over the ranks."""
    bounds = _check_rising(read_numbers("cu_seqlens", cu_seqlens))
    if bounds[-1] != count_tokens(q, 3):
        raise ValueError(
            f"cu_seqlens count the tokens of this rank: they end at {bounds[-1]}, "
            f"but q has {len(q)} tokens"
        )
    _check_layout(layout, causal, _lengths(bounds))
    whole = tuple(bound * rings.size for bound in bounds)
    return whole, _stacked(layout, whole, rings.size)


def _place_chunks(
    rings: Rings,
    q: Tensor,
    causal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
) -> tuple[Bounds, str]:
    """Place packed documents in sequence. Each rank knows only the documents in its chunk."""
    tokens = count_tokens(q, 3)
    of_q = read_numbers("cu_seqlens_q", cu_seqlens_q)
    of_k = read_numbers("cu_seqlens_k", cu_seqlens_k)
    if len(of_q) < 2 or of_q[-1] != tokens:
        raise ValueError(
            f"cu_seqlens_q must be (0, ..., {tokens}), as many tokens as q has, got {of_q}"
        )
    if not isinstance(local_k_slice, slice):
        raise TypeError(f"local_k_slice must be a slice, got {type(local_k_slice).__name__}")
    first = rings.rank * tokens
    begins = local_k_slice.start == first  # a document begins with the rank's first token
    starts = [first + bound for bound in (of_q if begins else of_q[1:])[:-1]]
    whole = _check_rising((*sorted(_gather_numbers(rings, starts)), tokens * rings.size))
    expected = _prepare(whole, causal, rings.rank, rings.size)
    if (of_q, of_k, local_k_slice) != expected:
        raise ValueError(
            "cu_seqlens_q, cu_seqlens_k and local_k_slice must be from "
            f"llama3_flash_attn_prepare_cu_seqlens for rank {rings.rank} of {rings.size} and "
            f"causal={causal}; the documents of the ranks begin at {whole[:-1]}, so expected "
            f"{expected}, got {(of_q, of_k, local_k_slice)}"
        )
    return whole, "contiguous"


def _check_layout(layout: str, causal: bool, lengths: Sequence[int]) -> None:
    """Raise ValueError for calls that ring-flash-attention does not compute either."""
    if layout != "contiguous" and not as_bool("causal", causal):
        raise ValueError(
            f"{layout} attention is causal: pass causal=True, or call a ring_flash_attn function"
        )
    if layout == "zigzag" and any(length % 2 for length in lengths):
        raise ValueError(
            "zigzag gives each rank two chunks of equal length, which needs even numbers of "
            f"tokens, got {list(lengths)} tokens on this rank"
        )


def _gather_numbers(rings: Rings, mine: Sequence[int]) -> list[int]:
    """Return the numbers of all ranks, in rank order."""
    found: list[list[int]] = [[] for _ in range(rings.size)]
    at, most, doing = 0, 1, "a call of llama3_flash_attn_varlen_func"
    with admit_one_thread(rings, doing):
        while at < most:
            part = {"count": len(mine), "numbers": list(mine[at : at + _STARTS_A_MESSAGE])}
            replies = read_terms(gather_terms(rings, doing, functools.partial(dict, part)))
            for numbers, theirs in zip(found, replies, strict=True):
                numbers += theirs["numbers"]
            at, most = at + _STARTS_A_MESSAGE, max(theirs["count"] for theirs in replies)
    return list(itertools.chain(*found))


def _prepare(whole: Bounds, causal: bool, rank: int, size: int) -> tuple[Bounds, Bounds, slice]:
    """Return cu_seqlens of a rank's queries, cu_seqlens of the keys that these may see, and the
    slice of these keys among all keys.
    """
    if size < 1 or whole[-1] % size:
        raise ValueError(f"the {whole[-1]} tokens of cu_seqlens do not divide by {size} ranks")
    if not 0 <= rank < size:
        raise ValueError(f"expected a rank from 0 to {size - 1}, got {rank}")
    tokens = whole[-1] // size
    first, stop = rank * tokens, (rank + 1) * tokens
    left = max(bound for bound in whole if bound <= first)
    right = stop if causal else min(bound for bound in whole if bound >= stop)
    inner = [bound for bound in whole if first < bound < stop]
    of_q = (0, *(bound - first for bound in inner), tokens)
    of_k = (0, *(bound - left for bound in inner), right - left)
    return of_q, of_k, slice(left, right)


@functools.lru_cache(maxsize=_MOST_LAYOUTS)
def _stacked(layout: str, whole: Bounds, size: int) -> Layout:
    """Return the layout that cuts each document over the ranks."""
    return Stacked([Layout.named(layout, length, size) for length in _lengths(whole)])


def _check_rising(bounds: Bounds) -> Bounds:
    """Return cu_seqlens without empty documents. Raises ValueError if they do not rise from 0."""
    if len(bounds) < 2 or bounds[0] != 0 or list(bounds) != sorted(bounds) or bounds[-1] < 1:
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, got {bounds}")
    return tuple(dict.fromkeys(bounds))


def _lengths(bounds: Bounds) -> list[int]:
    return [after - before for before, after in itertools.pairwise(bounds)]


_RING = Cut(
    "Each rank has a contiguous chunk of the sequence.",
    functools.partial(_place_sequences, "contiguous"),
)
_ZIGZAG = Cut(
    "Each rank has an early and a late chunk of the sequence, so S is even. Causal only.",
    functools.partial(_place_sequences, "zigzag"),
)
_STRIPE = Cut(
    "Rank r of W has tokens r, r + W, r + 2W, ... Causal only.",
    functools.partial(_place_sequences, "striped"),
)
_RING_DOCUMENTS = Cut(
    "Each rank has a contiguous chunk of each document.",
    functools.partial(_place_documents, "contiguous"),
)
_ZIGZAG_DOCUMENTS = Cut(
    "Each rank has an early and a late chunk of each document. Causal only.",
    functools.partial(_place_documents, "zigzag"),
)
_LLAMA3 = Cut(
    """Each rank has a contiguous chunk of the sequence.

    llama3_flash_attn_prepare_cu_seqlens makes cu_seqlens_q, cu_seqlens_k and local_k_slice, for
    this rank and the same `causal`. In every call the ranks tell each other where documents begin.
    Raises ValueError on every rank if these do not fit together.
    """,
    _place_chunks,
)


# fmt: off
def _batch(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Group | None = None,
) -> Result:
    """Compute attention of a batch: q (B, S, H, D), k and v (B, S, G, D)."""

def _batch_kvpacked(
    q: Tensor, kv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Group | None = None,
) -> Result:
    """Compute attention of a batch: q (B, S, H, D) and kv (B, S, 2, G, D)."""

def _batch_qkvpacked(
    qkv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Group | None = None,
) -> Result:
    """Compute attention of a batch: qkv (B, S, 3, H, D)."""

def _documents(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Group | None = None,
) -> Result:
    """Compute attention of packed documents: q (T, H, D), k and v (T, G, D)."""

def _documents_kvpacked(
    q: Tensor, kv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Group | None = None,
) -> Result:
    """Compute attention of packed documents: q (T, H, D) and kv (T, 2, G, D)."""

def _documents_qkvpacked(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Group | None = None,
) -> Result:
    """Compute attention of packed documents: qkv (T, 3, H, D)."""

def _llama3(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Group | None = None,
) -> Result:
    """Compute attention of packed documents: q (T, H, D), k and v (T, G, D)."""

def _llama3_kvpacked(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Group | None = None,
) -> Result:
    """Compute attention of packed documents: q (T, H, D) and kv (T, 2, G, D)."""

def _llama3_qkvpacked(
    qkv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Group | None = None,
) -> Result:
    """Compute attention of packed documents: qkv (T, 3, H, D)."""
# fmt: on


ring_flash_attn_func = make_function("ring_flash_attn_func", _batch, _RING)
ring_flash_attn_kvpacked_func = make_function(
    "ring_flash_attn_kvpacked_func", _batch_kvpacked, _RING
)
ring_flash_attn_qkvpacked_func = make_function(
    "ring_flash_attn_qkvpacked_func", _batch_qkvpacked, _RING
)

zigzag_ring_flash_attn_func = make_function("zigzag_ring_flash_attn_func", _batch, _ZIGZAG)
zigzag_ring_flash_attn_kvpacked_func = make_function(
    "zigzag_ring_flash_attn_kvpacked_func", _batch_kvpacked, _ZIGZAG
)
zigzag_ring_flash_attn_qkvpacked_func = make_function(
    "zigzag_ring_flash_attn_qkvpacked_func", _batch_qkvpacked, _ZIGZAG
)

stripe_flash_attn_func = make_function("stripe_flash_attn_func", _batch, _STRIPE)
stripe_flash_attn_kvpacked_func = make_function(
    "stripe_flash_attn_kvpacked_func", _batch_kvpacked, _STRIPE
)
stripe_flash_attn_qkvpacked_func = make_function(
    "stripe_flash_attn_qkvpacked_func", _batch_qkvpacked, _STRIPE
)

ring_flash_attn_varlen_func = make_function(
    "ring_flash_attn_varlen_func", _documents, _RING_DOCUMENTS
)
ring_flash_attn_varlen_kvpacked_func = make_function(
    "ring_flash_attn_varlen_kvpacked_func", _documents_kvpacked, _RING_DOCUMENTS
)
ring_flash_attn_varlen_qkvpacked_func = make_function(
    "ring_flash_attn_varlen_qkvpacked_func", _documents_qkvpacked, _RING_DOCUMENTS
)

zigzag_ring_flash_attn_varlen_func = make_function(
    "zigzag_ring_flash_attn_varlen_func", _documents, _ZIGZAG_DOCUMENTS
)
zigzag_ring_flash_attn_varlen_kvpacked_func = make_function(
    "zigzag_ring_flash_attn_varlen_kvpacked_func", _documents_kvpacked, _ZIGZAG_DOCUMENTS
)
zigzag_ring_flash_attn_varlen_qkvpacked_func = make_function(
    "zigzag_ring_flash_attn_varlen_qkvpacked_func", _documents_qkvpacked, _ZIGZAG_DOCUMENTS
)

llama3_flash_attn_varlen_func = make_function("llama3_flash_attn_varlen_func", _llama3, _LLAMA3)
llama3_flash_attn_varlen_kvpacked_func = make_function(
    "llama3_flash_attn_varlen_kvpacked_func", _llama3_kvpacked, _LLAMA3
)
llama3_flash_attn_varlen_qkvpacked_func = make_function(
    "llama3_flash_attn_varlen_qkvpacked_func", _llama3_qkvpacked, _LLAMA3
)
