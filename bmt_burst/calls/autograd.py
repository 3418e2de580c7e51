"""The forward and the backward of a plan, as autograd sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.autocast import without_autocast
from ..base.autograd import check_first_derivative, check_transforms
from ..base.compiled import not_compiled
from ..merging.sinks import sinks_gradient, with_sinks
from ..merging.surrogate import add_lse_gradient
from ..ranks.agreement import Terms, run_agreed
from ..ranks.rings import Rings
from ..strategies import Plan
from ..strategies.compute import Keys, QueryGradients


@dataclass(frozen=True)
class Past:
    """The keys and values of earlier calls, and last the call's own ones, which autograd records.

    k, v    (B, T, G, D)
    dk, dv  (B, T, G, D) in the accumulator's dtype: sums of gradients, to which the backward adds.
            None in calls without gradient
    own     the tokens of the call's own keys. Their gradients are these sums, rounded once.
    begin   called when the backward begins. Raises ValueError if another one did before. None for a
            call without gradient
    rows    the batch size if the rows are stacked as one sequence, otherwise 0
    """

    k: Tensor
    v: Tensor
    dk: Tensor | None
    dv: Tensor | None
    own: slice
    begin: Callable[[], None] | None
    rows: int = 0

    def keys(self) -> tuple[Tensor, Tensor]:
        return self._join(self.k), self._join(self.v)

    def keys_with_sums(self) -> Keys:
        assert self.dk is not None and self.dv is not None, "a call with gradient has sums"
        return Keys(*self.keys(), self._join(self.dk), self._join(self.dv))

    def own_gradients(self, keys: Keys) -> tuple[Tensor, Tensor]:
        """Return the gradients of the own keys and values from the sums of `keys`."""
        grads = []
        for total, x in ((self.dk, keys.dk), (self.dv, keys.dv)):
            assert total is not None and x is not None, "a call with gradient has sums"
            if self.rows:  # then the sums were copied
                total.copy_(x.view(total.shape))
            # a copy: the place of the sums is used again
            grads.append(self._join(total[:, self.own].to(self.k.dtype, copy=True)))
        return grads[0], grads[1]

    def _join(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).unsqueeze(0) if self.rows else x


def begin_backward(ctx: Any, name: str, *grads: Tensor | None) -> tuple[Tensor, ...]:
    """Return what the forward of a call saved, as a backward with these gradients begins.

    ctx  has the call's `past`, unless a backward took it, and `has_past`

    Raises RuntimeError for a derivative of the backward and in transforms of it, ValueError for a
    chunk that has no backward or had one.
    """
    check_first_derivative(name)
    check_transforms(f"the backward of {name}", *(x for x in grads if x is not None))
    saved: tuple[Tensor, ...] = ctx.saved_tensors  # raises if they were freed
    if ctx.has_past:
        if ctx.past is None:
            hint = "call it once on each chunk's loss, before the next chunk"
            raise ValueError(f"the backward of a chunk ran twice: {hint}")
        if ctx.past.begin is None:
            hint = "call backward on the loss of a chunk that Chunks.backward() yielded"
            raise ValueError(f"a chunk of forward() or of a prefill has no backward: {hint}")
        ctx.past.begin()
    return saved


class PlannedAttention(torch.autograd.Function):
    """Attention of one rank by its plan, differentiable once in all tensors."""

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
        past: Past | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of the call with this number. k and v are the last of a `past`."""
        if past is not None:
            k, v = past.keys()
        with without_autocast(q):
            out, lse, kept = plan.forward(rings, q, k, v, inputs)
            if sinks is not None:
                out, lse = with_sinks(out, lse, sinks)
        own = (k, v) if past is None else (None, None)  # a past may have joined its rows in copies
        ctx.save_for_backward(q, *own, out, lse, sinks, *inputs, *kept)
        ctx.rings, ctx.plan, ctx.number, ctx.input_count = rings, plan, number, len(inputs)
        ctx.past, ctx.has_past = past, past is not None
        ctx.set_materialize_grads(False)  # most backwards have no gradient of lse
        return out, lse

    @staticmethod
    @not_compiled  # not by compiled autograd either
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of forward's arguments, once all ranks are in this backward."""
        doing = f"the backward of call {ctx.number}"
        rings: Rings = ctx.rings
        plan: Plan = ctx.plan
        past: Past | None = ctx.past

        def begin() -> tuple[Terms, tuple[Tensor, ...]]:
            saved, dout = begin_backward(ctx, "burst_attn_func", *grads), grads[0]
            if dout is None:  # nothing that used out, which is saved[3], returned a gradient for it
                dout = torch.zeros_like(saved[3])
            return Terms(doing), (dout, *saved)

        def compute(given: tuple[Tensor, ...], _: tuple[bytes, ...]) -> tuple[Tensor | None, ...]:
            dout, q, k, v, out, lse, sinks, *others = given
            inputs, kept = others[: ctx.input_count], others[ctx.input_count :]
            dsinks, dlse = None, grads[1]
            with without_autocast(dout):
                if dlse is not None:
                    out, dout = add_lse_gradient(out, dout, lse, dlse)
                queries = QueryGradients(q, dout, lse, out)
                keys = Keys(k, v) if past is None else past.keys_with_sums()
                dq, dk, dv, of_inputs = plan.backward(
                    rings, queries, keys, tuple(inputs), tuple(kept)
                )
                if past is not None:
                    dk, dv = past.own_gradients(keys)
                    ctx.past = None  # a loss that is still held would hold all keys and sums
                if sinks is not None and ctx.needs_input_grad[3]:
                    dsinks = sinks_gradient(dout, out, lse, sinks)
            return dq, dk, dv, dsinks, None, None, None, None, *of_inputs

        return run_agreed(rings, doing, begin, compute)
