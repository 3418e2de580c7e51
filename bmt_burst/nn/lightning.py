"""Lightning attention as a layer: linear attention with a decay, the mixer of MiniCPM-SALA.

Letters: B batch, S tokens of this rank, H heads, D head size, E model width.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ..base.arguments import check_tensor
from ..base.autocast import autocast
from ..base.dtypes import accumulator_dtype
from ..calls.options import Layouts, Masks
from ..calls.refusal import refuse_call
from ..parts.chunks import Chunk
from ..parts.cache import Cache
from ..lightning import alibi_slopes, lightning_attn_func
from ..lightning.attention import CALL
from ..lightning.memory import StateCache, continue_state
from ..lightning.slopes import check_slopes
from ..ranks.sequence_parallel import SequenceParallel
from .heads import SelfAttention
from .modules import WRONG_INPUTS, KVCache


class LightningAttention(SelfAttention):
    """Lightning attention over the ranks of `sp`, between projections, as in MiniCPM-SALA.

    With heads side by side, the layer computes

        q, k = rotate(q_norm(q_proj(x))), rotate(k_norm(k_proj(x)))
        out = o_proj(o_norm(lightning(q, k, v_proj(x))) * sigmoid(z_proj(x)))

    hidden_size      E, the width of inputs and outputs
    num_heads        H, of queries, keys and values
    head_dim         D, by default hidden_size / num_heads
    sp               the ranks that share the sequence, from init_sequence_parallel. By default this
                     rank is alone. Its layout may not be striped.
    flash            as lightning_attn_func's
    layer            this layer's index in a StateCache
    qk_norm_eps      added to the mean square of q and k in each head. None: they are not
                     normalized. `q_norm` and `k_norm` have weights (D,).
    output_norm_eps  the same for the attention of all heads. `o_norm` has a weight (H * D,).
    output_gate      whether there is `z_proj`
    rotary           False: q and k are not rotated, and the layer needs no rope_tables
    slopes           (H,) fp32 or fp64, finite and at least 0, see lightning_attn_func. By default
                     alibi_slopes(H). They are constants, and no part of the layer's state_dict.

    The layer is causal, and documents of a mask have states of their own. The formulas are those of
    MiniCPM-SALA (arXiv 2602.11761) and its released code.

    Raises ValueError if num_heads does not divide hidden_size and head_dim is not given, head_dim
    is odd or below 2, an eps is not positive and finite, or slopes are wrong. Raises TypeError for
    arguments of a wrong type.
    """

    gate_name = "z_proj"

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
        self.flash = flash
        slopes = alibi_slopes(num_heads) if slopes is None else slopes
        check_tensor("slopes", slopes)
        # numbers, as a buffer would take the dtype of the weights
        like = slopes.new_empty(1, 1, num_heads, 1, dtype=torch.float64)
        self.slopes = check_slopes(slopes, like)

    def _refuse(self, error: Exception) -> NoReturn:
        refuse_call(error, self.sp.process_group, self.sp.double_group, CALL)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache | StateCache | Chunk | Cache | None = None,
        mask: Masks | None = None,
        layout: Layouts | None = None,
        choose_by: None = None,
    ) -> Tensor:
        """Return the attention with heads side by side: (B, S, H * D).

        cache   a StateCache, whose states q, k and v continue, and which gets the new ones. There
                is no gradient then.
        mask    causal documents of the whole sequence, or such a mask for each row. By default a
                row is one document.
        layout  which rank owns which positions, or one for each row; by default sp's

        Raises on all ranks ValueError for a cache with a mask, with a layout or with an `sp` of
        more than one rank, and for a Chunk, a bmt_burst.Cache or another cache without states.
        """
        try:
            if cache is not None:
                states = self._check_cache(cache, mask, layout)
            slopes = torch.tensor(self.slopes, dtype=accumulator_dtype(q.dtype), device="cpu")
        except WRONG_INPUTS as error:
            self._refuse(error)
        if cache is not None:
            q, k, v = (autocast(x) for x in (q, k, v))
            state = states.get(self.layer)
            out, states[self.layer] = continue_state(
                q, k, v, self.slopes, self.head_dim**-0.5, state, self.flash
            )
            return out.flatten(2)
        groups = self.sp.groups if layout is None else self.sp.groups | {"layout": layout}
        out = lightning_attn_func(q, k, v, slopes, mask=mask, flash=self.flash, **groups)
        return out.flatten(2)

    def _check_cache(
        self,
        cache: KVCache | StateCache | Chunk | Cache,
        mask: Masks | None,
        layout: Layouts | None,
    ) -> dict[int, Tensor]:
        """Return the states of a cache. Raises ValueError if it does not fit."""
        if isinstance(cache, Chunk):
            raise ValueError(
                "lightning attention has no chunks of a sequence, got a Chunk: compute the whole "
                "sequence in one forward"
            )
        if isinstance(cache, Cache) or self.sp.size > 1:
            raise ValueError(
                "lightning attention continues states on one process, got "
                f"a {type(cache).__name__} and {self.sp.size} ranks: generate with sp=None and a "
                "bmt_burst.nn.StateCache"
            )
        if mask is not None or layout is not None:
            raise ValueError(
                "expected a cache or a mask and layout, got both: new tokens continue all of a "
                "cache"
            )
        if not isinstance(cache, StateCache):
            raise ValueError(
                "lightning attention needs a bmt_burst.nn.StateCache, which has a dict `states`, "
                f"got a {type(cache).__name__}"
            )
        return cache.states
