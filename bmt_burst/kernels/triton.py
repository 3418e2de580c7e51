"""The library's own kernel, in Triton.

It runs on any GPU that Triton compiles for, for any tiles, also in fp32 and with a softcap.

One launch computes all tiles of a call. Each program reads from a list which tokens it has. The
programs with the most work are first in the list. The backward has one program for each block of
keys, which sums dk and dv, and one for each block of queries, which sums dq. No two programs add to
the same sum. Therefore results are bit-identical between runs.

`triton_shapes.json` has the block sizes, and the GPU and commit that they were measured with.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.compiled import multiply_by_16
from ..base.streams import send_to_device
from ..merging.merge import empty_lse, stack_lse_delta
from ..sequence.span import Span
from ..sequence.tile import KernelCall
from ..spec import Spec
from . import Kernel, import_failure, installed, refuses_head_size, refuses_tensors
from .packed import effective_band, make_dense, prepare_once


class LaunchShape(NamedTuple):
    """The block sizes of a launch: M queries, N keys, warps, stages, and bytes of shared memory."""

    M: int
    N: int
    warps: int
    stages: int
    shared: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The options of a launch, by the names that Triton has for them."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


class Added(NamedTuple):
    """The terms that an extension adds to scores.

    table     name of the table of block sizes for 16-bit inputs
    terms     the kernels' argument `terms`
    one_part  whether kernels mask all blocks, so that one loop over blocks is compiled
    """

    table: str
    terms: Any = ()
    one_part: bool = False


NOTHING = Added("half")


def refuses_triton(q: Tensor) -> str | None:
    """Return why Triton kernels cannot compute with tensors like q, of any head size, or None."""
    if not installed("triton"):
        return "the package triton is not installed"
    return refuses_tensors(q, (8, 0), takes_single=True)


class TritonKernel(Kernel):
    """The Triton kernel. In Triton's interpreter tests may call it with tensors on the CPU."""

    name = "triton"
    writes_new_memory = True

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        return refuses_triton(q) or refuses_head_size(q, 256)

    def broken(self) -> str | None:
        return import_failure("triton", load_kernels)

    def forward(self, q, k, v, call, spec, added=NOTHING):
        out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), empty_lse(q)
        launch(load_kernels().forward, (*map(make_dense, (q, k, v)), out, lse), call, spec, added)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, delta, call, spec):
        return self.gradients(backward_inputs(dout, q, k, v, out, lse, delta), call, spec)

    def gradients(self, inputs, call, spec, added=NOTHING):
        """Compute `backward` from `backward_inputs`, with what an extension adds to scores."""
        dense = torch.contiguous_format
        dq, dk, dv = (torch.empty_like(x, memory_format=dense) for x in inputs[:3])
        launch(load_kernels().backward_kv, (*inputs, dk, dv), call, spec, added)
        launch(load_kernels().backward_q, (*inputs, dq), call, spec, added)
        return dq, dk, dv


def backward_inputs(dout, q, k, v, out, lse, delta) -> tuple[Tensor, ...]:
    """Return q, k, v, dout, lse and delta for kernels, from the arguments of `Kernel.backward`."""
    q, k, v, dout, lse = map(make_dense, (q, k, v, dout, lse))
    if delta is None:
        delta = stack_lse_delta(out, dout, lse)[..., 1].transpose(1, 2)
    return q, k, v, dout, lse, make_dense(delta)


