"""Calls that are made as flash-attn's functions are: their options, packed tensors, and lists of
numbers on a GPU.

Letters: B batch, S tokens of this rank, T the same of packed documents, H query heads, G kv heads,
D head size.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..attention import burst_attn_func
from ..base.arguments import as_bool, as_float, as_int, check_tensor
from ..base.compiled import not_compiled
from ..calls.checks import unpack_tensor
from ..calls.refusal import refuse_arguments, refuse_call
from ..ranks.rings import Group, Rings, make_rings
from ..sequence.layout import Layout
from ..sequence.mask import Mask, Slice

_MOST_MASKS = 64  # that are kept: layers repeat them

Bounds = tuple[int, ...]
# From the rings and q: where the documents of the whole sequence begin, and its length; how it lies
# on the ranks.
Placing = Callable[[Rings, Tensor], tuple[Bounds, str | Layout]]


@dataclass(frozen=True)
class Options:
    """What flash-attn's functions take beside tensors.

    dropout_p          0: there is no dropout
    softmax_scale      factor of the scores, by default 1 / sqrt(D)
    causal             whether a token sees only tokens at its own or earlier positions
    window_size        (left, right): how many tokens before and after itself one sees as well; -1:
                       all. A causal one sees none after itself, whatever `right` says
    alibi_slopes       None: there are no biases
    deterministic      results that are equal bit for bit between runs
    return_attn_probs  return (out, lse, None) instead of out
    group              the ranks that share the sequence, by default all
    softcap            a bound of the scores, as burst_attn_func's; 0: they have none
    """

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Sequence[int] = (-1, -1)
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    group: Group | None = None
    softcap: float = 0.0

    def band(self) -> tuple[int | None, int | None]:
        """Query i sees key j if low <= i - j < high, as Slice has them.

        Raises ValueError or TypeError for a window that is none and for what this library does not
        compute.
        """
        if as_float("dropout_p", self.dropout_p):
            raise ValueError(f"dropout is not supported: dropout_p must be 0, got {self.dropout_p}")
        if self.alibi_slopes is not None:
            raise ValueError(
                "alibi_slopes are not supported; see the scores and bias of bmt_burst.burst_attn_func"
            )
        if not isinstance(self.window_size, list | tuple) or len(self.window_size) != 2:
            raise TypeError(f"window_size must be (left, right), got {self.window_size!r}")
        left, right = (as_int("window_size", side) for side in self.window_size)
        if min(left, right) < -1:
            raise ValueError(
                f"window_size must have numbers of tokens, or -1 for all, got {(left, right)}"
            )
        low = 0 if as_bool("causal", self.causal) else None if right < 0 else -right
        return low, None if left < 0 else left + 1


def with_options(
    function: Callable[..., Any], names: Sequence[str], options: type[Options] = Options
) -> Callable[..., Any]:
    """`function`, whose last parameter is `options`, as one that takes those of `names` each on its
    own, in that order.

    What this made of a function before counts as the function.
    """
    function = inspect.unwrap(function)
    *own, _ = inspect.signature(function).parameters.values()
    known = inspect.signature(options).parameters
    signature = inspect.Signature([*own, *(known[name] for name in names)])

    @not_compiled
    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            bound = signature.bind(*args, **named).arguments
        except TypeError as error:
            if "group" not in names:  # a layer's
                raise
            refuse_arguments(error, signature, args, named)
        rest = {name: bound.pop(name) for name in names if name in bound}
        return function(**bound, options=options(**rest))

    call.__signature__ = signature
    return call


@not_compiled
def attention(
    tensors: Sequence[Tensor], options: Options, placing: Placing, strategy: str = "ring"
) -> Tensor | tuple[Tensor, Tensor, None]:
    """What `burst_attn_func` makes of (q, k, v), (q, kv) or (qkv,).

    Of a batch q (B, S, H, D), k, v (B, S, G, D), kv (B, S, 2, G, D), qkv (B, S, 3, H, D) come out
    (B, S, H, D) and lse (B, H, S); of packed documents q (T, H, D), k, v (T, G, D), kv (T, 2, G,
    D), qkv (T, 3, H, D) come out (T, H, D) and lse (H, T). The dtype of lse is fp32 (fp64 for fp64
    inputs), and no gradient flows through it.

    Raises on every rank if arguments are wrong on any: ValueError or TypeError, or what reading
    them raised there.
    """
    rings = make_rings(options.group, (None, None))
    try:
        q, k, v = _separate(tensors)
        is_packed = q.dim() == 3
        bounds, layout = placing(rings, q)
        mask = _banded(bounds, *options.band())
        softcap = as_float("softcap", options.softcap) or None
        with_lse = as_bool("return_attn_probs", options.return_attn_probs)
    except Exception as error:  # noqa: BLE001 - raised again once the other ranks know
        refuse_call(error, options.group, (None, None))
    out, lse = burst_attn_func(
        *((x.unsqueeze(0) for x in (q, k, v)) if is_packed else (q, k, v)),
        options.softmax_scale,
        deterministic=options.deterministic,
        process_group=options.group,
        mask=mask,
        layout=layout,
        strategy=strategy,
        return_lse=True,
        softcap=softcap,
    )
    out, lse = (out[0], lse[0]) if is_packed else (out, lse)
    return (out, lse, None) if with_lse else out


def tokens_of(q: Tensor, dims: int) -> int:
    """How many tokens q (..., S, H, D) has. Raises ValueError if it has another number of
    dimensions than `dims`.
    """
    if q.dim() != dims:
        expected = (
            "(batch, tokens, heads, head size)"
            if dims == 4
            else "packed, (tokens, heads, head size)"
        )
        raise ValueError(f"q must be {expected}, got shape {tuple(q.shape)}")
    return q.shape[-3]


def numbers(name: str, x: Any) -> Bounds:
    """The whole numbers of a tensor of one dimension or a sequence. Raises TypeError if it has
    none.

    Those of a tensor on a GPU are read when it is first seen, for which the host waits, and again
    once it is written.
    """
    if not isinstance(x, Tensor):
        if not isinstance(x, Sequence):
            raise TypeError(f"{name} must be a tensor of whole numbers, got {type(x).__name__}")
        return tuple(as_int(name, number) for number in x)
    if x.dim() != 1 or x.is_floating_point() or x.dtype == torch.bool:
        raise TypeError(
            f"{name} must be whole numbers of one dimension, got shape {tuple(x.shape)} and {x.dtype}"
        )
    return tuple(x.tolist()) if x.device.type == "cpu" or x.is_inference() else _remembered(x)


# of tensors: how often they had been written, and what
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _remembered(x: Tensor) -> Bounds:
    version, known = _read.get(x, (None, ()))
    if version != x._version:
        known = tuple(x.tolist())
        _read[x] = x._version, known
    return known


def _separate(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of what they are packed in."""
    for name, x in zip(
        {1: ("qkv",), 2: ("q", "kv"), 3: ("q", "k", "v")}[len(tensors)], tensors, strict=True
    ):
        check_tensor(name, x)
    if len(tensors) == 3:
        return tuple(tensors)
    return (
        unpack_tensor("qkv", tensors[0], 3)
        if len(tensors) == 1
        else (tensors[0], *unpack_tensor("kv", tensors[1], 2))
    )


@functools.lru_cache(maxsize=_MOST_MASKS)
def _banded(bounds: Bounds, low: int | None, high: int | None) -> Mask:
    return Mask(
        bounds[-1], tuple(Slice(span, span, low, high) for span in itertools.pairwise(bounds))
    )
