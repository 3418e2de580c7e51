"""ModelCenter's attention layer, over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model_center.layer import Attention
from torch import Tensor

from ...attention import burst_attn_func
from ...calls.refusal import refuse_call


@dataclass(frozen=True)
class CallContext:
    """The argument that layers get instead of a mask.

    options  options of burst_attn_func
    rotate   applies rotary embeddings to q or k (B, S_local, H, D)
    """

    options: dict[str, Any]
    rotate: Callable[[Tensor], Tensor]


class RingAttention(Attention):
    """ModelCenter's attention with its parameters, over the ranks of `_sp`."""

    def forward(
        self,
        query: Tensor,
        key_value: Tensor,
        attention_mask: CallContext | Tensor,
        position_bias: Any = None,
        use_cache: bool = False,
        past_key_value: Any = None,
    ) -> Any:
        """Map query and key_value (B, S_local, E) to (B, S_local, E). With a tensor as mask, call
        the attention of one rank.

        position_bias  the table (R, H) for the scores in the CallContext, if any
        """
        if not isinstance(attention_mask, CallContext):
            if self._sp.size > 1:
                raise TypeError(
                    f"attention over {self._sp.size} ranks got a {type(attention_mask).__name__} "
                    "as its mask: call the enabled model, not its layers"
                )
            return super().forward(
                query, key_value, attention_mask, position_bias, use_cache, past_key_value
            )
        if self.training and self.attention_dropout is not None and self.attention_dropout.p:
            error = ValueError(
                "attention over ranks cannot drop probabilities, and dropout_p is "
                f"{self.attention_dropout.p}: build the model with dropout_p=0, or call its eval()"
            )
            refuse_call(error, self._sp.process_group, self._sp.double_group)
        projected = self.project_q(query), self.project_k(key_value), self.project_v(key_value)
        q, k, v = (x.unflatten(-1, (-1, self.dim_head)) for x in projected)
        if self.pos_bias_type == "rotary":
            q, k = attention_mask.rotate(q), attention_mask.rotate(k)
        scale = None if self.attn_scale else 1.0
        out = burst_attn_func(q, k, v, scale, **attention_mask.options, bias=position_bias)
        return self.attention_out(out.flatten(2))
