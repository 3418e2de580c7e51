"""Sequence parallel self-attention as a layer.

Letters: B batch, S tokens of this rank, H query heads, G kv heads, D head size, E model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..base.arguments import as_bool
from ..base.dtypes import accumulator_dtype
from ..extensions import check_extension, find_kind
from ..memories.keys import Softmax
from ..ranks.sequence_parallel import SequenceParallel
from ..strategies.extension import Extension
from .heads import SelfAttention


class BurstAttention(SelfAttention):
    """Self-attention with rotary positions over the ranks of `sp`. It is causal unless a mask is
    given, and GQA where num_kv_heads < num_heads.

    hidden_size    E, the width of inputs and outputs
    num_heads      H
    num_kv_heads   G, by default H
    head_dim       D, by default hidden_size / num_heads
    sp             the ranks that share the sequence, from init_sequence_parallel. By default this
                   rank is alone.
    flash, deterministic, strategy, softcap, softmax_scale
                   as burst_attn_func's
    window         a token attends only to itself and the window - 1 tokens before it, if the mask
                   allows. Mistral and MiniCPM count in the same way.
    layer          this layer's number in Chunks and in a Cache
    qkv_bias       whether q_proj, k_proj and v_proj have a bias, as Qwen2's
    o_bias         whether o_proj has one
    qk_norm_eps    if given, q and k are RMS-normalized in each head before they are rotated, as in
                   Qwen3. It is added to the mean square. `q_norm` and `k_norm` have weights (D,).
    sinks          whether the layer has a parameter `sinks` (H,), as in GptOss: burst_attn_func's.
                   It starts as 0. In bf16 and fp16 it is widened to fp32 when it is used.
    sparse         as burst_attn_func's. It excludes window and softcap. With a Cache it counts all
                   tokens of the cache as one document.
    rotary         False: q and k are not rotated, and the layer needs no rope_tables. MiniCPM-SALA
                   has such layers. use_nope then changes nothing.
    output_gate    whether the attention is multiplied by sigmoid(o_gate(x)) before o_proj, x being
                   the layer's input

    Projections are `q_proj`, `k_proj`, `v_proj`, `o_proj`. Under autocast attention computes in its
    dtype, whatever the dtype of q and k after norms and rotary tables.

    Raises ValueError if num_kv_heads does not divide num_heads, head_dim is odd or below 2, window
    is below 1, qk_norm_eps or softcap is not positive and finite, or sparse excludes another
    argument. Raises TypeError for arguments of a wrong type.
    """

    kind: Softmax

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
        strategy: str = "auto",
        window: int | None = None,
        layer: int = 0,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_eps: float | None = None,
        softcap: float | None = None,
        softmax_scale: float | None = None,
        sinks: bool = False,
        sparse: Extension | None = None,
        rotary: bool = True,
        output_gate: bool = False,
    ):
        super().__init__(
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            sp=sp,
            layer=layer,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm_eps=qk_norm_eps,
            output_gate=output_gate,
            rotary=rotary,
        )
        if sparse is not None:
            sparse = check_extension(sparse).for_layer(
                rotary=rotary, window=window, softcap=softcap
            )
        options = {"flash": flash, "deterministic": deterministic, "strategy": strategy}
        options |= {"softcap": softcap, "softmax_scale": softmax_scale, "sparse": sparse}
        self.kind, _ = find_kind(window, options)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if as_bool("sinks", sinks) else None

    @property
    def window(self) -> int | None:
        """The window of `kind`, read-only."""
        return self.kind.window

    @property
    def sparse(self) -> Extension | None:
        """The extension of `kind`, read-only."""
        return self.kind.extension

    def _find_choose_by(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return () if self.sparse is None else self.sparse.of_layer(q, k)

    def _find_tensors(self, choose_by: Sequence[Tensor] | None) -> tuple[Tensor | None, ...]:
        sinks: Tensor | None = self.sinks
        if sinks is not None:
            sinks = sinks.to(accumulator_dtype(sinks.dtype))
        return sinks, *(choose_by or ())
