"""The functions of attention: burst_attn_func, its packed variants, and burst_attn_varlen_func.

Each takes its options one by one. `calls.softmax.attend` takes them as a kind and a sequence.
Results are annotated as `Tensor | Any`, so that typed callers may use them as a tensor, or with
return_lse as a pair.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack

from torch import Tensor

from .base.arguments import as_bool
from .base.compiled import not_compiled
from .calls.inputs import unpack_tensor
from .calls.refusal import (
    bind_arguments,
    find_second_cu_seqlens,
    refuse_arguments,
    refuse_call,
    refuse_wrong_arguments,
)
from .calls.requests import find_sequence
from .calls.softmax import SoftmaxAttention, attend
from .extensions import AllScores, find_extension
from .ranks.rings import Group, make_rings
from .ranks.sequence_parallel import WholeSequence
from .sequence.layout import Layout
from .sequence.mask import Mask, read_documents
from .sequence.rows import Layouts, Masks
from .strategies import GROUP_BYTES
from .strategies.extension import Extension

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_MOST_KINDS = 64  # kept

ALIBI = (
    "for documents of at most n tokens, call burst_attn_func with "
    "scores=Scores.by_distance(mask, torch.arange(1 - n, n).abs().int()) and "
    "bias=-torch.arange(n, device=slopes.device).unsqueeze(1) * slopes"
)
_MASK = "burst_attn_func takes a mask, such as Mask.documents(cu_seqlens, window=window)"
_VARLEN = "burst_attn_varlen_func takes packed documents, with cu_seqlens and cu_seqlens_k"
_BIAS = "a bias is a table, for the rows that scores name: see the docstring of burst_attn_func"
# arguments of other packages' functions, and what to write here
_INSTEAD = {
    **dict.fromkeys(("attn_mask", "attention_mask", "mask", "window"), _MASK),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_k", "cu_seqlens_q"), _VARLEN),
    **dict.fromkeys(("max_seqlen", "max_seqlen_k", "max_seqlen_q"), _VARLEN),
    **dict.fromkeys(("attn_bias", "bias", "scores"), _BIAS),
    "alibi_slopes": ALIBI,
    "dropout_p": "attention over ranks has no dropout, so leave it out",
    "enable_gqa": "k and v may have fewer heads without it",
    "group": "write process_group",
    "is_causal": "write causal",
    "return_attn_probs": "write return_lse",
    "scale": "write softmax_scale",
    "window_size": "flash-attn's (left, 0) is window=left + 1, of a Mask or burst_attn_varlen_func",
}

_refuse = functools.partial(refuse_arguments, instead=_INSTEAD)


class Keywords(TypedDict, total=False):
    """Options of the packed variants, for type checkers: burst_attn_func's."""

    softmax_scale: float | None
    flash: str
    causal: bool
    optimize_bwd_comm: bool
    deterministic: bool
    process_group: Group | None
    double_group: Sequence[Group | None]
    mask: Masks | WholeSequence | None
    layout: Layouts
    kv_layout: Layouts | None
    strategy: str
    backward: str
    return_lse: bool
    group_bytes: int
    scores: AllScores | None
    bias: Tensor | None
    softcap: float | None
    sinks: Tensor | None
    sparse: Extension | None
    choose_by: Sequence[Tensor] | None


