"""The public function: checks its arguments once, agrees with the other ranks, and hands over to the ring."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import uuid
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import ring
from .agreement import compare, plain_text, terms
from .checks import check_device, check_options, check_scale, check_tensors
from .groups import Group, Rings, make_rings
from .kernels import pick
from .plan import Plan
from .schedule import Schedule

_PROCESS = uuid.uuid4().hex
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
    between ranks, and for a sequence with fewer tokens than ranks.
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
        out, lse = _BurstAttention.apply(q, k, v, _make_plan(rings, q, k, v, options))
    return (out, lse) if return_lse else out


def _is_on_gpu(q: Any) -> bool:
    return isinstance(q, Tensor) and q.is_cuda


class _BurstAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = ring.forward(plan, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor, _dlse: Tensor):
        with torch.autocast(dout.device.type, enabled=False):
            return *ring.backward(ctx.plan, dout, *ctx.saved_tensors), None


def _make_plan(rings: Rings, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Plan:
    """Checks the arguments of every rank and returns the plan they agree on, or raises on every rank.

    A rank cannot know alone what a call means: the same number of tokens here may be part of sequences of several
    lengths. So the ranks ask each other every time, and remember the plan that follows from the same replies.
    """
    failure, kernel = None, None
    try:
        options = check_options(options)
        check_tensors(q, k, v)
        check_scale(options["softmax_scale"], q.dtype)
        check_device(rings, q)
        kernel = pick(options["flash"], q, k, options["deterministic"])
        mine = terms(kernel, q, k, v, options)
    except Exception as caught:  # noqa: BLE001 - raised below, once the other ranks know of it
        failure = caught
        mine = {"failure": plain_text(f"{type(caught).__name__}: {caught}")}
    mine["process"] = f"{_PROCESS} {os.getpid()} {threading.get_ident()}"  # ranks may be forks, or threads of a test
    answers = tuple(rings.gather(json.dumps(mine).encode()))
    if failure:
        raise failure
    plans = rings.inner.plans.setdefault(rings, {})
    if answers in plans:
        return plans[answers]
    plan = Plan(
        layout=compare(options["layout"], [json.loads(answer) for answer in answers]),
        schedule=Schedule(rings.inner.size, rings.outer.size),
        rings=rings,
        kernel=kernel,
        scale=mine["softmax_scale"],
        causal=options["causal"],
        backward=mine["backward"],
        send_out=not options["optimize_bwd_comm"],
        deterministic=options["deterministic"],
        group_bytes=options["group_bytes"],
    )
    ring.reserve(plan, q, k, with_backward=mine["need of a gradient"])
    if len(plans) == _MOST_PLANS:
        plans.clear()
    plans[answers] = plan
    return plan
