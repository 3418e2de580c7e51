"""Ulysses alone: every rank computes some heads of the whole sequence."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn

from ...ranks.rings import Rings
from ..flash import Bounds, Options, attention, tokens_of, with_options
from .kernels import AttnType, check_exact
from .options import OF_LAYERS


class UlyssesAttention(nn.Module):
    """Attention of ranks that have contiguous chunks of the sequence; heads need not divide by the
    ranks.

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

    @functools.partial(with_options, names=OF_LAYERS)
    def forward(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """out (B, S, H, D) of query (B, S, H, D), key and value (B, S, G, D); also with
        return_attn_probs, as there.
        """
        options = replace(options, return_attn_probs=False, group=self.spg)
        return attention((query, key, value), options, _contiguous, strategy="ulysses")


def check_dims(scatter_idx: int, gather_idx: int, known: tuple[int, int]) -> None:
    """Raises ValueError for tensors that have heads and tokens elsewhere."""
    if (scatter_idx, gather_idx) != known:
        raise ValueError(
            f"scatter_idx and gather_idx must be {known}, got {(scatter_idx, gather_idx)}"
        )


def _contiguous(rings: Rings, q: Tensor) -> tuple[Bounds, str]:
    return (0, tokens_of(q, 4) * rings.size), "contiguous"
