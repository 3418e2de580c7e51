"""Functions with the arguments of flash-attn: their options, packed tensors and cu_seqlens.

Letters: B batch, S tokens of this rank, T tokens of this rank in packed documents, H query heads,
G kv heads, D head size.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ParamSpec, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..attention import burst_attn_func
from ..base.arguments import as_bool, as_float, as_int, check_tensor
from ..base.compiled import not_compiled
from ..calls.inputs import unpack_tensor
from ..calls.refusal import ALIBI, bind_arguments, refuse_arguments, refuse_call
from ..ranks.rings import Group, Rings, make_rings
from ..sequence.layout import Layout
from ..sequence.mask import Mask, Slice

_MOST_MASKS = 64  # that are kept: layers repeat them

Parameters = ParamSpec("Parameters")
# The tensor out, or with return_attn_probs the tuple (out, lse, None). Any spares callers a check.
Result: TypeAlias = Tensor | Any
Bounds = tuple[int, ...]
# The bounds of the documents in the whole sequence (0, ..., length), and their layout on the ranks.
Placement = tuple[Bounds, str | Layout]


@dataclass(frozen=True)
class Options:
    """The arguments of flash-attn's functions beside tensors.

    dropout_p          must be 0: dropout is not supported
    softmax_scale      factor of the scores, by default 1 / sqrt(D)
    causal             each token sees only tokens at its own or earlier positions
    window_size        (left, right): each token sees this many tokens before and after itself. -1
                       means all. With `causal` it sees none after itself, whatever `right` is
    alibi_slopes       must be None: biases are not supported
    deterministic      results are equal bit for bit between runs
    return_attn_probs  return (out, lse, None) instead of out
    group              the ranks that share the sequence, by default all
    softcap            the bound of the scores, as in burst_attn_func. 0: no bound
    """

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Sequence[int]
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool
    group: Group | None
    softcap: float = 0.0

    def band(self) -> tuple[int | None, int | None]:
        """Return (low, high): query i sees key j if low <= i - j < high. None means no bound.

        Raises ValueError or TypeError for a wrong window and for options that are not supported.
        """
        if as_float("dropout_p", self.dropout_p):
            raise ValueError(
                f"expected dropout_p=0, since dropout is not supported, got {self.dropout_p}"
            )
        if self.alibi_slopes is not None:
            raise ValueError(f"expected alibi_slopes=None: {ALIBI}")
        if not isinstance(self.window_size, list | tuple) or len(self.window_size) != 2:
            raise TypeError(f"window_size must be (left, right), got {self.window_size!r}")
        left, right = (as_int("window_size", side) for side in self.window_size)
        if min(left, right) < -1:
            raise ValueError(
                f"window_size must have numbers of tokens, or -1 for all, got {(left, right)}"
            )
        low = 0 if as_bool("causal", self.causal) else None if right < 0 else -right
        return low, None if left < 0 else left + 1


@dataclass(frozen=True)
class Cut:
    """A way to cut tokens over ranks.

    text   a sentence about it, for users
    place  from the rings, q, causal and the function's own arguments to the placement of the tokens
    """

    text: str
    place: Callable[..., Placement]


def make_function(
    name: str,
    declared: Callable[Parameters, Result],
    cut: Cut,
) -> Callable[Parameters, Result]:
    """Return the attention function `name`, for tokens that are cut over the ranks by `cut`.

    declared  declares the parameters and begins the docstring; it is never called

    A call with wrong arguments raises on all ranks of its group.
    """
    signature = inspect.signature(declared)
    known = {field.name for field in fields(Options)}

    @functools.wraps(declared)
    def call(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
        try:
            bound = bind_arguments(name, signature, args, named)
        except TypeError as error:
            refuse_arguments(error, signature, args, named)
        bound.apply_defaults()
        given = bound.arguments
        tensors = [given.pop(x) for x in ("q", "k", "v", "kv", "qkv") if x in given]
        options = Options(**{x: given.pop(x) for x in known & given.keys()})
        return attention(tensors, options, functools.partial(cut.place, **given))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{declared.__doc__} {cut.text}"
    return not_compiled(call)


@not_compiled
def attention(
    tensors: Sequence[Tensor],
    options: Options,
    place: Callable[[Rings, Tensor, bool], Placement],
    strategy: str = "ring",
) -> Result:
    """Compute `burst_attn_func` of (q, k, v), (q, kv) or (qkv,).

    Batches have q (B, S, H, D), k and v (B, S, G, D), kv (B, S, 2, G, D), qkv (B, S, 3, H, D), out
    (B, S, H, D) and lse (B, H, S). Packed documents have q (T, H, D), k and v (T, G, D), kv (T, 2,
    G, D), qkv (T, 3, H, D), out (T, H, D) and lse (H, T). lse is fp32 (fp64 for fp64 inputs), and
    has a gradient, unlike flash-attn's.

    place  finds the placement of the tokens, from the rings, q and causal

    Raises on every rank if arguments are wrong on any rank: ValueError or TypeError, or the error
    of reading them there.
    """
    rings = make_rings(options.group, (None, None))
    try:
        q, k, v = _unpack(tensors)
        is_packed = q.dim() == 3
        bounds, layout = place(rings, q, options.causal)
        mask = _banded(bounds, *options.band())
        softcap = as_float("softcap", options.softcap) or None
        with_lse = as_bool("return_attn_probs", options.return_attn_probs)
    except Exception as error:  # noqa: BLE001 - raised again once the other ranks know
        refuse_call(error, options.group, (None, None))
    if is_packed:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    out, lse = burst_attn_func(
        q,
        k,
        v,
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


def count_tokens(q: Tensor, dims: int) -> int:
    """Return the number of tokens of q (..., S, H, D). Raises ValueError if q has not `dims`
    dimensions.
    """
    if q.dim() != dims:
        expected = (
            "(batch, tokens, heads, head size)"
            if dims == 4
            else "packed, (tokens, heads, head size)"
        )
        raise ValueError(f"q must be {expected}, got shape {tuple(q.shape)}")
    return q.shape[-3]


def read_numbers(name: str, x: Any) -> Bounds:
    """Return the whole numbers of a tensor of one dimension or a sequence. Raises TypeError for
    anything else.

    A tensor on a GPU is read when it is first seen, and again once it was written to. The host
    waits for that.
    """
    if not isinstance(x, Tensor):
        if not isinstance(x, Sequence):
            raise TypeError(f"{name} must be a tensor of whole numbers, got {type(x).__name__}")
        return tuple(as_int(name, number) for number in x)
    if x.dim() != 1 or x.is_floating_point() or x.dtype == torch.bool:
        raise TypeError(
            f"{name} must be whole numbers of one dimension, "
            f"got shape {tuple(x.shape)} and {x.dtype}"
        )
    return tuple(x.tolist()) if x.device.type == "cpu" or x.is_inference() else _read_cached(x)


# by tensor: its version when it was read, and its numbers
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _read_cached(x: Tensor) -> Bounds:
    version, known = _read.get(x, (None, ()))
    if version != x._version:
        known = tuple(x.tolist())
        _read[x] = x._version, known
    return known


def _unpack(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, as views if they are packed."""
    names = {1: ("qkv",), 2: ("q", "kv"), 3: ("q", "k", "v")}[len(tensors)]
    for name, x in zip(names, tensors, strict=True):
        check_tensor(name, x)
    if len(tensors) == 1:
        q, k, v = unpack_tensor("qkv", tensors[0], 3)
    elif len(tensors) == 2:
        q, (k, v) = tensors[0], unpack_tensor("kv", tensors[1], 2)
    else:
        q, k, v = tensors
    return q, k, v


@functools.lru_cache(maxsize=_MOST_MASKS)
def _banded(bounds: Bounds, low: int | None, high: int | None) -> Mask:
    return Mask(
        bounds[-1], tuple(Slice(span, span, low, high) for span in itertools.pairwise(bounds))
    )
