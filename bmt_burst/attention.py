"""The public function: checks its arguments once, agrees with the other ranks, and hands over to the ring."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import ring
from .groups import Group, Rings, make_rings
from .kernels import Kernel, pick
from .layout import LAYOUTS, Layout
from .plan import Plan, travelling_bytes
from .schedule import Schedule

BACKWARDS = ("auto", "q", "kv")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PROCESS = uuid.uuid4().hex
_MOST_PLANS = 1024  # of a ring; then it begins anew


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
        process_group: the ranks that share the sequence: a torch.distributed ProcessGroup, a bmtrain NCCLCommunicator
            or a bmt_burst Transport; by default all ranks of BMTrain or torch.distributed, or this process alone.
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
        _check_options(options)
        _check_tensors(q, k, v)
        _check_device(rings, q)
        kernel = pick(options["flash"], q, k, options["deterministic"])
        mine = _terms(kernel, q, k, v, options)
    except Exception as caught:  # noqa: BLE001 - raised below, once the other ranks know of it
        failure = caught
        mine = {"failure": _plain_text(f"{type(caught).__name__}: {caught}")}
    mine["process"] = f"{_PROCESS} {os.getpid()} {threading.get_ident()}"  # ranks may be forks, or threads of a test
    answers = tuple(rings.gather(json.dumps(mine).encode()))
    if failure:
        raise failure
    plans = rings.inner.plans.setdefault(rings, {})
    if answers in plans:
        return plans[answers]
    plan = Plan(
        layout=_compare(options["layout"], [json.loads(answer) for answer in answers]),
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


def _check_options(options: dict[str, Any]) -> None:
    for name in ("causal", "optimize_bwd_comm", "deterministic"):
        if not isinstance(options[name], bool):
            raise TypeError(f"{name} must be True or False, got {options[name]!r}")
    for name, choices in (("layout", LAYOUTS), ("backward", BACKWARDS)):
        if options[name] not in choices:
            raise ValueError(f"unknown {name} {options[name]!r}; expected one of {sorted(choices)}")
    if not isinstance(options["flash"], str):
        raise TypeError(f"flash must be the name of a kernel, got {options['flash']!r}")
    group_bytes = options["group_bytes"]
    if isinstance(group_bytes, bool) or not isinstance(group_bytes, int) or group_bytes < 0:
        raise ValueError(f"group_bytes must be a whole number of bytes, got {group_bytes!r}")
    if group_bytes >= 1 << 63:
        raise ValueError(f"group_bytes must be below 2^63, got {group_bytes.bit_length()} bits")
    scale = options["softmax_scale"]
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"softmax_scale must be a number or None, got {scale!r}")
    if scale is not None and not 0 < scale <= sys.float_info.max:  # kernels take their largest score for the scaled one
        got = scale if isinstance(scale, float) or scale <= 0 else f"a number of {scale.bit_length()} bits"
        raise ValueError(f"softmax_scale must be positive and finite, got {got}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.is_nested or x.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got a nested one or layout {x.layout}")
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, tokens, heads, head size), got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
        if 0 in (x.shape[0], *x.shape[2:]):
            raise ValueError(f"{name} has an empty dimension: shape {tuple(x.shape)}")
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if len({q.device, k.device, v.device}) > 1:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    for dim, meaning in ((0, "batch"), (1, "tokens"), (3, "head size")):
        if q.shape[dim] != k.shape[dim]:
            raise ValueError(f"q and k differ in {meaning}: shapes {tuple(q.shape)} and {tuple(k.shape)}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"k has {k.shape[2]} heads, which does not divide q's {q.shape[2]}")


def _check_device(rings: Rings, q: Tensor) -> None:
    for transport in (rings.inner, rings.outer):
        if transport.size > 1 and q.device.type not in transport.device_types:
            raise ValueError(
                f"q is on {q.device}, but the group moves tensors on {sorted(transport.device_types)} only"
            )


def _terms(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """What a call means; all but "tokens" must be equal on all ranks."""
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    terms = {**options, "kernel": kernel.name, "need of a gradient": needs_gradient}
    del terms["flash"]
    if terms["softmax_scale"] is None:
        terms["softmax_scale"] = q.shape[-1] ** -0.5
    if terms["backward"] == "auto":
        moved = travelling_bytes(kernel, q, k, send_out=not options["optimize_bwd_comm"])
        terms["backward"] = min(moved, key=moved.get)
    batch, tokens, q_heads, head_size = q.shape
    shape = {"batch": batch, "tokens": tokens, "q heads": q_heads, "kv heads": k.shape[2], "head size": head_size}
    return {**shape, "dtype": str(q.dtype), "device type": q.device.type, **terms}


def _compare(layout: str, replies: list[dict[str, Any]]) -> Layout:
    """The layout of the sequence that the ranks' terms describe. Raises ValueError, alike on every rank."""
    if len({reply.pop("process") for reply in replies}) < len(replies):
        raise ValueError(
            "double_group has a process at two places: intra must be a host's ranks, inter one of each host"
        )
    for rank, reply in enumerate(replies):
        if "failure" in reply:
            raise ValueError(f"rank {rank} of the group was given wrong arguments: {reply['failure']}")
    for rank, reply in enumerate(replies):
        for term, value in replies[0].items():
            if term != "tokens" and reply[term] != value:
                raise ValueError(f"ranks differ in {term}: rank 0 has {value!r}, rank {rank} has {reply[term]!r}")
    tokens = [reply["tokens"] for reply in replies]
    whole = Layout(layout, sum(tokens), len(tokens))
    expected = [whole.length(rank) for rank in range(whole.size)]
    if tokens != expected:
        raise ValueError(
            f"the ranks hold {tokens} tokens, but {layout} cuts {sum(tokens)} into {expected}; "
            "use bmt_burst.shard, or torch.tensor_split's sizes"
        )
    return whole


def _plain_text(text: str) -> str:
    """Text that fits a message as JSON: printable ASCII, 400 characters at most."""
    return "".join(c if c.isprintable() and c.isascii() else "?" for c in text[:400])
