"""The function lightning_attn_func, and the checks of its calls.

Ranks agree on each call as in `burst_attn_func` (`ranks/agreement.py`). A plan follows from their
terms, and is kept for later calls.

Letters: B batch, S tokens of this rank, T = B S, H heads, D head size.
"""

from __future__ import annotations

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
from ..calls.inputs import Form, check_inputs, describe_inputs
from ..calls.refusal import refuse_arguments, refuse_call, refuse_wrong_arguments
from ..calls.requests import find_plan, find_request, find_sequence, known_to_all, on_device
from ..kernels.packed import make_dense
from ..ranks.agreement import Terms, run_agreed
from ..ranks.rings import Group, Rings, check_device, make_rings
from ..ranks.sequence_parallel import WholeSequence
from ..sequence.layout import Stacked
from ..sequence.mask import Mask
from ..sequence.rows import Layouts, Masks, Rows
from ..transport import LANES
from . import kernels
from .plan import NAME, LightningPlan, PastStates, PlannedLightning
from .rates import Slopes, check_rates
from .segments import Edges, find_borders, plan_states

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
    "g": "write log_decay=g",
    "gk": "a head has one decay a token: write log_decay, (B, S_local, H)",
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
    slopes: Tensor | None = None,
    *,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    mask: Masks | WholeSequence | None = None,
    layout: Layouts = "zigzag",
    flash: str = "auto",
    process_group: Group | None = None,
    double_group: Sequence[Group | None] = (None, None),
) -> Tensor:
    """Compute lightning attention over a sequence that is cut over the ranks of a group.

    Each head has a state S (D, D), which is 0 before a document. For each of its tokens in turn

        S = e^(-slope) S + k v^T,   out = scale * S^T q

    This is the linear attention of MiniCPM-SALA (arXiv 2602.11761). With log_decay in place of
    -slope, each token chooses its decay, as in simple GLA and Mamba-2 (arXiv 2405.21060). Ranks
    send only states. States are neither taken nor returned: `bmt_burst.nn.LightningAttention`
    continues them in `bmt_burst.Chunks` and in a `bmt_burst.Cache`.

    Every rank of the group must call. [lightning.md](lightning.md) has an example.

    Args:
        q, k, v: (B, S_local, H, D) each, of this rank's tokens, in fp16, bf16, fp32 or fp64.
            Autocast casts them to its dtype, unless they are fp64.
        slopes: (H,) fp32 (or fp64 for fp64 inputs), finite and at least 0, identical on all ranks:
            constants, such as `alibi_slopes(H)`. A state fades by e^(-slope) a token. On q's device
            or the CPU. Pass the same tensor in each call: the host waits for the values of a new
            tensor of a GPU.
        log_decay: (B, S_local, H) fp32 (or fp64 for fp64 inputs), at most 0, on q's device, in
            place of slopes. The state before a token decays by e^log_decay, and -inf empties it. A
            positive value is refused on a CPU. On a GPU, where the host would have to wait for it,
            it counts as NaN, which shows in later tokens of its document.
        scale: positive factor of out, by default 1 / sqrt(D).
        mask: causal documents of the whole sequence, such as Mask.documents(cu_seqlens), or one
            such mask for each row of the batch. By default a row is one document. Or the result
            of `sp.sequence`, which has a layout and ranks.
        layout: the positions of each rank's tokens, as in burst_attn_func: "zigzag", "contiguous",
            "balanced", a `bmt_burst.Layout`, or one of these for each row of the batch. Each token
            costs the same, so all balance the work. "striped" is refused.
        flash: the kernel: "auto" for the fastest that can compute the call, "triton", which
            refuses log_decay, or "reference".
        process_group: the ranks that share the sequence, as in burst_attn_func.
        double_group: (intra, inter) groups of a double ring, instead of `process_group`.

    Returns:
        out (B, S_local, H, D), in the dtype of q or of autocast. It is differentiable once, in q,
        k, v and log_decay. Sums are fp32, or fp64 for fp64 inputs.

    Raises:
        ValueError, TypeError: on every rank, if arguments are wrong on any rank or differ between
            ranks, for a striped layout, a mask that is not of causal documents, k or v of another
            shape than q, or fewer tokens than ranks.
        RuntimeError: as `burst_attn_func`.
    """
    rings = make_rings(process_group, double_group)
    try:
        groups = process_group, double_group
        sequence, rings = find_sequence(rings, groups, mask, layout, causal=mask is None)
    except (TypeError, ValueError) as error:
        refuse_call(error, process_group, double_group, CALL, mask)
    return attend_lightning(
        rings, sequence, q, k, v, None, log_decay, slopes=slopes, scale=scale, flash=flash
    )


