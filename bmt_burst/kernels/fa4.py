"""FlashAttention-4: the `flash-attn-4` package (CuTe DSL), for Hopper and Blackwell.

A process compiles a kernel, in seconds, when it first uses a combination of dtype, head size, mask,
packing, softcap and kind of bias. The package keeps kernels on disk if the environment variable
FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is 1.

The source of 4.0.0b36 for Hopper shows:

- A sequence without keys gets an out of 0 and an lse of -inf. One without queries gets a dk and dv
  of 0.
- The backward treats an lse of -inf as 0 and relies on the mask.
- Forward and backward skip the same pairs of blocks, also where a band hides all of a block.
  Therefore the backward in a fixed order waits for no block that is never computed.
- A softcap bounds scores before they are masked. P (dP - delta) is multiplied by its derivative,
  for dense and for packed tensors. tanh is the GPU's instruction, accurate to 11 bits.

Short calls without a bias go to the compiled kernels directly, if `fa4_bound` knows them. Otherwise
they go through the package's Python functions.

On Hopper a bias is a function of scores. The gradient of its table is computed by our own Triton
kernel.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..base.dtypes import accumulator_dtype
from ..sequence.span import length
from ..sequence.tile import KernelCall
from ..spec import Spec
from . import NOT_BOTH, Kernel, fa4_bound, import_failure, installed, refuses_half
from .bias import CallBias, Segments
from .fa4_programs import Options
from .packed import (
    effective_band,
    pack,
    pack_rows,
    prepare_once,
    send_to_device,
    sequences,
    unpack,
    unpack_rows,
)
from .rows import Rows, cut_rows
from .triton import table_gradient

# 4.0.0b36 silently computes wrong gradients for other sizes, 80 among them. They are padded to the
# next of these. On Blackwell it lacks 192, and for 256 the gradient of lse, through which delta is
# passed.
_HEAD_SIZES = (64, 96, 128)
_HEAD_SIZES_HOPPER = (*_HEAD_SIZES, 192, 256)

# Head sizes of q and of v that its kernels for Hopper compute without padding, faster than with it.
# Its backward asserts equal sizes if k has fewer heads than q. 96 and 64 are computed too, but that
# gains nothing at 8K tokens (docs/results-time.md).
_VALUE_SIZES_HOPPER = ((192, 128),)

# The package adds up offsets in 32 bits: its issue 2611 is about a backward that silently computed
# wrong gradients. So calls on larger q are cut, and larger k refused.
_MOST_ENTRIES = 1 << 30
_MOST_KEY_ENTRIES = (1 << 31) - 1

# The package compiles separate kernels for sequences of one block. It is told that short sequences
# may be this long, which costs nothing. So lengths that vary from step to step need no new kernel.
_LONGEST_AT_LEAST = 1024


class Fa4Kernel(Kernel):
    """FlashAttention-4's functions, dense or of variable length."""

    name = "fa4"
    takes_delta = True
    writes_new_memory = True

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        if not installed("flash_attn.cute"):
            return "the package flash-attn-4 is not installed"
        if k.numel() > _MOST_KEY_ENTRIES:
            return f"it adds up offsets in 32 bits, and k has {k.numel()} entries"
        generation = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 0
        if spec.deterministic and generation == 12:
            return "its backward is not deterministic on GPUs of compute capability 12"
        if spec.biased and (reason := _refuses_biases(spec, q, k, generation)):
            return reason
        largest = (_HEAD_SIZES_HOPPER if generation == 9 else _HEAD_SIZES)[-1]
        plain = replace(spec, biased=False)
        reason = refuses_half(plain, q, (9, 0), range(8, largest + 1, 8), caps=generation == 9)
        if (
            reason is None
            and spec.biased
            and not self.broken()
            and not all(map(_takes_scalars, _functions()))
        ):
            return "this version of flash-attn-4 lacks aux_scalars, which a bias needs: update it"
        return reason

    def broken(self) -> str | None:
        return import_failure("flash-attn-4", _functions)

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def cuts(self, q: Tensor, bias: CallBias | None) -> bool:
        """Return whether a call is computed in parts."""
        return bias is None and q.numel() > _MOST_ENTRIES

    def forward(self, q, k, v, call, spec, bias=None):
        if self.cuts(q, bias):
            return self.forward_in_parts(q, k, v, call, spec)
        function, head_size = _functions()[0], q.shape[-1]
        options = _options(call, q, bias is not None)
        batch, (q, k, v) = len(q), _padded(q, k, v)
        [v] = _values(spec, q, k, bias, v)
        if options.packed:
            q, k, v = pack(q), pack(k), pack(v)
        if bias is None:
            out, lse = fa4_bound.forward(function, q, k, v, options, spec)
        else:
            added = _bias_options(bias, call, batch)
            scores = {"softmax_scale": spec.scale, "return_lse": True, **added}
            out, lse, *_ = function(q, k, v, **scores, **options.arguments())
        if options.packed:
            out, lse = unpack(out, batch), unpack_rows(lse, batch)
        return _fit_heads(out, head_size), lse

    def backward(self, dout, q, k, v, out, lse, delta, call, spec, bias=None):
        if self.cuts(q, bias):
            return self.backward_in_parts(dout, q, k, v, out, lse, delta, call, spec)
        table = (
            ()
            if bias is None
            else (table_gradient(dout, q, k, v, out, lse, delta, call, spec, bias),)
        )
        function, head_size = _functions()[1], q.shape[-1]
        options = _options(call, q, bias is not None)
        batch, (dout, q, k, v, out) = len(q), _padded(dout, q, k, v, out)
        dlse = None
        if out is None:
            # The kernel computes with rowsum(out * dout) - dlse, where dlse is the gradient of lse.
            out, dlse = _zeros(call, q), -delta
        dout, v, out = _values(spec, q, k, bias, dout, v, out)
        if options.packed:
            dout, q, k, v, out = pack(dout), pack(q), pack(k), pack(v), pack(out)
            lse, dlse = pack_rows(lse), None if dlse is None else pack_rows(dlse).contiguous()
        inputs = q, k, v, out, dout, lse.contiguous()
        if bias is None:
            grads = fa4_bound.backward(function, inputs, dlse, options, spec)
        else:
            scores = {"softmax_scale": spec.scale, "deterministic": spec.deterministic}
            scores |= _bias_options(bias, call, batch)
            scores |= {"score_mod_bwd": _scores().gradient_of_sum}
            scores |= {} if dlse is None else {"dlse": dlse}
            grads = function(*inputs, **scores, **options.arguments())[:3]
        if options.packed:
            grads = (unpack(grad, batch) for grad in grads)
        return *(_fit_heads(grad, head_size) for grad in grads), *table

    def forward_in_parts(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: Spec
    ) -> tuple[Tensor, Tensor]:
        """Compute `forward`, some queries at a time."""
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        shape, wide = (q.shape[0], q.shape[2], q.shape[1]), accumulator_dtype(q.dtype)
        lse = torch.full(shape, -torch.inf, dtype=wide, device=q.device)
        for part in _cut_call(q, call):
            rows, keys = slice(*part.q), slice(*part.kv)
            mine, seen, values = _take(rows, q), _take(keys, k), _take(keys, v)
            out[:, rows], lse[:, :, rows] = self.forward(mine, seen, values, part.call, spec)
        return out, lse

    def backward_in_parts(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        lse: Tensor,
        delta: Tensor | None,
        call: KernelCall,
        spec: Spec,
    ) -> tuple[Tensor, ...]:
        """Compute `backward`, some queries at a time. dk and dv are added up in fp32."""
        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
        sums = [
            torch.zeros(x.shape, dtype=accumulator_dtype(x.dtype), device=x.device) for x in (k, v)
        ]
        for part in _cut_call(q, call):
            rows, keys = slice(*part.q), slice(*part.kv)
            dq[:, rows], *of_keys = self.backward(
                _take(rows, dout),
                _take(rows, q),
                _take(keys, k),
                _take(keys, v),
                None if out is None else _take(rows, out),
                lse[:, :, rows].contiguous(),
                None if delta is None else delta[:, :, rows].contiguous(),
                part.call,
                spec,
            )
            for total, grad in zip(sums, of_keys, strict=True):
                total[:, keys] += grad
        return dq, *(total.to(k.dtype) for total in sums)


