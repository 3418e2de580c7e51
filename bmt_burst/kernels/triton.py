"""A kernel of our own, in Triton: any GPU that Triton compiles for, any tiles, fp32 too, biases or
a softcap.

One launch does all tiles of a call: which tokens a program has is read from a list, in which those
with the most to do come first. The backward has a program for each block of keys, which adds up dk
and dv, and one for each of queries, for dq. So no sum is made by several programs but the gradient
of a bias's table, and that one in whole numbers: results are equal bit for bit between runs. Where
a bias goes by distance alone that gradient has a kernel of its own: its programs go along
diagonals, on which distances are equal.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.compiled import multiply_by_16
from ..sequence.tile import KernelCall
from ..spec import Spec
from . import NOT_BOTH, Kernel, import_failure, installed
from .bias import CallBias, dscores_bound
from .packed import effective_band, prepare_once, send_to_device

_LOG2_E = math.log2(math.e)
_LARGEST_SUM = 2.0**61  # of whole numbers of 64 bits, with room for what rounding adds


class LaunchShape(NamedTuple):
    """Queries and keys of a program's blocks, its warps, and how many blocks it has on their way
    from memory.
    """

    M: int
    N: int
    warps: int
    stages: int


# ShapeTable by kernel and padded head size, the fastest first: the first that a GPU has shared memory
# for is taken.
ShapeTable = dict[str, dict[int, tuple[LaunchShape, ...]]]
_HALF: ShapeTable = {
    "forward": {
        64: (LaunchShape(128, 128, 8, 3), LaunchShape(128, 64, 4, 3), LaunchShape(128, 64, 4, 2)),
        128: (
            LaunchShape(128, 128, 8, 3),
            LaunchShape(128, 64, 8, 2),
            LaunchShape(64, 64, 4, 2),
            LaunchShape(64, 32, 4, 2),
        ),
        256: (
            LaunchShape(128, 64, 8, 2),
            LaunchShape(64, 64, 8, 2),
            LaunchShape(64, 32, 4, 2),
            LaunchShape(32, 32, 4, 1),
        ),
    },
    "backward_kv": {
        64: (LaunchShape(64, 128, 8, 3), LaunchShape(64, 64, 4, 2)),
        128: (LaunchShape(32, 64, 4, 3), LaunchShape(32, 64, 4, 2)),
        256: (LaunchShape(32, 64, 8, 2), LaunchShape(16, 64, 8, 2), LaunchShape(16, 32, 4, 1)),
    },
    "backward_q": {
        64: (LaunchShape(128, 64, 8, 3), LaunchShape(64, 64, 4, 2)),
        128: (LaunchShape(128, 64, 8, 3), LaunchShape(128, 64, 8, 2), LaunchShape(64, 32, 4, 2)),
        256: (LaunchShape(64, 64, 8, 2), LaunchShape(64, 32, 8, 2), LaunchShape(32, 16, 4, 1)),
    },
}
_BY_DISTANCE: ShapeTable = {
    "forward": {
        64: (LaunchShape(128, 64, 8, 2), LaunchShape(64, 64, 4, 2)),
        128: (LaunchShape(128, 64, 8, 2), LaunchShape(64, 64, 4, 2), LaunchShape(64, 32, 4, 2)),
        256: (LaunchShape(64, 64, 8, 2), LaunchShape(64, 32, 8, 2), LaunchShape(32, 32, 4, 1)),
    },
    "backward_kv": {
        64: (LaunchShape(64, 64, 4, 2), LaunchShape(32, 64, 4, 2)),
        128: (LaunchShape(32, 64, 4, 3), LaunchShape(32, 64, 4, 2)),
        256: (LaunchShape(16, 64, 8, 2), LaunchShape(16, 32, 4, 1)),
    },
    "backward_q": {
        64: (LaunchShape(128, 64, 8, 2), LaunchShape(64, 32, 4, 2)),
        128: (LaunchShape(128, 64, 8, 2), LaunchShape(64, 32, 4, 2)),
        256: (LaunchShape(64, 32, 8, 2), LaunchShape(32, 16, 4, 1)),
    },
    "backward_table": {
        64: (LaunchShape(128, 64, 8, 3), LaunchShape(64, 32, 4, 2)),
        128: (LaunchShape(128, 64, 8, 2), LaunchShape(64, 32, 4, 2)),
        256: (LaunchShape(64, 32, 8, 2), LaunchShape(32, 16, 4, 1)),
    },
}
_BY_SEGMENTS: ShapeTable = {  # more registers for a pair
    "forward": {
        64: (LaunchShape(64, 64, 4, 2),),
        128: (LaunchShape(64, 64, 8, 2), LaunchShape(64, 32, 4, 2)),
        256: (LaunchShape(64, 32, 8, 2), LaunchShape(32, 32, 4, 1)),
    },
    "backward_kv": {
        64: (LaunchShape(64, 64, 8, 2), LaunchShape(32, 64, 4, 2)),
        128: (LaunchShape(32, 128, 8, 2), LaunchShape(32, 64, 4, 2)),
        256: (LaunchShape(16, 64, 8, 2), LaunchShape(16, 32, 4, 1)),
    },
    "backward_q": {
        64: (LaunchShape(64, 64, 8, 2), LaunchShape(64, 32, 4, 2)),
        128: (LaunchShape(128, 32, 8, 2), LaunchShape(64, 32, 4, 1)),
        256: (LaunchShape(64, 32, 8, 1), LaunchShape(32, 16, 4, 1)),
    },
}
_SINGLE: ShapeTable = {
    "forward": {
        64: (LaunchShape(64, 32, 4, 2),),
        128: (LaunchShape(64, 32, 4, 2), LaunchShape(32, 32, 4, 1)),
        256: (LaunchShape(32, 16, 4, 1),),
    },
    "backward_kv": {
        64: (LaunchShape(32, 64, 4, 2),),
        128: (LaunchShape(16, 32, 4, 2),),
        256: (LaunchShape(16, 16, 4, 1),),
    },
    "backward_q": {
        64: (LaunchShape(64, 32, 4, 2),),
        128: (LaunchShape(32, 16, 4, 2),),
        256: (LaunchShape(16, 16, 4, 1),),
    },
    "backward_table": {
        64: (LaunchShape(64, 32, 4, 1),),
        128: (LaunchShape(32, 16, 4, 1),),
        256: (LaunchShape(16, 16, 4, 1),),
    },
}
_INTERPRETED = {
    "forward": LaunchShape(32, 16, 4, 1),
    "backward_kv": LaunchShape(16, 32, 4, 1),
    "backward_q": LaunchShape(32, 16, 4, 1),
    "backward_table": LaunchShape(32, 16, 4, 1),
}
_PADDING = 256  # distances beyond reach that kernels have all the same: a block's queries and keys
_MOST_STEPS = 256  # blocks of a walk along a diagonal
_MOST_KEYS = 2048  # of a program that computes the gradient of a table alone


class TritonKernel(Kernel):
    """Of tensors on the CPU it can be asked directly where Triton's interpreter is on: that is for
    tests.
    """

    name = "triton"
    takes_delta = True
    writes_new_memory = True
    runs_interpreted = True

    def refuses(self, spec, q, k):
        if spec.biased and spec.softcap is not None:
            return NOT_BOTH
        if not installed("triton"):
            return "the package triton is not installed"
        if not q.is_cuda:
            return f"inputs are on {q.device}, not on a GPU"
        if torch.version.hip is None and torch.cuda.get_device_capability(q.device) < (8, 0):
            return f"{torch.cuda.get_device_name(q.device)} is older than compute capability (8, 0)"
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"inputs are {q.dtype}, not fp16, bf16 or fp32"
        if q.shape[-1] not in range(8, 257, 8):
            return f"head size {q.shape[-1]} is not one of {list(range(8, 257, 8))}"
        return None

    def broken(self):
        return import_failure("triton", _kernels)

    def partial_dtype(self, dtype):
        return dtype

    def forward(self, q, k, v, call, spec, bias=None):
        out, lse = _new(q), torch.empty(_rows(q), dtype=torch.float32, device=q.device)
        added = () if bias is None else _bias_arguments(bias)
        _launch("forward", (*map(_dense, (q, k, v)), out, lse), call, spec, added, CAP=spec.softcap)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, delta, call, spec, bias=None):
        inputs = _inputs(dout, q, k, v, out, lse, delta)
        added = () if bias is None else _with_sums(_bias_arguments(bias), bias, *inputs[2:])
        dq, dk, dv = grads = tuple(_new(x) for x in (q, k, v))
        _launch("backward_kv", (*inputs, dk, dv), call, spec, added, CAP=spec.softcap)
        _launch("backward_q", (*inputs, dq), call, spec, added, CAP=spec.softcap)
        if bias is None:
            return grads
        if bias.segments is None:
            _add_along_diagonals(inputs, call, spec, bias, added)
        return *grads, _summed(added, bias)


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
    """dtable (R, H) alone of what `Kernel.backward` returns."""
    inputs = _inputs(dout, q, k, v, out, lse, delta)
    added = _with_sums(_bias_arguments(bias), bias, *inputs[2:])
    if bias.segments is None:
        _add_along_diagonals(inputs, call, spec, bias, added)
    else:
        _launch("backward_q", (*inputs, None), call, spec, added, CAP=spec.softcap)
    return _summed(added, bias)


def _inputs(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor,
    delta: Tensor | None,
) -> tuple[Tensor, ...]:
    """What the backward's kernels read, in their order: q, k, v, dout, lse and delta."""
    q, k, v, dout, lse = map(_dense, (q, k, v, dout, lse))
    if delta is None:
        assert out is not None, "a backward has out or delta"
        return q, k, v, dout, lse, _delta(_dense(out), dout)
    return q, k, v, dout, lse, _dense(delta)


