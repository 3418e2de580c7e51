"""The forward that both layers of yunchang have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from ...ranks.rings import Rings
from ..flash import Options, Placement, attention
from .kernels import AttnType, check_exact


class AttentionLayer(nn.Module):
    """Attention over the ranks of `group`, with tokens where `place` finds them.

    place                    from the rings, query and causal to the placement of the tokens
    attn_type                an exact one: see AttnType
    scatter_idx, gather_idx  the dimensions of heads and tokens: 2 and 1
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        place: Callable[[Rings, Tensor, bool], Placement],
        strategy: str,
        attn_type: AttnType,
        scatter_idx: int,
        gather_idx: int,
    ):
        super().__init__()
        check_exact(attn_type)
        if (scatter_idx, gather_idx) != (2, 1):
            raise ValueError(
                f"scatter_idx and gather_idx must be (2, 1), got {(scatter_idx, gather_idx)}"
            )
        self.group, self.place, self.strategy = group, place, strategy

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        """Return out (B, S, H, D) of query (B, S, H, D), key and value (B, S, G, D). As in
        yunchang, return_attn_probs is ignored.
        """
        options = Options(
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            alibi_slopes,
            deterministic,
            return_attn_probs=False,
            group=self.group,
            softcap=softcap,
        )
        return attention((query, key, value), options, self.place, self.strategy)
