"""Ulysses alone: every rank computes some heads of the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from ...rings import Rings
from ..flash import Bounds, Options, attention, tokens_of
from .kernels import AttnType, check_exact


class UlyssesAttention(nn.Module):
    """Attention of ranks that have contiguous chunks of the sequence; heads need not divide by the ranks.

    sequence_process_group  the ranks that share the sequence, by default all
    scatter_idx, gather_idx where heads and tokens are: 2 and 1
    use_sync                waits of yunchang's for its exchanges, which make no difference here
    attn_type               an exact one: see AttnType
    """

    def __init__(
        self,
        sequence_process_group: dist.ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
    ):
        super().__init__()
        check_exact(attn_type)
        check_dims(scatter_idx, gather_idx, (2, 1))
        self.spg = sequence_process_group

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
        """out (B, S, H, D) of query (B, S, H, D), key and value (B, S, G, D); also with return_attn_probs, as there."""
        options = Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, False, self.spg, softcap
        )
        return attention((query, key, value), options, _contiguous, strategy="ulysses")


def check_dims(scatter_idx: int, gather_idx: int, known: tuple[int, int]) -> None:
    """Raises ValueError for tensors that have heads and tokens elsewhere."""
    if (scatter_idx, gather_idx) != known:
        raise ValueError(f"scatter_idx and gather_idx must be {known}, got {(scatter_idx, gather_idx)}")


def _contiguous(rings: Rings, q: Tensor) -> tuple[Bounds, str]:
    return (0, tokens_of(q, 4) * rings.size), "contiguous"
