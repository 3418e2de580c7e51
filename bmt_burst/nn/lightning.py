"""Lightning attention as a layer: linear attention with a decay, the mixer of MiniCPM-SALA.

Letters: B batch, S tokens of this rank, H heads, D head size, E model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..base.arguments import as_positive, check_tensor
from ..base.dtypes import accumulator_dtype
from ..lightning.memory import Lightning
from ..lightning.rates import alibi_slopes, check_rates
from ..ranks.sequence_parallel import SequenceParallel
from .heads import Heads, SelfAttention


class LightningAttention(SelfAttention):
    """Lightning attention over the ranks of `sp`, between projections, as in MiniCPM-SALA.

    With heads side by side, the layer computes

        q, k = rotate(q_norm(q_proj(x))), rotate(k_norm(k_proj(x)))
        out = o_proj(o_norm(lightning(q, k, v_proj(x))) * sigmoid(z_proj(x)))

    num_heads        H, of queries, keys and values
    sp               as BurstAttention's. Its layout may not be striped.
    flash            as lightning_attn_func's
    qk_norm_eps      added to the mean square of q and k in each head. None: they are not
                     normalized. `q_norm` and `k_norm` have weights (D,).
    output_norm_eps  the same for the attention of all heads. `o_norm` has a weight (H * D,).
    output_gate      whether there is `z_proj`
    slopes           (H,) fp32 or fp64, finite and at least 0, see lightning_attn_func. By default
                     alibi_slopes(H). They are constants, and no part of the layer's state_dict.
    gate_logit_normalizer
                     if given, each token chooses its decay instead, as in simple GLA of
                     flash-linear-attention: log_decay is logsigmoid(gk_proj(x)) divided by this
                     number, 16 there. `gk_proj` (E to H) has a bias. It excludes slopes.

    hidden_size, head_dim, layer and rotary are BurstAttention's.

    The layer is causal, and documents of a mask have states of their own. The formulas are those of
    MiniCPM-SALA (arXiv 2602.11761) and its released code.

    Raises ValueError if num_heads does not divide hidden_size and head_dim is not given, head_dim
    is odd or below 2, an eps or gate_logit_normalizer is not positive and finite, or slopes are
    wrong. Raises TypeError for arguments of a wrong type.
    """

    gate_name = "z_proj"
    kind: Lightning

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        sp: SequenceParallel | None = None,
        flash: str = "auto",
        layer: int = 0,
        qk_norm_eps: float | None = 1e-6,
        output_norm_eps: float | None = 1e-6,
        output_gate: bool = True,
        rotary: bool = True,
        slopes: Tensor | None = None,
        gate_logit_normalizer: float | None = None,
    ):
        super().__init__(
            hidden_size,
            num_heads,
            num_heads,
            head_dim,
            sp=sp,
            layer=layer,
            qk_norm_eps=qk_norm_eps,
            output_norm_eps=output_norm_eps,
            output_gate=output_gate,
            rotary=rotary,
        )
        values, normalizer = None, gate_logit_normalizer
        if normalizer is None:
            slopes = alibi_slopes(num_heads) if slopes is None else slopes
            check_tensor("slopes", slopes)
            # numbers, as a buffer would take the dtype of the weights
            like = slopes.new_empty(1, 1, num_heads, 1, dtype=torch.float64)
            values = check_rates(slopes, None, like)
        elif slopes is not None:
            raise ValueError("expected slopes or gate_logit_normalizer, got both")
        else:
            normalizer = as_positive("gate_logit_normalizer", normalizer)
            self.gk_proj = nn.Linear(hidden_size, num_heads)
        self.kind = Lightning(values, self.head_dim**-0.5, flash, normalizer)

    def project_all(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Heads:
        """Return what the base does. Its last entry has log_decay if each token chooses it."""
        q, k, v, _ = super().project_all(x, cos, sin)
        if (normalizer := self.kind.gate_logit_normalizer) is None:
            return q, k, v, ()
        logits = self.gk_proj(x)
        wide = logits.to(accumulator_dtype(logits.dtype))
        return q, k, v, (functional.logsigmoid(wide) / normalizer,)

    def _find_tensors(self, choose_by: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        return tuple(choose_by or ())
