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


class PlannedAttention(torch.autograd.Function):
    """Attention of one rank by its plan. It is differentiable once in q, k, v, sinks and the inputs
    of an extension.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rings: Rings,
        plan: Plan,
        number: int,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of the call with this number."""
        with without_autocast(q):
            out, lse, kept = plan.forward(rings, q, k, v, inputs)
            if sinks is not None:
                out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *inputs, *kept)
        ctx.rings, ctx.plan, ctx.number, ctx.input_count = rings, plan, number, len(inputs)
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
            q, k, v, out, lse, sinks, *others = ctx.saved_tensors
            inputs, kept = others[: ctx.input_count], others[ctx.input_count :]
            saved, dout = Saved(q, k, v, out, lse, tuple(inputs), tuple(kept)), grads[0]
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
                dq, dk, dv, of_inputs = plan.backward(rings, dout, saved)
                if sinks is not None and ctx.needs_input_grad[3]:
                    dsinks = sinks_gradient(dout, saved.out, saved.lse, sinks)
        return dq, dk, dv, dsinks, None, None, None, *of_inputs
