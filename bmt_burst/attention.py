"""The public function: checks its arguments once, agrees with the other ranks, and hands over to the ring."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import ring
from .agreement import call_terms, compare, taking_part, tell, together
from .checks import check_device, check_options, check_scale, check_tensors
from .compiled import not_compiled
from .kernels import pick
from .plan import Plan
from .rings import Group, Rings, make_rings
from .schedule import Schedule

_MOST_PLANS = 1024  # of a ring; then it begins anew


@overload
def burst_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    flash: str = "auto",
    causal: bool = False,
    optimize_bwd_comm: bool = True,
    deterministic: bool = False,
    process_group: Group | None = None,
    double_group: Sequence[Group | None] = (None, None),
    *,
    layout: str = "zigzag",
    backward: str = "auto",
    return_lse: Literal[False] = False,
    group_bytes: int = 5 << 26,
) -> Tensor: ...


@overload
def burst_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    flash: str = "auto",
    causal: bool = False,
    optimize_bwd_comm: bool = True,
    deterministic: bool = False,
    process_group: Group | None = None,
    double_group: Sequence[Group | None] = (None, None),
    *,
    layout: str = "zigzag",
    backward: str = "auto",
    return_lse: Literal[True],
    group_bytes: int = 5 << 26,
) -> tuple[Tensor, Tensor]: ...


@overload
def burst_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    flash: str = "auto",
    causal: bool = False,
    optimize_bwd_comm: bool = True,
    deterministic: bool = False,
    process_group: Group | None = None,
    double_group: Sequence[Group | None] = (None, None),
    *,
    layout: str = "zigzag",
    backward: str = "auto",
    return_lse: bool,
    group_bytes: int = 5 << 26,
) -> Tensor | tuple[Tensor, Tensor]: ...


@not_compiled
def burst_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    flash: str = "auto",
    causal: bool = False,
    optimize_bwd_comm: bool = True,
    deterministic: bool = False,
    process_group: Group | None = None,
    double_group: Sequence[Group | None] = (None, None),
    *,
    layout: str = "zigzag",
    backward: str = "auto",
    return_lse: bool = False,
    group_bytes: int = 5 << 26,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence that is cut over the ranks of a group; every rank of it must call.

    Args:
        q: (B, S_local, H, D) queries of this rank's tokens; fp16, bf16, fp32 or fp64.
        k, v: (B, S_local, G, D) keys and values of the same tokens; H a multiple of G, query head h attends to kv
            head h // (H // G). They are never repeated.
        softmax_scale: positive factor of the scores, by default 1 / sqrt(D).
        flash: the block kernel: "auto" for the fastest there is, a name from `bmt_burst.kernels`, or the official
            package's "cuda" or "triton".
        causal: whether a token sees only tokens at its own or earlier positions, as `layout` gives them.
        optimize_bwd_comm: where queries travel in the backward, let delta = rowsum(out * dout) travel instead of out.
        deterministic: results that are equal bit for bit between runs.
        process_group: the ranks that share the sequence: a torch.distributed ProcessGroup or DeviceMesh (of one
            dimension), a bmtrain NCCLCommunicator or a bmt_burst Transport; by default all ranks of BMTrain or
            torch.distributed, or this process alone.
        double_group: (intra, inter) groups for a double ring, instead of `process_group`.
        layout: which positions the ranks own, see `bmt_burst.Layout`: "zigzag", "striped" or "contiguous".
        backward: what travels in the backward: "kv" (keys and values), "q" (queries and the output's gradient) or
            "auto", the one with fewer bytes.
        return_lse: also return the logsumexp.
        group_bytes: how many bytes of travelling blocks may come in together: more means fewer and larger kernel calls,
            less means less memory. Long blocks go round in several passes, each of some of the heads.

    Returns:
        out (B, S_local, H, D) in q's dtype, and with return_lse also lse (B, H, S_local), fp32 (fp64 for fp64
        inputs), the natural logarithm of the softmax denominators; no gradient flows through lse.

    Differentiable in q, k and v (once). Inputs are never written to.

    Raises, on every rank of the group, ValueError or TypeError for arguments that are wrong on any rank or differ
    between ranks, for a sequence with fewer tokens than ranks, for a double_group that is no grid of ranks, and, in the
    call or its backward, where a rank does something else. RuntimeError where a rank has ended or failed in the middle.

    Only about groups ranks cannot agree: with a group that is none, or that this rank is not in, the error is raised
    here, and the ranks that wait for this one raise TimeoutError after the group's own timeout (gloo between hosts:
    RuntimeError), or RuntimeError as soon as this process has ended. The same where a rank gives another valid group.
    """
    rings = make_rings(process_group, double_group)
    options = {
        "softmax_scale": softmax_scale,
        "flash": flash,
        "causal": causal,
        "optimize_bwd_comm": optimize_bwd_comm,
        "deterministic": deterministic,
        "layout": layout,
        "backward": backward,
        "group_bytes": group_bytes,
    }
    with torch.cuda.device(q.device) if _is_on_gpu(q) else contextlib.nullcontext():  # which kernels take for granted
        out, lse = _BurstAttention.apply(q, k, v, rings, *_agree(rings, q, k, v, options))
    return (out, lse) if return_lse else out


def _is_on_gpu(q: Any) -> bool:
    return isinstance(q, Tensor) and q.is_cuda


class _BurstAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, rings: Rings, plan: Plan, call: int) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False), taking_part(rings, f"call {call}"):
            out, lse = ring.forward(plan, rings, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rings, ctx.plan, ctx.call = rings, plan, call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @not_compiled  # nor by compiled autograd
    @once_differentiable
    def backward(ctx, dout: Tensor, _dlse: Tensor):
        doing = f"the backward of call {ctx.call}"
        saved = together(ctx.rings, doing, lambda: ctx.saved_tensors)
        with torch.autocast(dout.device.type, enabled=False), taking_part(ctx.rings, doing):
            return *ring.backward(ctx.plan, ctx.rings, dout, *saved), None, None, None


def _agree(rings: Rings, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Plan, int]:
    """Checks the arguments of every rank; returns the plan they agree on and the number of the call, or raises on all.

    A rank cannot know alone what a call means: the same number of tokens here may be part of sequences of several
    lengths. So the ranks ask each other every time, and remember the plan that follows from the same replies.
    """
    kernel = None

    def mine() -> dict[str, Any]:
        nonlocal kernel, options
        options = check_options(options)
        check_tensors(q, k, v)
        check_scale(options["softmax_scale"], q.dtype)
        check_device(rings, q)
        kernel = pick(options["flash"], q, k, options["deterministic"])
        return call_terms(kernel, q, k, v, options)

    history = rings.history
    said = tell(rings, "a call of burst_attn_func", mine)
    plan = history.plans.get(said)
    if plan is None:
        layout, agreed = compare(options["layout"], said), json.loads(said[rings.rank])
        plan = Plan(
            layout=layout,
            schedule=Schedule(rings.inner.size, rings.outer.size),
            rank=rings.rank,
            kernel=kernel,
            scale=agreed["softmax_scale"],
            causal=agreed["causal"],
            backward=agreed["backward"],
            send_out=not agreed["optimize_bwd_comm"],
            deterministic=agreed["deterministic"],
            group_bytes=agreed["group_bytes"],
        )
        ring.reserve(plan, rings, q, k, with_backward=agreed["need of a gradient"])
        if len(history.plans) == _MOST_PLANS:
            history.plans.clear()
        history.plans[said] = plan
    history.calls += 1
    return plan, history.calls
