"""The public functions: they check their arguments once, agree with the other ranks, and hand over
to a strategy.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from .base.autograd import check_first_derivative, check_transforms
from .base.compiled import not_compiled
from .calls.call import LearnedTensors, agree_on_call
from .calls.checks import unpack_tensor
from .calls.refusal import CALL, refuse_arguments, refuse_wrong_arguments, two_cu_seqlens
from .merging.sinks import sinks_gradient, with_sinks
from .ranks.agreement import admit_one_thread, report_failure, run_together
from .ranks.rings import Group, Rings, make_rings
from .scores import Scores
from .sequence.layout import Layout
from .sequence.mask import Mask
from .strategies import Plan, Saved

Masks = Mask | Sequence[Mask]
Layouts = str | Layout | Sequence[Layout]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@overload
def burst_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *options: Any, return_lse: Literal[True], **named: Any
) -> tuple[Tensor, Tensor]: ...


@overload
def burst_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *options: Any, return_lse: Literal[False] = ..., **named: Any
) -> Tensor: ...


@overload
def burst_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *options: Any, return_lse: bool, **named: Any
) -> Tensor | tuple[Tensor, Tensor]: ...


@not_compiled
@refuse_wrong_arguments
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
    mask: Masks | None = None,
    layout: Layouts = "zigzag",
    strategy: str = "auto",
    backward: str = "auto",
    return_lse: bool = False,
    group_bytes: int = 5 << 26,
    scores: Scores | Sequence[Scores] | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence that is cut over the ranks of a group; every rank of it must
    call.

    Args:
        q: (B, S_local, H, D) queries of this rank's tokens; fp16, bf16, fp32 or fp64. Autocast
            casts q, k and v to its dtype, as it does for torch's scaled_dot_product_attention, but
            not what is fp64.
        k, v: (B, S_local, G, D) keys and values of the same tokens; H a multiple of G, query head h
            attends to kv head h // (H // G). They are never repeated.
        softmax_scale: positive factor of the scores, by default 1 / sqrt(D).
        flash: the block kernel: "auto" for the fastest there is, a name from `bmt_burst.kernels`,
            or the official package's "cuda".
        causal: whether a token sees only tokens at its own or earlier positions, as `layout` gives
            them.
        optimize_bwd_comm: where queries travel in the backward, let delta = rowsum(out * dout)
            travel instead of out.
        deterministic: results that are equal bit for bit between runs.
        process_group: the ranks that share the sequence: a torch.distributed ProcessGroup or
            DeviceMesh (of one dimension), a bmtrain NCCLCommunicator or a bmt_burst Transport; by
            default all ranks of BMTrain or torch.distributed, or this process alone.
        double_group: (intra, inter) groups for a double ring, instead of `process_group`.
        mask: which pairs of the whole sequence are visible, instead of `causal`: a
            `bmt_burst.Mask`, or one for each row of the batch. Without either all are.
        layout: which positions the ranks own, in which order: "zigzag", "striped" or "contiguous",
            "balanced" for Layout.balanced of the mask, a `bmt_burst.Layout`, or one of these for
            each row of the batch, which must give a rank equally many tokens. The tokens of q, k
            and v are those, as the layout's `shard` cuts them.
        strategy: "ring"; "all-gather" (the ring with all blocks at once); "ulysses" (every rank
            computes some heads of the whole sequence; not with a double_group); "usp" (the ranks of
            `intra` share heads so, and those of `inter` are rings); or "auto", which is the ring.
        backward: what travels in a ring's backward: "kv" (keys and values), "q" (queries and the
            output's gradient) or "auto", the one with fewer bytes.
        return_lse: also return the logsumexp.
        group_bytes: how many bytes of a ring's travelling blocks may come in together: more means
            fewer and larger kernel calls, less means less memory. Long blocks go round in several
            passes, each of some of the heads. It also bounds how many partial results wait to be
            added up, with any strategy.
        scores: which pairs are visible, instead of `mask`, and which row of `bias` each of them
            adds to its scores: a `bmt_burst.Scores` of the whole sequence, or one for each row of
                the batch. Never a tensor of S x S.
        bias: (R, H) fp32 (fp64 for fp64 inputs), the table of `scores`: a finite number for each
            row and query head, on the inputs' device. The same on all ranks, which compare its
            shape alone. It is fastest where k has as many heads as q. Where `flash` knows no
            biases, the fastest kernel that does computes what needs one. Numbers are not looked at.
            Rows of -inf count for nothing; a query that sees nothing else has lse -inf and
            gradients of NaN, but its out, NaN in dense attention, may be any numbers: to hide pairs
            is for the mask. In bf16 the table's gradient is good to 0.2 to 1 % as a whole. Of a row
            that nearly all of the attention goes to, as with a number 3 above the others, it is
            small, and good to 2 to 10 % of itself: it is what is left of sums of P dP and P delta,
            and out is rounded before delta = rowsum(out * dout) is made of it.
        softcap: a positive bound of the scores, softcap * tanh(softmax_scale * q k^T / softcap)
            before they are masked, as Gemma 2 and flash-attn have it. Not every kernel knows one,
            and none beside a bias.
        sinks: (H,) fp32 (fp64 for fp64 inputs), on the inputs' device: for each query head a
            learned score of a key that all queries see and that has no value, as gpt-oss has it.
            Only the divisor of the softmax has it in it. The same on all ranks, which compare only
            whether there are sinks. Any kernel and strategy will do.

    Returns:
        out (B, S_local, H, D) in the dtype of q, or of autocast, and with return_lse also lse (B,
        H, S_local), fp32 (fp64 for fp64 inputs), the natural logarithm of the softmax denominators,
        with that of the sinks; no gradient flows through lse. Queries that see nothing have out 0
        and lse -inf, or that of their sink.

    Differentiable in q, k, v, bias and sinks (once). Of bias and sinks each rank has the gradient
    of its own tokens' or pairs', a share: the sum over ranks is the gradient, as for any parameter
    of a sequence parallel model. Inputs are never written to.

    Raises, on every rank of the group, ValueError or TypeError for arguments that are wrong on any
    rank or differ between ranks, for a sequence with fewer tokens than ranks, for a double_group
    that is no grid of ranks, and, in the call or its backward, where a rank does something else.
    RuntimeError where a rank has ended or failed in the middle, for a backward with create_graph,
    and inside the transforms of torch.func or forward mode. Also RuntimeError where two threads of
    a process are in calls of one group at once, which makes the group unusable.

    Only about groups ranks cannot agree: with a group that is none, or that this rank is not in,
    the error is raised here, and the ranks that wait for this one raise TimeoutError after the
    group's own timeout, or RuntimeError as soon as this process has ended. The same where a rank
    gives another valid group.
    """
    options = {
        "softmax_scale": softmax_scale,
        "flash": flash,
        "causal": causal,
        "optimize_bwd_comm": optimize_bwd_comm,
        "deterministic": deterministic,
        "mask": mask,
        "layout": layout,
        "strategy": strategy,
        "backward": backward,
        "return_lse": return_lse,
        "group_bytes": group_bytes,
        "scores": scores,
        "softcap": softcap,
    }
    out, lse = _attention(
        make_rings(process_group, double_group),
        q,
        k,
        v,
        LearnedTensors(bias, sinks),
        lambda: options,
    )
    return (out, lse) if return_lse else out