@not_compiled
@functools.partial(refuse_wrong_arguments, refuse=_refuse)
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
    mask: Masks | WholeSequence | None = None,
    layout: Layouts = "zigzag",
    kv_layout: Layouts | None = None,
    strategy: str = "auto",
    backward: str = "auto",
    return_lse: bool = False,
    group_bytes: int = GROUP_BYTES,
    scores: AllScores | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sparse: Extension | None = None,
    choose_by: Sequence[Tensor] | None = None,
) -> Tensor | Any:
    """Compute exact attention over a sequence that is cut over the ranks of a group.

    Every rank of the group must call. [attention.md](attention.md) has examples, and links the
    pages on masks, layouts, strategies and biases.

    Args:
        q: (B, S_local, H, D) queries of this rank's tokens, in fp16, bf16, fp32 or fp64. Autocast
            casts q, k and v to its dtype, unless they are fp64.
        k: (B, T_local, G, D) keys, usually of the same tokens. H is a multiple of G, and query head
            h attends to kv head h // (H // G). Heads are never repeated.
        v: (B, T_local, G, D_v) values of the keys' tokens. If D_v is not D, the smaller one is
            padded with zeros, which are computed and sent. "fa4" computes 192:128 without them on
            Hopper, if G is H.
        softmax_scale: positive factor of the scores, by default 1 / sqrt(D).
        flash: the block kernel: "auto" for the fastest that can compute the call, or a name from
            `bmt_burst.kernels`. "cuda" is the best kernel of the flash-attn packages.
        causal: whether a token sees only tokens at its own or earlier positions of `layout`.
            Queries of another number than the keys are their last tokens, as in `Mask.causal`.
        optimize_bwd_comm: has no effect, and is here for calls written for BurstAttention's
            package: a backward that sends queries always sends delta = rowsum(out * dout), not out.
        deterministic: make results equal bit for bit between runs.
        process_group: the ranks that share the sequence: a torch.distributed ProcessGroup, a
            DeviceMesh of one dimension, a bmtrain NCCLCommunicator or a bmt_burst Transport. By
            default all ranks of BMTrain or torch.distributed, or this process without either.
            (`SequenceParallel()`, `Chunks` and `Cache` are by default this rank alone.)
        double_group: (intra, inter) groups of a double ring, instead of `process_group`. Each may
            be a pair of groups with the same ranks, and then the first one is used.
        mask: the visible pairs of the whole sequence, instead of `causal`: a `bmt_burst.Mask`, or
            one for each row of the batch. Without mask and causal all pairs are visible. The result
            of `SequenceParallel.sequence` has layouts and groups too, so pass none with it.
        layout: the positions of each rank's tokens: "zigzag", "striped", "contiguous", "balanced"
            for Layout.balanced of the mask, a `bmt_burst.Layout`, or one of these for each row of
            the batch. Rows must give a rank equally many tokens. Cut q, k and v by its `shard`.
        kv_layout: the layout of the keys and values, in the same forms, if they are other tokens
            than the queries or lie elsewhere; "balanced" is that of `mask.transposed`. A `layout`
            that is a `Layout` needs one if there are more or fewer keys than queries. Takes no bias
            and not the strategies "ulysses" and "usp", and `sparse` if the queries are the last
            tokens of their documents' keys.
        strategy: "ring", "all-gather", "one-call", "ulysses", "usp", or "auto", which is "one-call"
            for short calls on GPUs, and otherwise "ring". With "usp" the ranks of a double_group's
            `intra` share heads. "one-call" and "ulysses" take no double_group.
        backward: the side that a ring's backward sends: "kv" (keys and values), "q" (queries and
            the output's gradient) or "auto", which sends fewer bytes unless work would be uneven.
        return_lse: also return the logsumexp.
        group_bytes: most bytes of keys and values that a ring receives at once, and of partial
            results that wait to be merged, with any strategy. More means fewer kernel calls, less
            means less memory.
        scores: the visible pairs, instead of `mask`, and the row of `bias` that each pair adds: a
            `bmt_burst.Scores` of the whole sequence, or one for each row of the batch.
        bias: (R, H) fp32 (fp64 for fp64 inputs), the table of `scores`: a finite number for each
            row and query head, on q's device, identical on all ranks. Ranks compare only its shape.
            If the kernel of `flash` knows no biases, the fastest that does computes such pairs.
        softcap: a positive bound of the scores before they are masked,
            softcap * tanh(softmax_scale * q k^T / softcap), as in Gemma 2 and flash-attn. Some
            kernels have none, and no kernel has one together with a bias.
        sinks: (H,) fp32 (fp64 for fp64 inputs), on q's device, identical on all ranks: learned
            scores of a key that all queries see and that has no value, as in gpt-oss. Ranks compare
            only whether there are sinks.
        sparse: a `bmt_burst.InfLLMV2`: each query attends only to some blocks of its document,
            which the data chooses. It needs `causal` or a mask of causal documents, and takes no
            bias and no softcap. A call whose longest document has fewer than dense_len tokens is
            dense. No gradient flows through the choice.
        choose_by: for `sparse` with use_nope: queries (B, S_local, H, D) and keys (B, S_local, G,
            D) without rotary positions, by which blocks are chosen.

    Returns:
        out (B, S_local, H, D_v), in the dtype of q or of autocast. With return_lse also lse (B, H,
        S_local), fp32 (fp64 for fp64 inputs): the natural logarithm of the softmax denominators,
        with the sinks. A query that sees nothing has out 0, and lse -inf or its sink. In fp16, if
        out's gradient is far smaller than lse's, v's is off by up to 2e-4 of lse's.

    Both are differentiable once, in q, k, v, bias and sinks. Each rank's gradients of bias and
    sinks are shares, to be added up over the ranks as any parameter's. Inputs are never written to.

    Raises:
        ValueError, TypeError: on every rank, if arguments are wrong on any rank or differ between
            ranks, if the sequence has fewer tokens than ranks, if double_group is not a grid of
            ranks, or if a rank does something else in the call or its backward.
        RuntimeError: if a rank has ended or failed in the middle, for a backward with create_graph,
            inside transforms of torch.func, and in forward mode. Also if two threads of a process
            call in one group at once, which makes the group unusable.

    Ranks cannot agree about the group itself. If a group is invalid or this rank is not in it, only
    this rank raises. Ranks that wait for it raise TimeoutError after the group's timeout, or
    RuntimeError as soon as this process has ended. The same happens if ranks pass different groups.
    """
    out, lse = _attend(
        (q, k, v, sinks),
        (softmax_scale, flash, deterministic, strategy, backward, group_bytes, softcap),
        (scores, bias, sparse, choose_by),
        (mask, layout, kv_layout, causal),
        (process_group, double_group),
        (optimize_bwd_comm, return_lse),
    )
    return (out, lse) if return_lse else out


