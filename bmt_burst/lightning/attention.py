"""The function lightning_attn_func, and the checks of its calls.

Ranks agree on each call as in `burst_attn_func` (`ranks/agreement.py`). A plan follows from their
terms, and is kept for later calls.

Letters: B batch, S tokens of this rank, T = B S, H heads, D head size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.arguments import as_positive
from ..base.autograd import check_transforms
from ..base.compiled import not_compiled
from ..base.dtypes import accumulator_dtype
from ..base.kept import is_recomputing
from ..base.policies import without_policies
from ..calls.call import find_kept_plan
from ..calls.inputs import Inputs, check_inputs
from ..calls.masking import Masking, check_lengths, find_masking, resolve_layout
from ..calls.options import Layouts, Masks, Options, check_options
from ..calls.refusal import refuse_arguments, refuse_wrong_arguments
from ..calls.terms import describe_inputs, describe_layout, describe_mask
from ..ranks.agreement import (
    admit_one_thread,
    gather_terms,
    mark_known,
    read_equal_terms,
    report_failure,
)
from ..ranks.rings import Group, Rings, check_device, make_rings
from ..sequence.layout import Layout, Stacked
from ..sequence.mask import Mask
from ..transport import LANES
from . import kernels
from .exchange import check_state, state_bytes
from .plan import NAME, LightningAttention, PastStates, Plan
from .segments import Edges, find_borders, plan_states
from .slopes import check_slopes, describe_slopes

CALL = f"a call of {NAME}"

_SOFTMAX = (
    "lightning attention has no softmax, so it takes no scores, bias, softcap or sinks: leave it "
    "out, or use burst_attn_func"
)
_STRATEGY = (
    "ranks send only states, so there are no strategies such as ulysses to choose from: leave it "
    "out"
)
_MASK = "it is causal without a mask, and Mask.documents(cu_seqlens) keeps documents apart"
_STATE = (
    "a state is 0 before each document, so pass whole documents; bmt_burst.nn.LightningAttention "
    "continues states in bmt_burst.Chunks and in a bmt_burst.Cache"
)
_INSTEAD = {  # arguments of other functions, and what to write here
    **dict.fromkeys(("scores", "bias", "softcap", "sinks", "return_lse"), _SOFTMAX),
    **dict.fromkeys(("strategy", "backward", "ulysses_size"), _STRATEGY),
    **dict.fromkeys(("causal", "is_causal", "window", "cu_seqlens"), _MASK),
    "deterministic": "two runs are always bitwise equal: leave it out",
    "softmax_scale": "write scale",
    "sparse": "lightning attention chooses no blocks: use burst_attn_func",
    "kv_layout": "a token has its query, key and value on one rank: write layout",
    "cache": "bmt_burst.nn.LightningAttention takes a cache: leave it out",
    **dict.fromkeys(("initial_state", "output_final_state"), _STATE),
    "g_gamma": "write slopes=-g_gamma",
}


@not_compiled
@functools.partial(
    refuse_wrong_arguments,
    refuse=functools.partial(refuse_arguments, instead=_INSTEAD, doing=CALL),
)
def lightning_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    *,
    scale: float | None = None,
    mask: Masks | None = None,
    layout: Layouts = "zigzag",
    flash: str = "auto",
    process_group: Group | None = None,
    double_group: Sequence[Group | None] = (None, None),
) -> Tensor:
    """Compute lightning attention over a sequence that is cut over the ranks of a group.

    Each head has a state S (D, D), which is 0 before a document. For each of its tokens in turn

        S = e^(-slope) S + k v^T,   out = scale * S^T q

    This is the linear attention of MiniCPM-SALA (arXiv 2602.11761). Ranks send only states. States
    are neither taken nor returned: `bmt_burst.nn.LightningAttention` continues them in
    `bmt_burst.Chunks` and in a `bmt_burst.Cache`.

    Every rank of the group must call. [attention.md](attention.md#lightning-attention) has an
    example.

    Args:
        q, k, v: (B, S_local, H, D) each, of this rank's tokens, in fp16, bf16, fp32 or fp64.
            Autocast casts them to its dtype, unless they are fp64.
        slopes: (H,) fp32 (or fp64 for fp64 inputs), finite and at least 0, identical on all ranks:
            constants, such as `alibi_slopes(H)`. A state fades by e^(-slope) a token. On q's device
            or the CPU. Pass the same tensor in each call: the host waits for the values of a new
            tensor of a GPU.
        scale: positive factor of out, by default 1 / sqrt(D).
        mask: causal documents of the whole sequence, such as Mask.documents(cu_seqlens), or one
            such mask for each row of the batch. By default a row is one document.
        layout: the positions of each rank's tokens, as in burst_attn_func: "zigzag", "contiguous",
            "balanced", a `bmt_burst.Layout`, or one of these for each row of the batch. Each token
            costs the same, so all balance the work. "striped" is refused.
        flash: the kernel: "auto" for the fastest that can compute the call, "triton", or
            "reference".
        process_group: the ranks that share the sequence, as in burst_attn_func.
        double_group: (intra, inter) groups of a double ring, instead of `process_group`.

    Returns:
        out (B, S_local, H, D), in the dtype of q or of autocast. It is differentiable once, in q, k
        and v. Sums are fp32, or fp64 for fp64 inputs.

    Raises:
        ValueError, TypeError: on every rank, if arguments are wrong on any rank or differ between
            ranks, for a striped layout, a mask that is not of causal documents, k or v of another
            shape than q, or fewer tokens than ranks.
        RuntimeError: as `burst_attn_func`.
    """
    rings = make_rings(process_group, double_group)
    options = Options(causal=mask is None, mask=mask, layout=layout, flash=flash)
    return attend_lightning(rings, q, k, v, slopes, scale, options)


def attend_lightning(
    rings: Rings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    scale: float | None,
    options: Options,
    past: PastStates | None = None,
) -> Tensor:
    """Return out (B, S, H, D) of a call that all ranks of `rings` make.

    past  the states of the edges of a chunk, if mask and layout are those of a chunk

    Raises on every rank if arguments are wrong on any rank.
    """
    # kernels rely on q's GPU being the current one
    on_device = torch.cuda.device_of(q) if isinstance(q, Tensor) else contextlib.nullcontext()
    with on_device, without_policies(), admit_one_thread(rings, CALL):
        checked: list[_Call] = []

        def check() -> dict[str, Any]:
            call = _check_call(rings, (q, k, v), slopes, scale, options, past)
            checked.append(call)
            return call.terms

        lines = gather_terms(rings, CALL, check)
        [call] = checked
        number = rings.history.calls + 1
        with report_failure(rings, f"call {number}"):
            plan = find_kept_plan(rings, lines, lambda: _make_plan(rings, call, lines))
            rings.history.calls = number
            tensors = (_flatten(x) for x in call.inputs.tensors)
            run: Callable[..., Tensor] = LightningAttention.apply
            return run(*tensors, rings, plan, number, past).view(call.inputs.q.shape)


class _Call(NamedTuple):
    """A checked call. `terms` are what ranks compare."""

    inputs: Inputs
    slopes: tuple[float, ...]
    scale: float
    masking: Masking
    kernel: str
    edges: Edges | None
    terms: dict[str, Any]


def _check_call(
    rings: Rings,
    qkv: tuple[Tensor, Tensor, Tensor],
    slopes: Tensor,
    scale: float | None,
    options: Options,
    past: PastStates | None,
) -> _Call:
    """Return the call of this rank. Raises TypeError or ValueError if an argument is wrong."""
    inputs = check_inputs(*qkv, None, is_packed=False)
    _check_shapes(inputs)
    q = inputs.q
    check_transforms(NAME, *inputs.tensors)
    check_device(rings, q)
    values = check_slopes(slopes, q)
    scale = inputs.head_size**-0.5 if scale is None else as_positive("scale", scale)
    options = check_options(options)
    masking = find_masking(options, None, len(q), rings.size)
    _check_layouts(options.layout)
    if masking.mask is not None:
        find_borders(masking.mask)
    kernel = kernels.pick(options.flash, q)
    edges = None
    if past is not None:
        edges = past.edges.expand(len(q))
        if any(edges.before):
            check_state(q, past.initial)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in inputs.tensors)
    terms = {
        **describe_inputs(inputs, masking.rows),
        "slopes": describe_slopes(values),
        "scale": scale,
        "mask": describe_mask(masking),
        "layout": describe_layout(masking.layout),
        "documents of other chunks": edges and str(edges),
        "recording of gradients": recorded,
        "the kernel of flash": kernel,
        "kept states": is_recomputing(),
    }
    return _Call(inputs, values, scale, masking, kernel, edges, terms)


def _check_shapes(inputs: Inputs) -> None:
    q, k = inputs.q, inputs.k
    if k.shape[2] != q.shape[2]:
        raise ValueError(
            f"lightning attention needs k and v with as many heads as q, {q.shape[2]}, got "
            f"{k.shape[2]}: repeat their heads, as k.repeat_interleave(n, dim=2) does"
        )
    if k.shape[1] != q.shape[1]:
        raise ValueError(
            f"q, k and v must be of the same tokens, got {q.shape[1]} queries and {k.shape[1]} keys"
        )
    if inputs.value_size != inputs.head_size:
        raise ValueError(f"v must have q's head size, {inputs.head_size}, got {inputs.value_size}")


def _check_layouts(layouts: Layouts) -> None:
    """Raise ValueError for striped layouts."""
    for layout in [layouts] if isinstance(layouts, str | Layout) else layouts:
        if (layout if isinstance(layout, str) else layout.name) == "striped":
            raise ValueError(
                "lightning attention refuses layout='striped': its runs have one token each, and "
                "ranks would send a state for every token; use layout='zigzag'"
            )


def _make_plan(rings: Rings, call: _Call, lines: Sequence[bytes]) -> Plan:
    """Return this rank's plan, which follows from the lines of all ranks.

    Raises ValueError on all ranks if the terms do not agree.
    """
    try:
        everyone = read_equal_terms(lines, but=("tokens", "keys"))
        tokens = [theirs["tokens"] for theirs in everyone]
        mask, layout = _find_sequence(call, tokens)
        borders = find_borders(mask)
        states = plan_states(layout, borders, rings.rank, rings.inner.size, call.edges)
    except ValueError as error:  # every rank raises it, since it follows from all ranks' terms
        mark_known(error)
        raise
    q = call.inputs.q
    size = q.shape[3]
    like = torch.empty(1, q.shape[2], size, size, dtype=accumulator_dtype(q.dtype), device="meta")
    # at once for all chunks, since all ranks stop whenever this memory grows
    most = states.total if call.edges else max(states.forward.most, states.backward.most)
    rings.reserve({**dict.fromkeys(LANES, 0), "visit": most * state_bytes(like)}, q.device)
    # other kernels need tokens
    kernel = call.kernel if len(states.segments.cuts) > 1 else "reference"
    return Plan(states, kernels.load(kernel), call.slopes, call.scale)


def _find_sequence(call: _Call, tokens: list[int]) -> tuple[Mask, Layout]:
    """Return the mask and the layout of all rows of the batch as one sequence.

    tokens  the number of tokens of each rank, in a row, or in all rows if they are stacked

    Raises ValueError if they do not fit the mask and the layout.
    """
    mask = call.masking.mask_of(tokens, tokens)
    layout = resolve_layout(call.masking.layout, mask, len(tokens))
    check_lengths(layout, tokens)
    batch = len(call.inputs.q)
    if call.masking.rows or batch == 1:
        return mask, layout
    return Mask.stacked([mask] * batch), Stacked([layout] * batch)


def _flatten(x: Tensor) -> Tensor:
    """Return x (B, S, H, D) as (T, H, D), with entries of a head side by side."""
    x = x.flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()
