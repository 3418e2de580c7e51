"""Layers: rotary embedding by explicit positions, SwiGLU, and self-attention that is sequence parallel.

Letters: B batch, S tokens of this rank, H query heads, G kv heads, D head size, E model width.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import burst_attn_func
from .compiled import fused_on_gpus
from .groups import SequenceParallel


def rope_tables(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2 j / D), j < D / 2: (S, D / 2) fp32, for global `positions` (S,) int64.

    Phases are formed in fp64: at position 10^6 an fp32 phase is off by up to 0.06 rad. (RoFormer, arXiv 2104.09864.)
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    phases = positions.double().unsqueeze(-1) * theta**-exponents
    return phases.cos().float(), phases.sin().float()


@fused_on_gpus
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x_j, x_{j + D/2}) of x (B, S, H, D) in fp32; returns x's dtype."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


@fused_on_gpus
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise. (arXiv 2002.05202.)"""
    return F.silu(gate) * up


class KVCache(Protocol):
    """Keys and values of earlier tokens, for generation."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k, v (B, S, G, D) to what `layer` has seen, and returns all of it."""


class BurstAttention(nn.Module):
    """Causal self-attention with rotary positions over the ranks of `sp`; GQA where num_kv_heads < num_heads.

    Projections are `q_proj`, `k_proj`, `v_proj`, `o_proj`, without bias. `layer` is this layer's index in a KVCache.

    Raises ValueError if num_kv_heads does not divide num_heads or head_dim is odd.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        sp: SequenceParallel | None = None,
        flash: str = "auto",
        deterministic: bool = False,
        layer: int = 0,
    ):
        super().__init__()
        if num_heads < 1 or (head_dim is None and hidden_size % num_heads):
            raise ValueError(f"num_heads={num_heads} does not divide hidden_size={hidden_size}; give head_dim then")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = hidden_size // num_heads if head_dim is None else head_dim
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}")
        if head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {head_dim}")
        self.head_dim = head_dim
        self.sp = sp or SequenceParallel()
        self.options = {"flash": flash, "deterministic": deterministic}
        self.layer = layer
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        """x (B, S, E) of this rank's tokens, with `rope_tables` of their positions, to (B, S, E).

        With a cache, x continues the tokens that the cache holds; ValueError if `sp` has more than one rank.
        """
        return self.o_proj(self.attend(*self.project(x, cos, sin), cache))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x to q (B, S, H, D), rotated, k, rotated, and v (B, S, G, D)."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None = None) -> Tensor:
        """The attention itself, with heads side by side: (B, S, H * D)."""
        if cache is None:
            return burst_attn_func(q, k, v, causal=True, **self.options, **self.sp.groups).flatten(2)
        if self.sp.size > 1:
            raise ValueError(f"a KVCache holds one rank's tokens, sp has {self.sp.size} ranks: generate with sp=None")
        return _attend_to_cache(q, *cache.extend(self.layer, k, v)).flatten(2)


def _attend_to_cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last tokens q (B, S, H, D) to all tokens k, v (B, T, G, D) so far."""
    new, total = q.shape[1], k.shape[1]
    visible = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True).transpose(1, 2)
