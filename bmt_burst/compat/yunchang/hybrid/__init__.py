"""Ulysses times a ring. Here the ranks of both are one ring, with yunchang's layout of tokens."""

from __future__ import annotations

import functools

from torch import Tensor, nn

from ....base.arguments import as_bool
from ....ranks.rings import Rings
from ....sequence.layout import Layout
from ...flash import Bounds, count_tokens
from ..comm import EXTRACT_FUNC_DICT, extracted_layout
from ..globals import Grid, current_grid
from ..kernels import AttnType
from ..layer import AttentionLayer
from .utils import RING_IMPL_DICT, RING_IMPL_QKVPACKED_DICT

__all__ = ["RING_IMPL_DICT", "RING_IMPL_QKVPACKED_DICT", "LongContextAttention"]


class LongContextAttention(AttentionLayer):
    """Attention over the groups that set_seq_parallel_pg made last, with tokens as
    EXTRACT_FUNC_DICT cuts them.

    scatter_idx, gather_idx  the dimensions of heads and tokens: 2 and 1
    ring_impl_type           a key of EXTRACT_FUNC_DICT, the layout of tokens on ranks. "strip" and
                             "zigzag" are for causal attention
    use_pack_qkv, use_sync   ignored; they say how yunchang exchanges tensors
    attn_type                an exact one: see AttnType
    attn_processor           must be None

    Raises ValueError for others, and RuntimeError before set_seq_parallel_pg.
    """

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
        attn_processor: nn.Module | None = None,
    ):
        if attn_processor is not None:
            raise ValueError(f"attn_processor must be None, got a {type(attn_processor).__name__}")
        if ring_impl_type not in EXTRACT_FUNC_DICT:
            raise ValueError(
                f"expected a ring_impl_type of {sorted(EXTRACT_FUNC_DICT)}, got {ring_impl_type!r}"
            )
        grid = current_grid()
        place = functools.partial(_place_extracted, ring_impl_type, grid)
        super().__init__(grid.sequence, place, "ring", attn_type, scatter_idx, gather_idx)


def _place_extracted(
    kind: str, grid: Grid, rings: Rings, q: Tensor, causal: bool
) -> tuple[Bounds, Layout]:
    if kind != "basic" and not as_bool("causal", causal):
        raise ValueError(f"{kind} attention is causal: pass causal=True, or ring_impl_type='basic'")
    seq_len = count_tokens(q, 4) * rings.size
    layout = extracted_layout(kind, seq_len, grid.ulysses, grid.ring, grid.ulysses_low)
    return (0, seq_len), layout