def launch(
    kernel: Any,
    tensors: Sequence[Any],
    call: KernelCall,
    spec: Spec,
    added: Added,
    programs: Tensor | None = None,
    **constants: Any,
) -> None:
    """Launch a kernel of `triton_blocks`, or another one that takes the same arguments.

    tensors    its tensors, q and k first
    programs   the list of its programs, by default one for each block
    constants  those that other kernels do not take
    """
    q, k = tensors[:2]
    by_keys = kernel.__name__ == "backward_kv"
    shape = shape_of(kernel.__name__, q, added.table)
    if programs is None:
        side, size = (1, shape.N) if by_keys else (0, shape.M)
        programs = prepare_once(
            call, ("triton", side, size), q.device,
            lambda: send_to_device(list_programs(call, call.sequences(), side, size), q.device),
        )  # fmt: skip
    left, right = effective_band(call)
    grid = len(programs), k.shape[2] if by_keys else q.shape[2], len(q)
    numbers = spec.scale, left or 0, right or 0
    constants |= {"GROUP": q.shape[2] // k.shape[2], "D": q.shape[-1], "WIDTH": padded_width(q)}
    constants |= {"M": shape.M, "N": shape.N, "LEFT": left is not None, "RIGHT": right is not None}
    constants |= {"PRECISION": precision(q), "CAP": spec.softcap}
    constants |= {"TERMS": bool(added.terms), "ONE_PART": added.one_part}
    strides = map(_kernel_strides, tensors)
    kernel[grid](*tensors, *strides, programs, *numbers, added.terms, **constants, **shape.options)


def padded_width(q: Tensor) -> int:
    """Return the power of two that the head size is padded to."""
    return max(16, 1 << (q.shape[-1] - 1).bit_length())


def list_programs(
    call: KernelCall, sequences: Iterable[tuple[Span, Span]], side: int, size: int
) -> Tensor:
    """List the programs of sequences with the band of a call, those with the most work first.

    Each has a block of `size` queries (side 0) or keys (side 1). Return (programs, 5) int32, as the
    kernels' `_block` reads them.
    """
    spans = [(*pair[side], *pair[1 - side]) for pair in sequences]
    table = torch.tensor(spans, dtype=torch.int64).view(-1, 4)
    own_at, own_end, other_at, other_end = table.unbind(1)
    own, other = own_end - own_at, other_end - other_at
    at, nth = number_groups((own + size - 1) // size)
    first = nth * size
    # The tokens of the other side that the block sees are begin to end - 1.
    last, more = torch.minimum(first + size, own[at]) - 1, (other - own)[at]
    low, high = (call.left, call.right) if side == 0 else (call.right, call.left)
    begin = torch.zeros_like(first) if low is None else (first + more - low).clamp_min(0)
    end = other[at] if high is None else torch.minimum(other[at], last + more + high + 1)
    order = (end - begin).argsort(descending=True, stable=True)
    fields = first, own_at[at], own[at], other_at[at], other[at]
    return torch.stack([x[order] for x in fields], 1).to(torch.int32)


def number_groups(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Number the elements of groups: counts (2, 3) give (0, 0, 1, 1, 1) and (0, 1, 0, 1, 2)."""
    at = torch.arange(len(counts)).repeat_interleave(counts)
    return at, torch.arange(len(at)) - (counts.cumsum(0) - counts)[at]


@functools.cache
def _read_shapes(table: str, kernel: str, head_size: int) -> list[LaunchShape]:
    """Read the shapes of a kernel from triton_shapes.json, the fastest first."""
    text = Path(__file__).with_name("triton_shapes.json").read_text()
    entry = json.loads(text)["tables"][f"{table} {kernel} {head_size}"]
    return [LaunchShape(*shape) for shape in entry["shapes"]]


def shape_of(name: str, q: Tensor, table: str) -> LaunchShape:
    """Return the fastest shape of a kernel that fits the GPU, from a table for 16-bit inputs."""
    if not q.is_cuda:  # in the interpreter
        return LaunchShape(16, 32, 4, 1) if name == "backward_kv" else LaunchShape(32, 16, 4, 1)
    table = "single" if q.dtype == torch.float32 else table
    shapes, most = _read_shapes(table, name, max(padded_width(q), 64)), shared_memory(q.device)
    return next((shape for shape in shapes if shape.shared <= most), shapes[-1])


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have."""
    from triton.runtime import driver

    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def precision(q: Tensor) -> str:
    """Return how fp32 is multiplied: three TF32 products are as exact as one, and are faster."""
    return "tf32x3" if q.is_cuda and torch.version.hip is None else "ieee"


def _kernel_strides(x: Tensor | None) -> tuple[int, ...]:
    """Return the strides that a kernel takes. Those of lse and delta depend on the tokens."""
    if x is None:
        return ()
    return multiply_by_16(x.stride()) if x.dim() == 3 else x.stride()


@functools.cache
def load_kernels() -> ModuleType:
    """Import the kernels when they are first used."""
    from . import triton_blocks

    return triton_blocks