# typed, since an argument may equal another one of a wrong type, as 1 equals True
@functools.lru_cache(maxsize=_MOST_KINDS, typed=True)
def _find_kind(
    optimize_bwd_comm: bool, return_lse: bool, extension: Extension | None, *options: Any
) -> SoftmaxAttention:
    """Return the kind of a call. Raises TypeError or ValueError for a wrong option."""
    as_bool("optimize_bwd_comm", optimize_bwd_comm)
    as_bool("return_lse", return_lse)
    asked = (*options, None, extension)
    return SoftmaxAttention(*asked)


def _attend(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    options: tuple[Any, ...],
    extended: tuple[Any, Any, Any, Any],
    placed: tuple[Any, ...],
    groups: tuple[Group | None, Sequence[Group | None]],
    flags: tuple[bool, bool],
) -> tuple[Tensor, Tensor]:
    """Return out and lse.

    tensors   q, k, v and the sinks
    options   the first fields of `SoftmaxAttention`
    extended  the arguments of `find_extension`
    placed    those of `find_sequence`
    groups    process_group and double_group
    flags     optimize_bwd_comm and return_lse
    """
    rings = make_rings(*groups)
    try:
        sequence, rings = find_sequence(rings, groups, *placed)
        extension, inputs = find_extension(*extended)
        try:
            kind = _find_kind(*flags, extension, *options)
        except TypeError:  # no option is without a hash
            kind = _find_kind.__wrapped__(*flags, extension, *options)
    except Exception as error:  # noqa: BLE001 - raised again once the other ranks know
        refuse_call(error, *groups, mask=placed[0])
    q, k, v, sinks = tensors
    return attend(rings, sequence, kind, q, k, v, (sinks, *inputs))


