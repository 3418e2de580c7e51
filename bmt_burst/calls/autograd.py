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
from ..strategies import Plan
from ..strategies.compute import Keys, QueryGradients


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

        def begin() -> tuple[Tensor, tuple[Any, ...]]:
            check_first_derivative("burst_attn_func")
            saved, dout = ctx.saved_tensors, grads[0]  # raises if they were freed
            given = (x for x in grads if x is not None)
            check_transforms("the backward of burst_attn_func", *given)
            if dout is None:  # nothing that used out, which is saved[3], returned a gradient for it
                dout = torch.zeros_like(saved[3])
            return dout, saved

        with admit_one_thread(rings, doing):
            dout, (q, k, v, out, lse, sinks, *others) = run_together(rings, doing, begin)
            inputs, kept = others[: ctx.input_count], others[ctx.input_count :]
            dsinks, dlse = None, grads[1]
            with without_autocast(dout), report_failure(rings, doing):
                if dlse is not None:
                    out, dout = add_lse_gradient(out, dout, lse, dlse)
                queries = QueryGradients(q, dout, lse, out)
                dq, dk, dv, of_inputs = plan.backward(
                    rings, queries, Keys(k, v), tuple(inputs), tuple(kept)
                )
                if sinks is not None and ctx.needs_input_grad[3]:
                    dsinks = sinks_gradient(dout, out, lse, sinks)
        return dq, dk, dv, dsinks, None, None, None, *of_inputs
