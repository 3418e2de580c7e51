"""The functions of ring-flash-attention 0.1.8 (zhuzilin/ring-flash-attention), computed by this
library. They take the same arguments, and ignore max_seqlen and heads_k_stride.

Rank r of W has these tokens of each sequence, or with cu_seqlens of each packed document:

    ring      chunk r of W
    zigzag    chunks r and 2W - 1 - r of 2W; causal only
    stripe    tokens r, r + W, r + 2W, ...; causal only

These cu_seqlens (0, ..., T) count the tokens of one rank, and are the same on all ranks. With
llama3, a rank has chunk r of W of all documents together.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from torch import Tensor, nn

from ..base.arguments import as_bool, as_int
from ..ranks.agreement import admit_one_thread, gather_terms, read_terms
from ..ranks.rings import Group, Rings
from ..sequence.layout import Layout, Stacked
from .flash import Bounds, Place, attention, make_function, read_cu_seqlens

_STARTS_A_MESSAGE = 256  # positions that fit into a message, whatever they are


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Return arguments of llama3_flash_attn_varlen_func, from cu_seqlens of the whole sequence."""
    whole, is_causal = read_cu_seqlens("cu_seqlens", cu_seqlens), as_bool("causal", causal)
    place = as_int("rank", rank), as_int("world_size", world_size)
    of_q, of_k, keys = _prepare(whole, is_causal, *place)
    made = cu_seqlens.new_tensor(of_q), cu_seqlens.new_tensor(of_k)
    return *made, max(_lengths(of_q)), max(_lengths(of_k)), keys


def _prepare(whole: Bounds, causal: bool, rank: int, size: int) -> tuple[Bounds, Bounds, slice]:
    if not 0 <= rank < size or whole[-1] % size:
        raise ValueError(f"rank {rank} of {size} has no equal part of the {whole[-1]} tokens")
    tokens = whole[-1] // size
    first, stop = rank * tokens, (rank + 1) * tokens
    left = max(bound for bound in whole if bound <= first)
    right = stop if causal else min(bound for bound in whole if bound >= stop)
    inner = [bound for bound in whole if first < bound < stop]
    of_q = (0, *(bound - first for bound in inner), tokens)
    of_k = (0, *(bound - left for bound in inner), right - left)
    return of_q, of_k, slice(left, right)


def _place_each(
    layout: str, rings: Rings, tokens: int, causal: bool, cu_seqlens: Any = None, **_ignored: Any
) -> tuple[Bounds, str | Layout]:
    """Cut each document, or without cu_seqlens each sequence, over the ranks."""
    bounds = (0, tokens) if cu_seqlens is None else read_cu_seqlens("cu_seqlens", cu_seqlens)
    lengths = _lengths(bounds)
    if bounds[-1] != tokens:
        raise ValueError(f"cu_seqlens must end at {tokens}, this rank's tokens of q, got {bounds}")
    if layout != "contiguous" and not causal:
        raise ValueError(f"{layout} attention is causal: pass causal=True, or cut plain chunks")
    if layout == "zigzag" and any(length % 2 for length in lengths):
        raise ValueError(f"zigzag needs even numbers of tokens on each rank, got {lengths}")
    whole = tuple(bound * rings.size for bound in bounds)
    return whole, layout if cu_seqlens is None else _stack(layout, whole, rings.size)


@functools.lru_cache(maxsize=64)
def _stack(layout: str, whole: Bounds, size: int) -> Layout:
    return Stacked([Layout.named(layout, length, size) for length in _lengths(whole)])


def _place_chunks(
    rings: Rings, tokens: int, causal: bool, local_k_slice: slice, **others: Any
) -> tuple[Bounds, str]:
    """Cut all documents together. A rank knows only its own, so ranks exchange where they begin."""
    of_q, of_k = (read_cu_seqlens(x, others[x]) for x in ("cu_seqlens_q", "cu_seqlens_k"))
    start = as_int("local_k_slice.start", getattr(local_k_slice, "start", None))
    starts = [start, *(rings.rank * tokens + at for at in of_q[1:-1])]
    whole = (*_gather_numbers(rings, starts), tokens * rings.size)
    given = of_q, of_k, local_k_slice
    if whole[0] or given != _prepare(whole, causal, rings.rank, rings.size):
        raise ValueError(
            "cu_seqlens_q, cu_seqlens_k and local_k_slice must be from llama3_flash_attn_prepare_"
            f"cu_seqlens for {tokens} tokens of rank {rings.rank} of {rings.size} and "
            f"causal={causal}; documents of the ranks begin at {whole[:-1]}, got {given}"
        )
    return whole, "contiguous"