def _cut_call(q: Tensor, call: KernelCall) -> tuple[Rows, ...]:
    """Cut a call on q into parts of at most _MOST_ENTRIES that have keys."""
    most = max(_MOST_ENTRIES // (len(q) * q.shape[2] * q.shape[3]), 1)
    return tuple(part for part in cut_rows(call, most) if part.call.tiles)


def _take(tokens: slice, x: Tensor) -> Tensor:
    """Return tokens of x (B, S, ...), without the strides of all tokens."""
    return x[:, tokens].contiguous()


def _padded(*tensors: Any) -> tuple[Any, ...]:
    """Pad head sizes with zeros to one that the package computes correctly. None stays None."""
    head_size = tensors[0].shape[-1]
    if head_size in _HEAD_SIZES_HOPPER:
        return tensors
    missing = next(size for size in _HEAD_SIZES_HOPPER if size >= head_size) - head_size
    return tuple(None if x is None else functional.pad(x, (0, missing)) for x in tensors)


def _values(
    spec: Spec, q: Tensor, k: Tensor, bias: CallBias | None, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Return tensors with v's head size without zero columns, if the package computes with that."""
    size = spec.value_size
    if size is None or bias is not None or q.shape[-2] != k.shape[-2]:
        return tensors
    if (q.shape[-1], size) not in _VALUE_SIZES_HOPPER:
        return tensors
    if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] != 9:
        return tensors
    return tuple(x[..., :size] for x in tensors)


def _fit_heads(x: Tensor, head_size: int) -> Tensor:
    """Return x with `head_size` columns: without those of `_padded`, with those that `_values`
    left out.
    """
    missing = head_size - x.shape[-1]
    return functional.pad(x, (0, missing)) if missing > 0 else x[..., :head_size] if missing else x


def _refuses_biases(spec: Spec, q: Tensor, k: Tensor, generation: int) -> str | None:
    """Return why the package cannot add a bias to these inputs, or None if it can."""
    if spec.softcap is not None:
        return NOT_BOTH
    if generation != 9:
        return "it supports a bias only on GPUs of compute capability 9"
    if spec.deterministic:
        return "its backward with a bias is not deterministic"
    if q.shape[2] != k.shape[2]:
        return (
            "with a bias it needs as many kv heads as query heads, "
            f"got {k.shape[2]} and {q.shape[2]}"
        )
    if q.shape[-1] > _HEAD_SIZES[-1]:
        return f"with a bias it supports head sizes up to {_HEAD_SIZES[-1]}, got {q.shape[-1]}"
    return (
        None if installed("triton") else "the gradient of a bias's table needs the package triton"
    )


def _bias_options(bias: CallBias, call: KernelCall, batch: int) -> dict[str, Any]:
    """Return the options for the function of scores, which `fa4_scores` defines.

    It gets addresses of tensors. The bias and the call keep these tensors alive.
    """
    table, distances, biases = bias.prepared.get("fa4", (None, None, None))
    if table is not bias.table or distances is not bias.distances:
        biases = torch.cat((bias.table[bias.distances], bias.table)).float().T.contiguous()
        bias.prepared["fa4"] = bias.table, bias.distances, biases
    device, width = biases.device, biases.shape[1]
    if bias.apart is not None and bias.segments is None:
        name = "distances", batch, bias.reach, bias.apart
        places = prepare_once(
            call, name, device, lambda: send_to_device(_distances(bias, call, batch), device)
        )
        return {
            "score_mod": _scores().add_by_distance,
            "aux_scalars": _scores().scalars(biases, width, places),
        }
    places = prepare_once(
        call, ("ends", batch), device, lambda: send_to_device(_ends(call, batch), device)
    )
    of = bias.segments or prepare_once(
        call, ("one segment",), device, lambda: _one_segment(call, device)
    )
    pairs = of.pairs if len(of.pairs) else bias.distances  # if no groups are equal
    numbers = biases, width, places, bias.reach, of.other, len(pairs) - 1
    tensors = (
        of.q_group,
        of.q_base,
        bias.q_position,
        of.kv_group,
        of.kv_segment,
        bias.kv_position,
        pairs,
    )
    return {
        "score_mod": _scores().add_by_segments,
        "aux_scalars": _scores().scalars(*numbers, *tensors),
    }


def _distances(bias: CallBias, call: KernelCall, batch: int) -> Tensor:
    """Compute `places` of `fa4_scores.add_by_distance`. Values between tiles are arbitrary."""
    assert bias.apart is not None, "only calls whose tokens are neighbours need distances"
    apart = iter(bias.apart)
    first = [next(apart) if length(q) and length(kv) else 0 for q, kv in call.sequences()]
    return torch.tensor(
        [(x + bias.reach, 2 * bias.reach) for x in first] * batch, dtype=torch.int32
    )


def _ends(call: KernelCall, batch: int) -> Tensor:
    """Compute `places` of `fa4_scores.add_by_segments`."""
    spans = call.sequences() * batch
    return torch.tensor([(q[0], q[1] - 1, kv[0], kv[1] - 1) for q, kv in spans], dtype=torch.int32)


def _one_segment(call: KernelCall, device: torch.device) -> Segments:
    """Return the segments of a call whose pairs all go by distance."""
    queries, keys = (
        torch.zeros(count, dtype=torch.int32, device=device)
        for count in (call.q_tokens, call.kv_tokens)
    )
    return Segments(queries, queries, keys, keys, torch.full_like(queries[:1], -1), 0)


def _options(call: KernelCall, q: Tensor, packed: bool) -> Options:
    """Return how a call is passed to the package, with dense tokens if that is possible and not
    `packed`.
    """
    if not packed and _is_dense(call):  # no tables, so a CUDA graph may capture it
        return _dense_options(call)
    return prepare_once(
        call,
        ("fa4", len(q), packed),
        q.device,
        lambda: _make_options(call, len(q), q.device),
    )


def _is_dense(call: KernelCall) -> bool:
    return call.tiles == (((0, call.q_tokens), (0, call.kv_tokens)),)


def _dense_options(call: KernelCall) -> Options:
    found: Options | None = call.prepared.get("fa4 dense")
    if found is None:
        left, right = effective_band(call)
        found = call.prepared["fa4 dense"] = Options(left is None and right == 0, left, right)
    return found


def _make_options(call: KernelCall, batch: int, device: torch.device) -> Options:
    left, right = effective_band(call)
    causal = left is None and right == 0
    of = sequences(call, batch, device)
    longest = max(of.longest, _LONGEST_AT_LEAST)
    return Options(causal, left, right, of.cu_seqlens_q, of.cu_seqlens_k, longest)


def _zeros(call: KernelCall, q: Tensor) -> Tensor:
    """Return an out of 0, of the shape and dtype of q."""
    size, dtype, device = q.shape[-1], q.dtype, q.device
    name = "fa4 zeros", size, dtype
    row = prepare_once(call, name, device, lambda: torch.zeros(size, dtype=dtype, device=device))
    return row.expand(q.shape)


@functools.cache
def _takes_scalars(function: Callable) -> bool:
    """Return whether it passes numbers to a function of scores, as 4.0.0b36 does."""
    return "aux_scalars" in inspect.signature(function).parameters


@functools.cache
def _scores() -> ModuleType:
    """Import the functions of scores."""
    from . import fa4_scores

    return fa4_scores


@functools.cache
def _functions() -> tuple[Callable, Callable]:
    """Import the package's forward and backward."""
    from flash_attn.cute import interface

    # Otherwise every process warns about an unused argument for every kernel that it compiles.
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning, module="cutlass")
    return interface._flash_attn_fwd, interface._flash_attn_bwd
