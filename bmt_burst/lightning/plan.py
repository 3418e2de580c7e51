"""The plan of a rank in calls of lightning attention, and their forward and backward.

Letters: T tokens of this rank, H heads, D head size, N states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..base.autocast import without_autocast
from ..base.autograd import check_first_derivative, check_transforms
from ..base.compiled import not_compiled
from ..base.kept import find_kept
from ..base.streams import send_to_device
from ..kernels.packed import prepare_once
from ..ranks.agreement import admit_one_thread, report_failure, run_together
from ..ranks.rings import Rings
from .exchange import exchange_states, find_weights
from .segments import Exchange, StatePlan
from .slopes import send_slopes

NAME = "lightning_attn_func"


@dataclass(eq=False)
class Plan:
    """The part of one rank in calls with the same terms.

    kernel    a module, see `kernels.py`
    prepared  tensors that are kept on devices
    """

    states: StatePlan
    kernel: ModuleType
    slopes: tuple[float, ...]
    scale: float
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False)

    def take_initial(self, rings: Rings, last: Tensor) -> Tensor:
        """Return the states (N, H, D, D) with which segments begin, from those after segments. A
        recomputation takes those of the first run.
        """
        plan = self.states.forward
        if not plan.is_any:
            return last
        finding = "lightning attention exchanges its states"
        return find_kept(lambda: self._exchange(rings, "forward", plan, last), finding)

    def take_final(self, rings: Rings, first: Tensor) -> Tensor:
        """Return the gradients (N, H, D, D) of the states after segments, from those of the states
        before segments.
        """
        plan = self.states.backward
        if not plan.is_any:
            return first
        return self._exchange(rings, "backward", plan, first)

    def _exchange(self, rings: Rings, direction: str, plan: Exchange, own: Tensor) -> Tensor:
        def make() -> Tensor:
            slopes = torch.tensor(self.slopes, dtype=torch.float64)
            return send_to_device(find_weights(plan.sums, slopes).to(own.dtype), own.device)

        weights = prepare_once(self, (direction, own.dtype), own.device, make)
        # the backward numbers runs from the end of the sequence
        order = slice(None, None, -1 if direction == "backward" else 1)
        found = exchange_states(rings, plan, own.unbind()[order], own, weights)
        return torch.stack(found[order]) if found else own.new_empty(0, *own.shape[1:])


class LightningAttention(torch.autograd.Function):
    """Lightning attention of one rank by its plan: (T, H, D), differentiable once in q, k and v."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rings: Rings, plan: Plan, number: int
    ) -> Tensor:
        """Return out of the call with this number."""
        segments, kernel = plan.states.segments, plan.kernel
        slopes = send_slopes(plan, plan.slopes, q)
        with without_autocast(q):
            states = kernel.forward_states(k, v, slopes, segments)
            initial = plan.take_initial(rings, states.last)
            out: Tensor = kernel.outputs(q, k, v, slopes, plan.scale, segments, states, initial)
        ctx.save_for_backward(q, k, v, initial)
        ctx.rings, ctx.plan, ctx.number = rings, plan, number
        return out

    @staticmethod
    @not_compiled  # not by compiled autograd either
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of forward's arguments, once all ranks are in this backward."""
        doing = f"the backward of call {ctx.number}, of {NAME}"
        rings: Rings = ctx.rings
        plan: Plan = ctx.plan

        def begin() -> tuple[Tensor, ...]:
            check_first_derivative(NAME)
            check_transforms(f"the backward of {NAME}", dout)
            saved: tuple[Tensor, ...] = ctx.saved_tensors  # raises if they were freed
            return saved

        with admit_one_thread(rings, doing):
            q, k, v, initial = run_together(rings, doing, begin)
            with without_autocast(dout), report_failure(rings, doing):
                dq, dk, dv = _differentiate(rings, plan, q, k, v, dout, initial)
        return dq, dk, dv, None, None, None


def _differentiate(
    rings: Rings, plan: Plan, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of this rank's tokens."""
    segments, kernel, scale = plan.states.segments, plan.kernel, plan.scale
    slopes = send_slopes(plan, plan.slopes, q)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    states = kernel.backward_states(q, dout, slopes, scale, segments)
    dfinal = plan.take_final(rings, states.last)
    grads: tuple[Tensor, Tensor, Tensor] = kernel.gradients(
        q, k, v, dout, slopes, scale, segments, initial, states, dfinal
    )
    return grads