def _gather_numbers(rings: Rings, mine: list[int]) -> list[int]:
    """Return the numbers of all ranks, rising."""
    found: set[int] = set()
    at, most, doing = 0, 1, "a call of llama3_flash_attn_varlen_func"
    with admit_one_thread(rings, doing):
        while at < most:
            part = {"count": len(mine), "numbers": mine[at : at + _STARTS_A_MESSAGE]}
            replies = read_terms(gather_terms(rings, doing, functools.partial(dict, part)))
            found.update(*(theirs["numbers"] for theirs in replies))
            at, most = at + _STARTS_A_MESSAGE, max(theirs["count"] for theirs in replies)
    return sorted(found)


def _lengths(bounds: Bounds) -> list[int]:
    return [after - before for before, after in itertools.pairwise(bounds)]


_VARLEN = "cu_seqlens max_seqlen"
_LLAMA3 = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k heads_k_stride local_k_slice"
_KINDS: dict[str, tuple[Place, str]] = {  # their places, and arguments that describe documents
    "ring_flash_attn": (functools.partial(_place_each, "contiguous"), ""),
    "zigzag_ring_flash_attn": (functools.partial(_place_each, "zigzag"), ""),
    "stripe_flash_attn": (functools.partial(_place_each, "striped"), ""),
    "ring_flash_attn_varlen": (functools.partial(_place_each, "contiguous"), _VARLEN),
    "zigzag_ring_flash_attn_varlen": (functools.partial(_place_each, "zigzag"), _VARLEN),
    "llama3_flash_attn_varlen": (_place_chunks, _LLAMA3),
}
_FORMS = {"": "q k v", "_kvpacked": "q kv", "_qkvpacked": "qkv"}
(
    ring_flash_attn_func,
    ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
    stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func,
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
) = (
    make_function(f"{name}{form}_func", tensors.split(), place, documents.split(), softcap=0.0)
    for name, (place, documents) in _KINDS.items()
    for form, tensors in _FORMS.items()
)

_bounds: list[Bounds] = []  # of the documents of a process's next forward, one entry


def substitute_hf_flash_attn(process_group: Group | None, heads_k_stride: int) -> None:
    """Replace transformers' flash_attention_2 by causal attention to packed documents over ranks.

    Before each forward, call update_ring_flash_attn_params. A rank passes its chunk of the tokens
    and of their position_ids, (1, T) / ranks, without padding.
    """
    from transformers import AttentionInterface  # which need not be installed

    AttentionInterface.register("flash_attention_2", functools.partial(_attend_hf, process_group))


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Group | None) -> None:
    """Set cu_seqlens (0, ..., T) of the next forwards, for substitute_hf_flash_attn's ranks."""
    _bounds[:] = [read_cu_seqlens("cu_seqlens", cu_seqlens)]


def _attend_hf(
    group: Group | None, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **named: Any
) -> tuple[Tensor, None]:
    """Compute a layer's attention: q (1, H, T / ranks, D), k and v (1, G, T / ranks, D)."""
    window, is_causal = named.get("sliding_window"), named.get("is_causal")

    def place(rings: Rings, tokens: int, _causal: bool) -> tuple[Bounds, str]:
        refused = {
            "padding in attention_mask": mask is not None,
            "is_causal=False": not getattr(module, "is_causal", True) or is_causal is False,
            "a sliding_window below 1": window is not None and window < 1,
            "sinks": named.get("s_aux") is not None,
            "a sparse_config": getattr(module.config, "sparse_config", None) is not None,
        }
        if found := [name for name, is_given in refused.items() if is_given]:
            raise ValueError(f"substitute_hf_flash_attn does not support {', '.join(found)}")
        if not _bounds:
            raise RuntimeError("call update_ring_flash_attn_params before a model")
        [bounds] = _bounds
        if (len(q), tokens * rings.size) != (1, bounds[-1]):
            given = f"{len(q)} rows of {tokens} tokens on this rank of {rings.size}"
            raise ValueError(
                f"expected the {bounds[-1]} tokens of cu_seqlens in a row, got {given}"
            )
        return bounds, "contiguous"

    tensors = {name: x.transpose(1, 2) for name, x in (("query", q), ("key", k), ("value", v))}
    options: dict[str, Any] = {"dropout_p": named.get("dropout", 0.0), "causal": True}
    options |= {"softmax_scale": named.get("scaling"), "softcap": named.get("softcap") or 0.0}
    options["window_size"] = (-1 if window is None else window - 1, 0)
    return attention(tensors, group=group, place=place, **options), None