def _add_along_diagonals(
    inputs: tuple[Tensor, ...], call: KernelCall, spec: Spec, bias: CallBias, added: Any
) -> None:
    """Adds to the sums of a bias that goes by distance. Where it is not known what is even,
    programs find out.
    """
    for even in (True, False) if bias.apart is None else (True,):
        _launch("backward_table", inputs, call, spec, added, EVEN=even)


def _summed(added: Any, bias: CallBias) -> Tensor:
    """The gradient of the table that was added up."""
    return (added.sums.double() / added.unit.unsqueeze(1)).T.to(bias.table.dtype)


def _launch(
    name: str,
    tensors: tuple[Tensor | None, ...],
    call: KernelCall,
    spec: Spec,
    bias: tuple,
    **constants: Any,
) -> None:
    """One of the kernels, on tensors of which the first are q and k, with constants of its own."""
    q, k = tensors[:2]
    assert q is not None
    assert k is not None
    width = max(16, 1 << (q.shape[-1] - 1).bit_length())
    mode = _mode(bias)
    shape = _shape(name, q, width, mode)
    by_keys = name == "backward_kv"
    if name == "backward_table":
        blocks = _walks(call, q.device, shape.M, shape.N)
    else:
        most = _MOST_KEYS if tensors[-1] is None else None
        blocks = _blocks(call, q.device, int(by_keys), shape.N if by_keys else shape.M, most)
    left, right = effective_band(call)
    grid = len(blocks), k.shape[2] if by_keys else q.shape[2], len(q)
    getattr(_kernels(), name)[grid](
        *tensors,
        *map(_strides, tensors),
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


def _blocks(
    call: KernelCall, device: torch.device, side: int, size: int, most: int | None
) -> Tensor:
    """The programs of a call: blocks of `size` tokens of its queries (side 0) or keys (side 1), the
    longest work first.

    Several have a block, each with `most` tokens of the other side, if `most` is given and there is
    no band.

    (programs, 5) int32: the block's first token, counted in its sequence; where that sequence
    begins and how long it is, on this side and on the other.
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
    at, nth = _counted((own + size - 1) // size)
    first = nth * size
    # How many tokens of the other side the block's first and last see between them.
    last, more = torch.minimum(first + size, own[at]) - 1, (other - own)[at]
    low, high = (call.left, call.right) if side == 0 else (call.right, call.left)
    begin = torch.zeros_like(first) if low is None else (first + more - low).clamp_min(0)
    end = other[at] if high is None else torch.minimum(other[at], last + more + high + 1)
    order = (end - begin).argsort(descending=True, stable=True)
    fields = first, own_at[at], own[at], other_at[at], other[at]
    return torch.stack([x[order] for x in fields], 1).to(torch.int32)


def _walks(call: KernelCall, device: torch.device, queries: int, keys: int) -> Tensor:
    """The programs of a call's walks along diagonals, in blocks of so many queries and keys, the
    longest first.

    (programs, 7) int32: the first block's first query, counted in its sequence, the number of
    blocks, how far the first key of each block is ahead of its first query, and where queries and
    keys of the sequence begin and how many there are.
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
    at, nth = _counted(((highest - lowest + queries - 1) // keys + 1).clamp_min(0))
    ahead = lowest[at] + nth * keys
    # Blocks of which some query and some key is there.
    first = ((-ahead - keys) // queries + 1).clamp_min(0)
    stop = (torch.minimum(q_count[at], kv_count[at] - ahead) + queries - 1) // queries
    part, nth = _counted(((stop - first + _MOST_STEPS - 1) // _MOST_STEPS).clamp_min(0))
    at, start = at[part], first[part] + nth * _MOST_STEPS
    steps = (stop[part] - start).clamp_max(_MOST_STEPS)
    fields = start * queries, steps, ahead[part], q_at[at], q_count[at], kv_at[at], kv_count[at]
    return torch.stack(fields, 1)[steps.argsort(descending=True, stable=True)].to(torch.int32)


def _counted(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For counts (2, 3): (0, 0, 1, 1, 1) and (0, 1, 0, 1, 2)."""
    at = torch.arange(len(counts)).repeat_interleave(counts)
    return at, torch.arange(len(at)) - (counts.cumsum(0) - counts)[at]


def _mode(bias: Any) -> int:
    kinds = _biases()
    return (
        (kinds.BY_DISTANCE if bias.pairs is None else kinds.BY_SEGMENTS).value
        if bias
        else kinds.NONE.value
    )


def _shape(name: str, q: Tensor, width: int, mode: int) -> LaunchShape:
    if not q.is_cuda:
        return _INTERPRETED[name]
    table = _SINGLE if q.dtype == torch.float32 else (_HALF, _BY_DISTANCE, _BY_SEGMENTS)[mode]
    shapes = table[name][max(width, 64)]
    most = _shared_memory(q.device)
    by_segments = table is _BY_SEGMENTS
    return next(
        (s for s in shapes if _bytes(name, s, width * q.itemsize, by_segments) <= most), shapes[-1]
    )


def _bytes(name: str, shape: LaunchShape, row: int, by_segments: bool) -> int:
    """The shared memory of a kernel with rows of so many bytes, as Triton 3.9 takes it on Hopper,
    and 2 KiB more.
    """
    own, other = (shape.N, shape.M) if name == "backward_kv" else (shape.M, shape.N)
    held = own if name == "forward" else 2 * own
    scores = (8 if name == "backward_q" else 4) * shape.M * shape.N if by_segments else 0
    if name == "backward_table":
        return 2 * (own + other) * shape.stages * row + 2048
    return (held + 2 * other * shape.stages) * row + scores + 2048


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return driver.active.utils.get_device_properties(index)["max_shared_mem"]


def _precision(q: Tensor) -> str:
    """How products of fp32 are made: on NVIDIA's tensor cores three of TF32 are as exact as one."""
    return "tf32x3" if q.is_cuda and torch.version.hip is None else "ieee"


def _delta(out: Tensor, dout: Tensor) -> Tensor:
    """rowsum(out * dout) (B, H, S)."""
    delta = torch.empty(_rows(out), dtype=torch.float32, device=out.device)
    batch, tokens, heads, head_size = out.shape
    width = 1 << (head_size - 1).bit_length()
    size = 4096 // width
    tensors = delta, out, dout
    grid = -(-tokens // size), heads, batch
    _kernels().delta_of[grid](
        *tensors, *map(_strides, tensors), tokens, D=head_size, WIDTH=width, M=size
    )
    return delta


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """As the kernels take them: those of lse and delta follow from the number of tokens."""
    if x is None:
        return ()
    return multiply_by_16(x.stride()) if x.dim() == 3 else x.stride()


def _bias_arguments(bias: CallBias) -> Any:
    """The bias as the kernels take it, without what its gradient needs."""
    table, of, found = bias.prepared.get("triton", (None, None, None))
    if table is not bias.table or of is not bias.distances:
        found = _padded_biases(bias)
        bias.prepared["triton"] = bias.table, bias.distances, found
    distances, biases = found
    positions = map(_aligned, (bias.q_position, bias.kv_position))
    found = _biases().BiasArguments(
        *positions, distances, biases, len(bias.table), bias.reach + _PADDING
    )
    if bias.segments is None:
        return found
    numbers = {
        name: _aligned(x) for name, x in vars(bias.segments).items() if isinstance(x, Tensor)
    }
    return found._replace(**numbers, other=bias.segments.other)


def _padded_biases(bias: CallBias) -> tuple[Tensor, Tensor]:
    """`BiasArguments.distances` and `BiasArguments.biases`."""
    ends = bias.distances[:1].expand(_PADDING), bias.distances[-1:].expand(_PADDING)
    distances = torch.cat([ends[0], bias.distances, ends[1]])
    table = (bias.table.float() * _LOG2_E).T
    return distances, torch.cat([table, table.index_select(1, distances)], 1)


def _aligned(x: Tensor) -> Tensor:
    """x in memory that begins as all new memory does: Triton compiles anew for numbers that begin
    elsewhere.
    """
    return x.clone() if x.data_ptr() % 16 else x


def _with_sums(
    added: Any, bias: CallBias, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor
) -> Any:
    """With the sums of its gradient at 0, and their units, such that none overflows, made without
    the host waiting.

    A head's unit is NaN where the bound of its sums is not finite: so is its gradient then.
    """
    bound = dscores_bound(dout, v, lse, delta) if bias.bound is None else bias.bound
    unit = (_LARGEST_SUM / (lse.shape[0] * lse.shape[2]) / bound).clamp_max(2.0**126)
    sums = torch.zeros(len(added.biases), added.rows, dtype=torch.int64, device=v.device)
    return added._replace(sums=sums, unit=unit.where(unit > 0, torch.nan))


def _rows(q: Tensor) -> tuple[int, int, int]:
    return q.shape[0], q.shape[2], q.shape[1]


def _new(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _dense(x: Tensor) -> Tensor:
    """x with its last dimension in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def _kernels() -> ModuleType:
    """Imported when they are first used: Triton is nothing that a CPU needs."""
    from . import triton_blocks

    return triton_blocks


@functools.cache
def _biases() -> ModuleType:
    from . import triton_bias

    return triton_bias
