"""Attention over ranks in all models of transformers at once, as in ring-flash-attention's adapter.

It is the attention of bmt_burst.adapters.transformers, which enables one model, and also cuts its
inputs and joins its losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..adapters.transformers.attention import AttentionInterface, ForwardContext, attention
from ..base.compiled import not_compiled
from ..calls.refusal import refuse_call
from ..ranks.rings import Group, Rings, make_rings
from ..sequence.mask import Mask
from .flash import Bounds

_REPLACED = "flash_attention_2"  # the attn_implementation that is replaced
_NO_DOUBLE_GROUP = (None, None)


@dataclass
class _State:
    """The state of ring-flash-attention's two functions. A process has one.

    rings, group  the ranks of the attention, after `substitute`
    context       the documents of the next forward, after `update`
    """

    rings: Rings | None = None
    group: Group | None = None
    context: ForwardContext | None = None


_state = _State()


def substitute(group: Group | None) -> None:
    """Implement substitute_hf_flash_attn."""
    _state.rings, _state.group, _state.context = make_rings(group, _NO_DOUBLE_GROUP), group, None
    AttentionInterface.register(_REPLACED, _attention)


def update(bounds: Bounds, group: Group | None) -> None:
    """Implement update_ring_flash_attn_params: documents begin at `bounds`."""
    if _state.rings is None:
        raise RuntimeError(
            "call substitute_hf_flash_attn first: it says which ranks share a sequence"
        )
    made, given = (
        (rings.rank, rings.size) for rings in (_state.rings, make_rings(group, _NO_DOUBLE_GROUP))
    )
    if made != given:
        raise ValueError(
            f"expected the process_group of substitute_hf_flash_attn, where this is rank {made[0]} "
            f"of {made[1]}, got one where it is rank {given[0]} of {given[1]}"
        )
    if bounds[-1] % given[1]:
        raise ValueError(f"the {bounds[-1]} tokens of cu_seqlens do not divide by {given[1]} ranks")
    options = {"mask": Mask.documents(bounds), "layout": "contiguous"}
    groups = {"process_group": _state.group, "double_group": _NO_DOUBLE_GROUP}
    _state.context = ForwardContext(options | groups, bounds[-1])


@not_compiled
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Compute attention for a layer, with or without a window, over the documents of `update`."""
    try:
        _check(
            query,
            attention_mask,
            getattr(module, "is_causal", True) if is_causal is None else is_causal,
        )
    except (ValueError, RuntimeError) as error:
        refuse_call(error, _state.group, _NO_DOUBLE_GROUP)
    return attention(
        module, query, key, value, named.get("sliding_window"), **named, bmt_burst=_state.context
    )


def _check(query: Tensor, attention_mask: Tensor | None, is_causal: bool) -> None:
    if _state.context is None:
        raise RuntimeError(
            "call update_ring_flash_attn_params before a model: it says where documents begin"
        )
    if attention_mask is not None:
        raise ValueError(
            "attention_mask has padding: pack the documents without padding, as in cu_seqlens"
        )
    if not is_causal:
        raise ValueError("attention to both sides is not substituted: expected a causal model")
    if len(query) != 1:
        raise ValueError(f"documents must be packed in one row, (1, tokens), got {len(query)} rows")
    size = 1 if _state.rings is None else _state.rings.size
    if query.shape[2] * size != _state.context.seq_len:
        raise ValueError(
            f"cu_seqlens of update_ring_flash_attn_params ends at {_state.context.seq_len}, which "
            f"is {_state.context.seq_len // size} tokens for each of {size} ranks: this rank has "
            f"{query.shape[2]}"
        )
