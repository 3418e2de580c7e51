"""The forward and the backward of a plan, as autograd sees them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.autocast import without_autocast
from ..base.autograd import check_first_derivative, check_transforms
from ..base.compiled import not_compiled
from ..merging.sinks import sinks_gradient, with_sinks
from ..merging.surrogate import add_lse_gradient
from ..ranks.agreement import admit_one_thread, report_failure, run_together
from ..ranks.rings import Rings
from ..strategies import Plan, Saved


class BurstAttention(torch.autograd.Function):
    """Attention of one rank by its plan; differentiable once in q, k, v, bias and sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        rings: Rings,
        plan: Plan,
        number: int,
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of the call with this number."""
        with without_autocast(q):
            out, lse, row_lse = plan.forward(rings, q, k, v, bias)
            if sinks is not None:
                out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(*Saved(q, k, v, out, lse, bias, row_lse), sinks)
        ctx.rings, ctx.plan, ctx.number = rings, plan, number
        ctx.set_materialize_grads(False)  # most backwards have no gradient of lse
        return out, lse

    @staticmethod
    @not_compiled  # not by compiled autograd either
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of forward's arguments, once all ranks are in this backward."""
        doing = f"the backward of call {ctx.number}"
        rings: Rings = ctx.rings
        plan: Plan = ctx.plan

        def begin() -> tuple[Tensor, Saved, Tensor | None]:
            check_first_derivative("burst_attn_func")
            *tensors, sinks = ctx.saved_tensors
            saved, dout = Saved(*tensors), grads[0]
            given = (x for x in grads if x is not None)
            check_transforms("the backward of burst_attn_func", *given)
            if dout is None:  # nothing that used `out` returned a gradient for it
                dout = torch.zeros_like(saved.out)
            return dout, saved, sinks

        with admit_one_thread(rings, doing):
            dout, saved, sinks = run_together(rings, doing, begin)
            dsinks, dlse = None, grads[1]
            with without_autocast(dout), report_failure(rings, doing):
                if dlse is not None:
                    out, dout = add_lse_gradient(saved.out, dout, saved.lse, dlse)
                    saved = saved._replace(out=out)
                dq, dk, dv, dbias = plan.backward(rings, dout, saved)
                if sinks is not None and ctx.needs_input_grad[4]:
                    dsinks = sinks_gradient(dout, saved.out, saved.lse, sinks)
        return dq, dk, dv, dbias, dsinks, None, None, None