def _takes_packed(
    name: str, count: int
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator for a function of tensors and burst_attn_func's options.

    Its argument `name` holds `count` tensors. The function gets a tuple of these in its place. A
    call that does not fit raises on all ranks, once.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        own = inspect.signature(function)
        *tensors, _options, _keywords = own.parameters.values()
        _q, _k, _v, *options = inspect.signature(burst_attn_func).parameters.values()
        signature = own.replace(parameters=[*tensors, *options])
        takes_tuple: Callable[..., Result] = function

        @not_compiled
        @functools.wraps(function)
        def call(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
            try:
                given = bind_arguments(function.__name__, signature, args, named).arguments
                given[name] = unpack_tensor(name, given[name], count)
            except (TypeError, ValueError) as error:
                _refuse(error, signature, args, named)
            return takes_tuple(**given)

        call.__dict__["__signature__"] = signature  # which help() shows
        return call

    return decorate


@_takes_packed("kv", 2)
def burst_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *options: Any, **keywords: Unpack[Keywords]
) -> Tensor | Any:
    """Compute `burst_attn_func` of q (B, S_local, H, D) and packed kv (B, T_local, 2, G, D).

    Nothing is copied. All other arguments, results and errors are burst_attn_func's.
    """
    return burst_attn_func(q, *kv, *options, **keywords)


@_takes_packed("qkv", 3)
def burst_attn_qkvpacked_func(
    qkv: Tensor, *options: Any, **keywords: Unpack[Keywords]
) -> Tensor | Any:
    """Compute `burst_attn_func` of packed qkv (B, S_local, 3, H, D).

    Nothing is copied. All other arguments, results and errors are burst_attn_func's.
    """
    return burst_attn_func(*qkv, *options, **keywords)


@not_compiled
@functools.partial(refuse_wrong_arguments, refuse=_refuse)
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
    kv_layout: str | Layout | None = None,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    return_lse: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sparse: Extension | None = None,
    choose_by: Sequence[Tensor] | None = None,
    optimize_bwd_comm: bool = True,
    deterministic: bool = False,
    strategy: str = "auto",
    backward: str = "auto",
    group_bytes: int = GROUP_BYTES,
) -> Tensor | Any:
    """Compute `burst_attn_func` of packed documents, with the tensors of flash-attn's varlen form.

    Args:
        q: (S_local, H, D) queries of this rank's tokens.
        k: (T_local, G, D) keys, by default of the same tokens.
        v: (T_local, G, D_v) values of the keys' tokens.
        cu_seqlens: (0, ..., S), the starts of the documents in the whole sequence, and its length:
            a sequence, or an integer tensor on the CPU, identical on every rank. Documents may be
            empty.
        causal: whether a token sees only tokens at its own or earlier positions of its document.
        window: tokens see only tokens less than `window` positions away.
        layout, kv_layout: as burst_attn_func's, for the packed sequence as a whole.
        cu_seqlens_k: (0, ..., T), the starts of the same documents in the keys, if these are other
            tokens. The queries of a document are the last tokens of its keys.

    All other arguments and errors are burst_attn_func's.

    Returns:
        out (S_local, H, D_v), and with return_lse also lse (H, S_local).
    """
    try:
        if second := find_second_cu_seqlens(softmax_scale):
            raise second
        if cu_seqlens_k is not None:  # errors have the name that the user typed
            read_documents(cu_seqlens, cu_seqlens_k, "cu_seqlens_k")
        mask = Mask.documents(cu_seqlens, causal, window, kv_cu_seqlens=cu_seqlens_k)
    except Exception as error:  # noqa: BLE001 - raised again once the other ranks know
        refuse_call(error, process_group, double_group)
    out, lse = _attend(
        (q, k, v, sinks),
        (softmax_scale, flash, deterministic, strategy, backward, group_bytes, softcap),
        (None, None, sparse, choose_by),
        (mask, layout, kv_layout, False, True),
        (process_group, double_group),
        (optimize_bwd_comm, return_lse),
    )
    return (out[0], lse[0]) if return_lse else out[0]
