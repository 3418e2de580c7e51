"""The library's own kernel, in Triton.

It runs on any GPU that Triton compiles for, computes any tiles, in fp32 too, and knows biases or a
softcap.

One launch computes all tiles of a call. Each program reads from a list which tokens it has. The
programs with the most work are first in the list. The backward has one program for each block of
keys, which sums dk and dv, and one for each block of queries, which sums dq. Several programs add
to the same sum only for the gradient of a bias's table, and they add integers. Therefore results
are bit-identical between runs. A separate kernel computes the gradient of a bias by distance: its
programs follow diagonals, along which distances are equal.

`triton_shapes.json` has the block sizes, and the GPU and commit that they were measured with.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.compiled import multiply_by_16
from ..sequence.tile import KernelCall
from ..spec import Spec
from . import NOT_BOTH, Kernel, import_failure, installed, needs_capability
from .bias import CallBias, dscores_bound
from .packed import effective_band, prepare_once, send_to_device

_LOG2_E = math.log2(math.e)
_LARGEST_SUM = 2.0**61  # of 64-bit integers, with room for rounding


class LaunchShape(NamedTuple):
    """The block sizes of a launch: M queries and N keys, warps, and pipeline stages."""

    M: int
    N: int
    warps: int
    stages: int


_INTERPRETED = {
    "forward": LaunchShape(32, 16, 4, 1),
    "backward_kv": LaunchShape(16, 32, 4, 1),
    "backward_q": LaunchShape(32, 16, 4, 1),
    "backward_table": LaunchShape(32, 16, 4, 1),
}
_PADDING = 256  # distances beyond reach that a block may read: its queries and keys
_MOST_STEPS = 256  # blocks that one program computes along a diagonal
_MOST_KEYS = 2048  # keys of a program that computes only the gradient of a table


class TritonKernel(Kernel):
    """The Triton kernel. In Triton's interpreter tests may call it with tensors on the CPU."""

    name = "triton"
    takes_delta = True
    writes_new_memory = True
    runs_interpreted = True

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        if spec.biased and spec.softcap is not None:
            return NOT_BOTH
        if not installed("triton"):
            return "the package triton is not installed"
        if not q.is_cuda:
            return f"inputs are on {q.device}, not on a GPU"
        if torch.version.hip is None and torch.cuda.get_device_capability(q.device) < (8, 0):
            return needs_capability(q.device, (8, 0))
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"inputs are {q.dtype}, not fp16, bf16 or fp32"
        if q.shape[-1] not in range(8, 257, 8):
            return f"head size must be a multiple of 8 up to 256, got {q.shape[-1]}"
        return None

    def broken(self) -> str | None:
        return import_failure("triton", _kernel_module)

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(self, q, k, v, call, spec, bias=None):
        out, lse = _empty(q), torch.empty(_lse_shape(q), dtype=torch.float32, device=q.device)
        added = () if bias is None else _bias_arguments(bias)
        _launch(
            "forward", (*map(_make_dense, (q, k, v)), out, lse), call, spec, added, CAP=spec.softcap
        )
        return out, lse

    def backward(self, dout, q, k, v, out, lse, delta, call, spec, bias=None):
        inputs = _backward_inputs(dout, q, k, v, out, lse, delta)
        added = () if bias is None else _add_sums(_bias_arguments(bias), bias, *inputs[2:])
        dq, dk, dv = grads = tuple(_empty(x) for x in (q, k, v))
        _launch("backward_kv", (*inputs, dk, dv), call, spec, added, CAP=spec.softcap)
        _launch("backward_q", (*inputs, dq), call, spec, added, CAP=spec.softcap)
        if bias is None:
            return grads
        if bias.segments is None:
            _add_along_diagonals(inputs, call, spec, bias, added)
        return *grads, _gradient_of_sums(added, bias)


def table_gradient(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor,
    delta: Tensor | None,
    call: KernelCall,
    spec: Spec,
    bias: CallBias,
) -> Tensor:
    """Compute only dtable (R, H) of what `Kernel.backward` returns."""
    inputs = _backward_inputs(dout, q, k, v, out, lse, delta)
    added = _add_sums(_bias_arguments(bias), bias, *inputs[2:])
    if bias.segments is None:
        _add_along_diagonals(inputs, call, spec, bias, added)
    else:
        _launch("backward_q", (*inputs, None), call, spec, added, CAP=spec.softcap)
    return _gradient_of_sums(added, bias)