def attend_lightning(
    rings: Rings,
    sequence: WholeSequence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: PastStates | None = None,
    log_decay: Tensor | None = None,
    *,
    slopes: Tensor | Slopes,
    scale: float | None = None,
    flash: str = "auto",
    gate_logit_normalizer: float | None = None,
) -> Tensor:
    """Return out (B, S, H, D) of a call that all ranks of `rings` make.

    past  the states of the edges of a chunk, if `sequence` is one
    gate_logit_normalizer  the one by which a layer made log_decay. Ranks compare it

    Raises on every rank if arguments are wrong on any rank.
    """

    past = past or PastStates()

    def check() -> tuple[Terms, _Call]:
        given, options = [q, k, v], (scale, flash, gate_logit_normalizer, past.edges)
        check_once = functools.partial(_check_call, rings, sequence, given, *options)
        if not all(isinstance(x, Tensor) for x in given) or q.dim() != 4:
            check_once(())  # raises
        if isinstance(log_decay, Tensor):
            given.append(log_decay)
        check_transforms(NAME, *given)
        values = slopes if isinstance(slopes, tuple) else check_rates(slopes, log_decay, q)
        # calls are kept by everything that checks depend on
        key = values, type(scale), *options, is_recomputing()
        call = find_request(rings, sequence, key, given, functools.partial(check_once, values))
        return call.terms, call

    def run(call: _Call, lines: tuple[bytes, ...]) -> Tensor:
        plan = find_plan(rings, call.terms, lines, functools.partial(_make_plan, rings, call))
        tensors = (make_dense(x.flatten(0, 1)) for x in call.form.prepare(q, k, v))
        flat = log_decay if log_decay is None else log_decay.flatten(0, 1)
        compute: Callable[..., Tensor] = PlannedLightning.apply
        return compute(*tensors, flat, rings, plan, rings.history.calls, past).view(q.shape)

    with on_device(q), without_policies():
        return run_agreed(rings, CALL, check, run, counts=True)


class _Call(NamedTuple):
    """A call as one rank has checked it. `like` has the shape of q, and no memory."""

    terms: Terms
    form: Form
    slopes: Slopes
    scale: float
    rows: Rows
    kernel: str
    edges: Edges | None
    like: Tensor
    device: torch.device


def _check_call(
    rings: Rings,
    sequence: WholeSequence,
    given: Sequence[Tensor],
    scale: float | None,
    flash: str,
    gate_logit_normalizer: float | None,
    edges: Edges | None,
    slopes: Slopes,
) -> _Call:
    qkv = given[0], given[1], given[2]
    form = check_inputs(*qkv, None, is_packed=False)
    _check_shapes(*qkv)
    q, k, _ = form.prepare(*qkv)
    check_device(rings, q)
    if slopes is not None and len(slopes) != q.shape[2]:
        raise ValueError(f"expected {q.shape[2]} slopes, one for each head, got {len(slopes)}")
    scale = form.head_size**-0.5 if scale is None else as_positive("scale", scale)
    rows = sequence.find_rows(len(q), rings.size)
    if sequence.kv_layout is not None:
        raise ValueError(
            "lightning attention takes a token's query, key and value from one rank: expected a "
            f"sequence without kv_layout, got {sequence.kv_layout!r}"
        )
    if rows.mask is not None:
        find_borders(rows.mask)
    kernel = kernels.pick(flash, q, slopes is None)
    edges = edges and edges.expand(len(q))
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    terms = {
        **describe_inputs(form, q, k, None),
        "slopes": slopes or "none, as each token has a log_decay",
        "gate_logit_normalizer": gate_logit_normalizer,
        "scale": scale,
        **rows.terms,
        "documents of other chunks": edges and str(edges),
        "recording of gradients": recorded,
        "the kernel of flash": kernel,
        "kept states": is_recomputing(),
    }
    own = {"tokens": q.shape[1] * max(rows.stacked, 1)}
    like = torch.empty_like(q, device="meta")
    return _Call(Terms(CALL, terms, own), form, slopes, scale, rows, kernel, edges, like, q.device)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.shape[2] != q.shape[2]:
        raise ValueError(
            f"lightning attention needs k and v with as many heads as q, {q.shape[2]}, got "
            f"{k.shape[2]}: repeat their heads, as k.repeat_interleave(n, dim=2) does"
        )
    if k.shape[1] != q.shape[1]:
        raise ValueError(
            f"q, k and v must be of the same tokens, got {q.shape[1]} queries and {k.shape[1]} keys"
        )
    if v.shape[3] != q.shape[3]:
        raise ValueError(f"v must have q's head size, {q.shape[3]}, got {v.shape[3]}")


def _make_plan(rings: Rings, call: _Call, everyone: Sequence[dict[str, Any]]) -> LightningPlan:
    """Return this rank's plan, which follows from the own terms of all ranks."""
    with known_to_all():
        tokens = [theirs["tokens"] for theirs in everyone]
        mask, layout, _ = call.rows.place(tokens, tokens)
        batch, _, heads, size = call.like.shape
        if not call.rows.stacked and batch > 1:  # all rows are computed as one sequence
            mask, layout = Mask.stacked([mask] * batch), Stacked([layout] * batch)
        borders = find_borders(mask)
        states = plan_states(layout, borders, rings.rank, rings.inner.size, call.edges)
    # a state as it is sent, see TokenRates
    nbytes = heads * (size * size + (call.slopes is None))
    nbytes *= accumulator_dtype(call.like.dtype).itemsize
    # at once for all chunks, since all ranks stop whenever this memory grows
    most = states.total if call.edges else max(states.forward.most, states.backward.most)
    rings.reserve({**dict.fromkeys(LANES, 0), "visit": most * nbytes}, call.device)
    # other kernels need tokens
    kernel = call.kernel if len(states.segments.cuts) > 1 else "reference"
    return LightningPlan(states, kernels.load(kernel), call.slopes, call.scale)
