"""Ulysses times a ring. The ranks of both are one ring here, with the tokens on them as yunchang
has them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from ....base.arguments import as_bool
from ....ranks.rings import Rings
from ....sequence.layout import Layout
from ...flash import Bounds, Options, attention, tokens_of, with_options
from ..comm import extracted
from ..globals import PROCESS_GROUP
from ..kernels import AttnType, check_exact, check_no_processor
from ..options import OF_LAYERS
from ..ulysses import check_dims

_with_options = functools.partial(with_options, names=OF_LAYERS)

_STRATEGY = "ring"  # of the ranks of both groups
_KINDS = {kind: kind for kind in ("basic", "strip", "zigzag")} | dict.fromkeys(
    ("basic_pytorch", "basic_flashinfer", "basic_npu"), "basic"
)


class _Hybrid(nn.Module):
    def __init__(self, ring_impl_type: str, attn_type: AttnType):
        super().__init__()
        check_exact(attn_type)
        if ring_impl_type not in _KINDS:
            raise ValueError(
                f"unknown ring_impl_type {ring_impl_type!r}; expected one of {sorted(_KINDS)}"
            )
        if PROCESS_GROUP.SEQUENCE_PG is None:
            raise RuntimeError("call set_seq_parallel_pg first: it makes the groups of ranks")
        self.kind, self.ulysses_low = _KINDS[ring_impl_type], PROCESS_GROUP.ULYSSES_LOW
        self.ulysses_pg, self.ring_pg = PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG
        self.sequence_pg = PROCESS_GROUP.SEQUENCE_PG

    def _attention(self, tensors: Sequence[Tensor], options: Options) -> Tensor:
        """With the options of `forward`, but for return_attn_probs: out comes alone."""
        options = replace(options, return_attn_probs=False, group=self.sequence_pg)
        return attention(
            tensors, options, lambda rings, q: self._placing(rings, q, options.causal), _STRATEGY
        )

    def _placing(self, rings: Rings, q: Tensor, causal: bool) -> tuple[Bounds, Layout]:
        if self.kind != "basic" and not as_bool("causal", causal):
            raise ValueError(
                f"{self.kind} attention is causal: give causal=True, or ring_impl_type='basic'"
            )
        seq_len, ulysses, ring = (
            tokens_of(q, 4) * rings.size,
            self.ulysses_pg.size(),
            self.ring_pg.size(),
        )
        return (0, seq_len), extracted(self.kind, seq_len, ulysses, ring, self.ulysses_low)


class LongContextAttention(_Hybrid):
    """Attention over the groups that set_seq_parallel_pg made last, of tokens as EXTRACT_FUNC_DICT
    cuts them.

    scatter_idx, gather_idx  where heads and tokens are: 2 and 1
    ring_impl_type           a key of EXTRACT_FUNC_DICT: how tokens lie on the ranks. "strip" and
                             "zigzag" are for causal attention
    use_pack_qkv, use_sync   how yunchang exchanges tensors, which makes no difference here
    attn_type                an exact one: see AttnType
    attn_processor           None

    Raises ValueError for others, RuntimeError before set_seq_parallel_pg.
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
        super().__init__(ring_impl_type, attn_type)
        check_dims(scatter_idx, gather_idx, (2, 1))
        check_no_processor(attn_processor)

    @_with_options
    def forward(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """out (B, S, H, D) of query (B, S, H, D), key and value (B, S, G, D); also with
        return_attn_probs, as there.
        """
        return self._attention((query, key, value), options)


class AsyncLongContextAttention(LongContextAttention):
    """LongContextAttention with the arguments of yunchang's layer that overlaps its exchanges; here
    both do.
    """

    def __init__(self, scatter_idx: int = 2, gather_idx: int = 1, ring_impl_type: str = "basic"):
        super().__init__(scatter_idx, gather_idx, ring_impl_type)


class LongContextAttentionQKVPacked(_Hybrid):
    """LongContextAttention of qkv (B, S, 3, H, D), of which it takes views; scatter_idx is 3."""

    def __init__(
        self,
        scatter_idx: int = 3,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
    ):
        super().__init__(ring_impl_type, attn_type)
        check_dims(scatter_idx, gather_idx, (3, 1))

    @_with_options
    def forward(self, qkv: Tensor, options: Options) -> Tensor:
        """out (B, S, H, D) of qkv (B, S, 3, H, D); also with return_attn_probs, as there."""
        return self._attention((qkv,), options)