def _with_options(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return `function` of packed tensors with the options of burst_attn_func in its signature."""
    signature = inspect.signature(function)
    *tensors, _options, _named = signature.parameters.values()
    _q, _k, _v, *options = inspect.signature(burst_attn_func).parameters.values()
    function.__signature__ = signature.replace(parameters=[*tensors, *options])
    return function


@not_compiled
@refuse_wrong_arguments
@_with_options
def burst_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *options: Any, **named: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`burst_attn_func` of q (B, S_local, H, D) and kv (B, S_local, 2, G, D), keys and values; they
    are not copied.

    All other arguments, what it returns and what it raises are burst_attn_func's.
    """
    return _packed_call((q,), "kv", kv, options, named)


@not_compiled
@refuse_wrong_arguments
@_with_options
def burst_attn_qkvpacked_func(
    qkv: Tensor, *options: Any, **named: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`burst_attn_func` of qkv (B, S_local, 3, H, D), queries, keys and values; they are not
    copied.

    All other arguments, what it returns and what it raises are burst_attn_func's.
    """
    return _packed_call((), "qkv", qkv, options, named)


def _packed_call(
    before: tuple[Tensor, ...],
    name: str,
    packed: Tensor,
    options: tuple[Any, ...],
    named: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    signature, args = inspect.signature(burst_attn_func), (None, None, None, *options)
    try:
        signature.bind(*args, **named)
        tensors = *before, *unpack_tensor(name, packed, 3 - len(before))
    except (TypeError, ValueError) as error:
        refuse_arguments(error, signature, args, named)
    return burst_attn_func(*tensors, *options, **named)


@not_compiled
@refuse_wrong_arguments
def burst_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    softmax_scale: float | None = None,
    flash: str = "auto",
    causal: bool = False,
    window: int | None = None,
    process_group: Group | None = None,
    double_group: Sequence[Group | None] = (None, None),
    *,
    layout: str | Layout = "zigzag",
    return_lse: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    optimize_bwd_comm: bool = True,
    deterministic: bool = False,
    strategy: str = "auto",
    backward: str = "auto",
    group_bytes: int = 5 << 26,
) -> Tensor | tuple[Tensor, Tensor]:
    """`burst_attn_func` for packed documents, with tensors as functions of variable length take
    them.

    Args:
        q: (T_local, H, D) queries of this rank's tokens of the packed sequence, as `layout` cuts
            that.
        k, v: (T_local, G, D) keys and values of the same tokens.
        cu_seqlens: (0, ..., T): where documents begin in the whole sequence, and its length; a
            sequence or an integer tensor on the CPU. Documents may be empty. The same on every
            rank.
        causal: whether a token sees only tokens at its own or earlier positions of its document.
        window: tokens see only those less than so many positions away; with `causal` themselves and
            window - 1 before.
        layout: as burst_attn_func's, for the packed sequence as a whole.
        softcap, sinks, optimize_bwd_comm, deterministic, strategy, backward, group_bytes: as
        burst_attn_func's.

    Returns:
        out (T_local, H, D), and with return_lse also lse (H, T_local).

    Raises as burst_attn_func.
    """
    options = {
        "softmax_scale": softmax_scale,
        "flash": flash,
        "causal": False,
        "optimize_bwd_comm": optimize_bwd_comm,
        "deterministic": deterministic,
        "layout": layout,
        "strategy": strategy,
        "backward": backward,
        "return_lse": return_lse,
        "group_bytes": group_bytes,
        "scores": None,
        "softcap": softcap,
    }

    def with_mask() -> dict[str, Any]:
        _check_one_cu_seqlens(softmax_scale)
        return {**options, "mask": Mask.documents(cu_seqlens, causal, window)}

    try:
        rings = make_rings(process_group, double_group)
    except (TypeError, ValueError):
        # else flash-attn's later arguments would be taken for groups
        _check_one_cu_seqlens(softmax_scale)
        raise
    out, lse = _attention(rings, q, k, v, LearnedTensors(sinks=sinks), with_mask, packed=True)
    return (out[0], lse[0]) if return_lse else out[0]


def _check_one_cu_seqlens(softmax_scale: Any) -> None:
    """Raise TypeError for arguments in the order of flash-attn's function, whose fifth is
    cu_seqlens_k.
    """
    if error := two_cu_seqlens(softmax_scale):
        raise error


def _attention(
    rings: Rings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    learned: LearnedTensors,
    options: Callable[[], dict[str, Any]],
    packed: bool = False,
) -> tuple[Tensor, Tensor]:
    """out and lse of what the ranks agree on. `options` may raise what is wrong with them."""
    # kernels take it for granted
    device = torch.cuda.device(q.device) if _is_on_gpu(q) else contextlib.nullcontext()
    with device, admit_one_thread(rings, CALL):
        call = agree_on_call(rings, q, k, v, learned, options, packed)
        with report_failure(rings, f"call {call.number}"):  # the others may be on their way already
            plan, rows = call.plan(), call.rows
            tensors = [x.flatten(0, 1).unsqueeze(0) for x in call.tensors] if rows else call.tensors
            out, lse = _BurstAttention.apply(
                *tensors, learned.bias, learned.sinks, rings, plan, call.number
            )
        if not rows:
            return out, lse
        return out.squeeze(0).unflatten(0, (rows, -1)), lse.squeeze(0).unflatten(
            1, (rows, -1)
        ).transpose(0, 1)


def _is_on_gpu(q: Any) -> bool:
    return isinstance(q, Tensor) and q.is_cuda


class _BurstAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        rings: Rings,
        plan: Plan,
        call: int,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            out, lse, row_lse = plan.forward(rings, q, k, v, bias)
            if sinks is not None:
                out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(*Saved(q, k, v, out, lse, bias, row_lse), sinks)
        ctx.rings, ctx.plan, ctx.call = rings, plan, call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @not_compiled  # nor by compiled autograd
    def backward(ctx, dout: Tensor, _dlse: Tensor):
        doing = f"the backward of call {ctx.call}"

        def saved_tensors() -> tuple[Tensor | None, ...]:
            check_first_derivative("burst_attn_func")
            check_transforms("the backward of burst_attn_func", dout)
            return ctx.saved_tensors

        with admit_one_thread(ctx.rings, doing):
            *tensors, sinks = run_together(ctx.rings, doing, saved_tensors)
            saved = Saved(*tensors)
            with torch.autocast(dout.device.type, enabled=False), report_failure(ctx.rings, doing):
                grads = ctx.plan.backward(ctx.rings, dout, saved)
                wanted = ctx.needs_input_grad[4]
                dsinks = sinks_gradient(dout, saved.out, saved.lse, sinks) if wanted else None
                return *grads, dsinks, None, None, None
