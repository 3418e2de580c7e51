"""Attention with the arguments of flash-attn. `make_function` makes all functions from it.

Letters: B batch, S tokens of this rank, T packed tokens of this rank, H query heads, G kv heads,
D head size.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..attention import ALIBI, burst_attn_func
from ..base.arguments import as_bool, as_float, as_int, check_tensor
from ..base.compiled import not_compiled
from ..calls.refusal import bind_arguments, refuse_call
from ..ranks.rings import Group, make_rings
from ..sequence.layout import Layout
from ..sequence.mask import Mask, Slice, read_bounds

Bounds: TypeAlias = tuple[int, ...]
# Takes the rings, the number of this rank's tokens, `causal` and a function's own arguments.
# Returns the bounds of the documents in the whole sequence, (0, ..., length), and their layout.
Place: TypeAlias = Callable[..., tuple[Bounds, str | Layout]]


def make_function(
    name: str, tensors: Sequence[str], place: Place, documents: Sequence[str] = (), **fixed: Any
) -> Callable[..., Any]:
    """Return `attention` as the function `name`. Wrong arguments raise an error on all ranks.

    tensors    names of its first arguments
    documents  names of the next ones, which describe packed documents and are for `place`
    fixed      arguments of `attention` that the function does not take
    """
    fixed = {**fixed, "place": place, "is_packed": bool(documents)}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(x, kind) for x in (*tensors, *documents)]
    _tensors, *options = inspect.signature(attention).parameters.values()
    parameters += [x for x in options if x.kind == kind and x.name not in fixed]
    signature = inspect.Signature(parameters)

    def call(*args: Any, **named: Any) -> Any:
        try:
            given = bind_arguments(name, signature, args, named).arguments | fixed
        except TypeError as error:
            known = {**dict(zip(signature.parameters, args, strict=False)), **named, **fixed}
            told = TypeError(f"{error}; its arguments are {', '.join(signature.parameters)}")
            refuse_call(told, known.get("process_group", known.get("group")), (None, None))
        given["place"] = functools.partial(place, **{x: given.pop(x) for x in documents})
        return attention({x: given.pop(x) for x in tensors}, **given)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = attention.__doc__
    call.__dict__["__signature__"] = signature
    return not_compiled(call)


@not_compiled
def attention(
    tensors: Mapping[str, Tensor],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group | None = None,
    *,
    place: Place,
    is_packed: bool = False,
    strategy: str = "ring",
) -> Any:
    """Compute the attention of sequences that are cut over the ranks of `group`, by default all.

    A batch is q (B, S, H, D), k and v (B, S, G, D), or q and kv (B, S, 2, G, D), or qkv (B, S, 3,
    H, D). Packed documents have T instead of B and S. Returns out, like q, or with
    return_attn_probs (out, lse, None), where lse (B, H, S) or (H, T) has a gradient. Options have
    flash-attn's meaning, but dropout_p must be 0 and alibi_slopes None. Wrong arguments of a rank
    raise on all ranks.
    """
    rings = make_rings(group, (None, None))
    try:
        q, k, v = _unpack(tensors, is_packed)
        if as_float("dropout_p", dropout_p):
            raise ValueError(f"expected dropout_p=0: dropout is not supported, got {dropout_p}")
        if alibi_slopes is not None:
            raise ValueError(f"expected alibi_slopes=None: {ALIBI}")
        band = _find_band(as_bool("causal", causal), window_size)
        bounds, layout = place(rings, q.shape[-3], bool(causal))
        options: dict[str, Any] = {"mask": _make_mask(bounds, *band), "layout": layout}
        options |= {"strategy": strategy, "softcap": as_float("softcap", softcap) or None}
        with_lse = as_bool("return_attn_probs", return_attn_probs)
    except Exception as error:  # noqa: BLE001 - raised again once the other ranks know
        refuse_call(error, group, (None, None))
    if is_packed:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    options |= {"deterministic": deterministic, "process_group": group}
    out, lse = burst_attn_func(q, k, v, softmax_scale, return_lse=True, **options)
    if is_packed:
        out, lse = out[0], lse[0]
    return (out, lse, None) if with_lse else out


def _unpack(tensors: Mapping[str, Tensor], is_packed: bool) -> list[Tensor]:
    """Return q, k and v, as views if one tensor holds several."""
    found: list[Tensor] = []
    for name, x in tensors.items():
        check_tensor(name, x)
        count = {"kv": 2, "qkv": 3}.get(name)
        dims = ["tokens"] if is_packed else ["batch", "tokens"]
        dims += [f"{count}"] * bool(count) + ["heads", "head size"]
        if x.dim() != len(dims) or (count and x.shape[-3] != count):
            raise ValueError(f"{name} must be ({', '.join(dims)}), got shape {tuple(x.shape)}")
        found += x.unbind(-3) if count else [x]
    return found


def _find_band(causal: bool, window_size: Sequence[int]) -> tuple[int | None, int | None]:
    """Return (low, high): query i sees key j if low <= i - j < high. None means no bound."""
    if not isinstance(window_size, list | tuple) or len(window_size) != 2:
        raise TypeError(f"window_size must be (left, right), got {window_size!r}")
    left, right = (as_int("window_size", side) for side in window_size)
    if min(left, right) < -1:
        raise ValueError(f"window_size must be numbers of tokens, or -1, got {(left, right)}")
    low = 0 if causal else None if right < 0 else -right
    return low, None if left < 0 else left + 1


@functools.lru_cache(maxsize=64)  # layers repeat them
def _make_mask(bounds: Bounds, low: int | None, high: int | None) -> Mask:
    spans = itertools.pairwise(bounds)
    return Mask(bounds[-1], tuple(Slice(span, span, low, high) for span in spans))


# by tensor on a GPU: its version when it was read, and its numbers
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def read_cu_seqlens(name: str, cu_seqlens: Any) -> Bounds:
    """Return cu_seqlens without empty documents. The host waits for a tensor on a GPU that is new
    or was written to.
    """
    if not isinstance(cu_seqlens, Tensor):
        return tuple(read_bounds(name, cu_seqlens))
    if cu_seqlens.is_cpu or cu_seqlens.is_inference():  # tensors of inference have no version
        return tuple(read_bounds(name, cu_seqlens.cpu()))
    known = _read.get(cu_seqlens)
    if known is None or known[0] != cu_seqlens._version:
        known = _read[cu_seqlens] = cu_seqlens._version, tuple(read_bounds(name, cu_seqlens.cpu()))
    return known[1]