def _backward_inputs(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor,
    delta: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return what the backward's kernels read, in their order: q, k, v, dout, lse and delta."""
    q, k, v, dout, lse = map(_make_dense, (q, k, v, dout, lse))
    if delta is None:
        assert out is not None, "a backward needs out or delta"
        return q, k, v, dout, lse, _compute_delta(_make_dense(out), dout)
    return q, k, v, dout, lse, _make_dense(delta)


def _add_along_diagonals(
    inputs: tuple[Tensor, ...], call: KernelCall, spec: Spec, bias: CallBias, added: Any
) -> None:
    """Launch the kernel that adds to the gradient of a bias by distance.

    If the host does not know which sequences have even positions, launch it for both kinds.
    """
    for even in (True, False) if bias.apart is None else (True,):
        _launch("backward_table", inputs, call, spec, added, EVEN=even)


def _gradient_of_sums(added: Any, bias: CallBias) -> Tensor:
    """Return the gradient of the table (R, H) from the integer sums."""
    return (added.sums.double() / added.unit.unsqueeze(1)).T.to(bias.table.dtype)


def _launch(
    name: str,
    tensors: tuple[Tensor | None, ...],
    call: KernelCall,
    spec: Spec,
    bias: tuple,
    **constants: Any,
) -> None:
    """Launch the kernel `name`. The first two of `tensors` are q and k."""
    q, k = tensors[:2]
    assert q is not None
    assert k is not None
    width = max(16, 1 << (q.shape[-1] - 1).bit_length())
    mode = _mode(bias)
    shape = _shape(name, q, width, mode)
    by_keys = name == "backward_kv"
    if name == "backward_table":
        blocks = _list_walks(call, q.device, shape.M, shape.N)
    else:
        most = _MOST_KEYS if tensors[-1] is None else None
        blocks = _list_blocks(call, q.device, int(by_keys), shape.N if by_keys else shape.M, most)
    left, right = effective_band(call)
    grid = len(blocks), k.shape[2] if by_keys else q.shape[2], len(q)
    _kernel_module().KERNELS[name][grid](
        *tensors,
        *map(_kernel_strides, tensors),
        blocks,
        spec.scale,
        left or 0,
        right or 0,
        bias,
        GROUP=q.shape[2] // k.shape[2],
        D=q.shape[-1],
        WIDTH=width,
        M=shape.M,
        N=shape.N,
        LEFT=left is not None,
        RIGHT=right is not None,
        BIAS=mode,
        PRECISION=_precision(q),
        **constants,
        num_warps=shape.warps,
        num_stages=shape.stages,
        enable_fp_fusion=True,
    )


def _list_blocks(
    call: KernelCall, device: torch.device, side: int, size: int, most: int | None
) -> Tensor:
    """List the programs of a call, those with the most work first.

    Each has a block of `size` queries (side 0) or keys (side 1). If `most` is given and there is no
    band, several programs share a block, and each has at most `most` tokens of the other side.

    Return (programs, 5) int32: the block's first token, counted in its sequence; then start and
    length of the sequence on this side, and on the other side.
    """
    name = "triton", side, size, most
    return prepare_once(
        call, name, device, lambda: send_to_device(_blocks_on_host(call, side, size, most), device)
    )


def _blocks_on_host(call: KernelCall, side: int, size: int, most: int | None) -> Tensor:
    spans: list[tuple[int, ...]] = [(*pair[side], *pair[1 - side]) for pair in call.sequences()]
    if most is not None and call.left is None and call.right is None:
        spans = [
            (*own, start, min(start + most, stop))
            for *own, first, stop in spans
            for start in range(first, stop, most)
        ]
    own_at, own_end, other_at, other_end = (
        torch.tensor(spans, dtype=torch.int64).view(-1, 4).unbind(1)
    )
    own, other = own_end - own_at, other_end - other_at
    at, nth = _number_groups((own + size - 1) // size)
    first = nth * size
    # The tokens of the other side that the block sees are begin to end - 1.
    last, more = torch.minimum(first + size, own[at]) - 1, (other - own)[at]
    low, high = (call.left, call.right) if side == 0 else (call.right, call.left)
    begin = torch.zeros_like(first) if low is None else (first + more - low).clamp_min(0)
    end = other[at] if high is None else torch.minimum(other[at], last + more + high + 1)
    order = (end - begin).argsort(descending=True, stable=True)
    fields = first, own_at[at], own[at], other_at[at], other[at]
    return torch.stack([x[order] for x in fields], 1).to(torch.int32)


def _list_walks(call: KernelCall, device: torch.device, queries: int, keys: int) -> Tensor:
    """List the programs that follow diagonals, the longest first.

    Return (programs, 7) int32: the first query of the first block, counted in its sequence; the
    number of blocks; the first key of each block minus its first query; then start and number of
    the sequence's queries, and of its keys.
    """
    name = "triton walks", queries, keys
    return prepare_once(
        call, name, device, lambda: send_to_device(_walks_on_host(call, queries, keys), device)
    )


def _walks_on_host(call: KernelCall, queries: int, keys: int) -> Tensor:
    tiles = torch.tensor([(*q, *kv) for q, kv in call.tiles], dtype=torch.int64).view(-1, 4)
    q_at, q_end, kv_at, kv_end = tiles.unbind(1)
    q_count, kv_count = q_end - q_at, kv_end - kv_at
    # Query i sees keys i + lowest .. i + highest.
    lowest, highest = 1 - q_count, kv_count - 1
    if call.left is not None:
        lowest = torch.maximum(lowest, kv_count - q_count - call.left)
    if call.right is not None:
        highest = torch.minimum(highest, kv_count - q_count + call.right)
    at, nth = _number_groups(((highest - lowest + queries - 1) // keys + 1).clamp_min(0))
    ahead = lowest[at] + nth * keys
    # the blocks that have at least one query and one key
    first = ((-ahead - keys) // queries + 1).clamp_min(0)
    stop = (torch.minimum(q_count[at], kv_count[at] - ahead) + queries - 1) // queries
    part, nth = _number_groups(((stop - first + _MOST_STEPS - 1) // _MOST_STEPS).clamp_min(0))
    at, start = at[part], first[part] + nth * _MOST_STEPS
    steps = (stop[part] - start).clamp_max(_MOST_STEPS)
    fields = start * queries, steps, ahead[part], q_at[at], q_count[at], kv_at[at], kv_count[at]
    return torch.stack(fields, 1)[steps.argsort(descending=True, stable=True)].to(torch.int32)


def _number_groups(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Number the elements of groups: counts (2, 3) give (0, 0, 1, 1, 1) and (0, 1, 0, 1, 2)."""
    at = torch.arange(len(counts)).repeat_interleave(counts)
    return at, torch.arange(len(at)) - (counts.cumsum(0) - counts)[at]


def _mode(bias: Any) -> int:
    """Return the constant BIAS of the kernels."""
    kinds = _bias_module()
    if not bias:
        return kinds.NONE.value
    return (kinds.BY_DISTANCE if bias.pairs is None else kinds.BY_SEGMENTS).value


@functools.cache
def _shapes() -> dict[tuple[str, str, int], tuple[LaunchShape, ...]]:
    """Read triton_shapes.json: by table, kernel and padded head size, the fastest first."""
    text = Path(__file__).with_name("triton_shapes.json").read_text()
    return {
        (entry["table"], entry["kernel"], entry["head_size"]): tuple(
            LaunchShape(*shape) for shape in entry["shapes"]
        )
        for entry in json.loads(text)["tables"]
    }


def _shape(name: str, q: Tensor, width: int, mode: int) -> LaunchShape:
    """Return the fastest shape of a kernel that the GPU has shared memory for."""
    if not q.is_cuda:
        return _INTERPRETED[name]
    half = ("half", "half_by_distance", "half_by_segments")[mode]
    table = "single" if q.dtype == torch.float32 else half
    shapes = _shapes()[table, name, max(width, 64)]
    most, by_segments = _shared_memory(q.device), table == "half_by_segments"
    fitting = (s for s in shapes if _bytes(name, s, width * q.itemsize, by_segments) <= most)
    return next(fitting, shapes[-1])


def _bytes(name: str, shape: LaunchShape, row: int, by_segments: bool) -> int:
    """Return the bytes of shared memory of a kernel with rows of `row` bytes.

    This is what Triton 3.9 allocates on Hopper, plus 2 KiB.
    """
    own, other = (shape.N, shape.M) if name == "backward_kv" else (shape.M, shape.N)
    held = own if name == "forward" else 2 * own
    scores = (8 if name == "backward_q" else 4) * shape.M * shape.N if by_segments else 0
    if name == "backward_table":
        return 2 * (own + other) * shape.stages * row + 2048
    return (held + 2 * other * shape.stages) * row + scores + 2048


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have."""
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return driver.active.utils.get_device_properties(index)["max_shared_mem"]


def _precision(q: Tensor) -> str:
    """Return how fp32 is multiplied: three TF32 products are as exact as one, and are faster."""
    return "tf32x3" if q.is_cuda and torch.version.hip is None else "ieee"


def _compute_delta(out: Tensor, dout: Tensor) -> Tensor:
    """Compute rowsum(out * dout) (B, H, S)."""
    delta = torch.empty(_lse_shape(out), dtype=torch.float32, device=out.device)
    batch, tokens, heads, head_size = out.shape
    width = 1 << (head_size - 1).bit_length()
    size = 4096 // width
    tensors = delta, out, dout
    grid = -(-tokens // size), heads, batch
    _kernel_module().delta_of[grid](
        *tensors, *map(_kernel_strides, tensors), tokens, D=head_size, WIDTH=width, M=size
    )
    return delta


def _kernel_strides(x: Tensor | None) -> tuple[int, ...]:
    """Return the strides that a kernel takes. Those of lse and delta depend on the tokens."""
    if x is None:
        return ()
    return multiply_by_16(x.stride()) if x.dim() == 3 else x.stride()


def _bias_arguments(bias: CallBias) -> Any:
    """Return the bias as the kernels take it, without the sums of its gradient."""
    table, of, found = bias.prepared.get("triton", (None, None, None))
    if table is not bias.table or of is not bias.distances:
        found = _padded_biases(bias)
        bias.prepared["triton"] = bias.table, bias.distances, found
    distances, biases = found
    positions = map(_align, (bias.q_position, bias.kv_position))
    found = _bias_module().BiasArguments(
        *positions, distances, biases, len(bias.table), bias.reach + _PADDING
    )
    if bias.segments is None:
        return found
    numbers = {name: _align(x) for name, x in vars(bias.segments).items() if isinstance(x, Tensor)}
    return found._replace(**numbers, other=bias.segments.other)


def _padded_biases(bias: CallBias) -> tuple[Tensor, Tensor]:
    """Compute `BiasArguments.distances` and `BiasArguments.biases`."""
    ends = bias.distances[:1].expand(_PADDING), bias.distances[-1:].expand(_PADDING)
    distances = torch.cat([ends[0], bias.distances, ends[1]])
    table = (bias.table.float() * _LOG2_E).T
    return distances, torch.cat([table, table.index_select(1, distances)], 1)


def _align(x: Tensor) -> Tensor:
    """Return x in aligned memory. Triton would compile the kernel again for other addresses."""
    return x.clone() if x.data_ptr() % 16 else x


def _add_sums(
    added: Any, bias: CallBias, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor
) -> Any:
    """Return the arguments of a bias with zeroed sums, and with units in which none overflows.

    The host waits for no GPU. If the bound of a head's sums is not finite, its unit is NaN, and so
    is its gradient.
    """
    bound = dscores_bound(dout, v, lse, delta) if bias.bound is None else bias.bound
    unit = (_LARGEST_SUM / (lse.shape[0] * lse.shape[2]) / bound).clamp_max(2.0**126)
    sums = torch.zeros(len(added.biases), added.rows, dtype=torch.int64, device=v.device)
    return added._replace(sums=sums, unit=unit.where(unit > 0, torch.nan))


def _lse_shape(q: Tensor) -> tuple[int, int, int]:
    """Return the shape of q's lse."""
    return q.shape[0], q.shape[2], q.shape[1]


def _empty(x: Tensor) -> Tensor:
    """Return empty, contiguous memory in x's shape."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _make_dense(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def _kernel_module() -> ModuleType:
    """Import the kernels when they are first used. CPUs do not need Triton."""
    from . import triton_blocks

    return triton_blocks


@functools.cache
def _bias_module() -> ModuleType:
    """Import what the kernels add to scores."""
    from . import triton_bias

    return triton_bias
