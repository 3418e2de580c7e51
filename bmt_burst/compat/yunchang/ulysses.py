"""Ulysses alone: every rank computes some heads of the whole sequence."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ...ranks.rings import Rings
from ..flash import Bounds, count_tokens
from .kernels import AttnType
from .layer import AttentionLayer


class UlyssesAttention(AttentionLayer):
    """Attention over ranks that have contiguous chunks of the sequence. The heads need not divide
    by the ranks.

    sequence_process_group   the ranks that share the sequence, by default all
    scatter_idx, gather_idx  the dimensions of heads and tokens: 2 and 1
    use_sync                 ignored; yunchang's exchanges wait with it
    attn_type                an exact one: see AttnType
    """

    def __init__(
        self,
        sequence_process_group: dist.ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
    ):
        super().__init__(
            sequence_process_group, _place_chunks, "ulysses", attn_type, scatter_idx, gather_idx
        )


def _place_chunks(rings: Rings, q: Tensor, _causal: bool) -> tuple[Bounds, str]:
    return (0, count_tokens(q, 4) * rings.size), "contiguous"
