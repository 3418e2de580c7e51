"""The library's own Triton kernel with a bias.

Several programs add to one sum of the gradient of the table, and they add integers. So results are
bit-identical between runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...kernels.packed import prepare_once, send_to_device
from ...kernels.triton import (
    Added,
    TritonKernel,
    backward_inputs,
    launch,
    list_programs,
    load_kernels,
    number_groups,
    shape_of,
)
from ...sequence.tile import KernelCall
from ...spec import Spec
from ..call_bias import CallBias
from . import TableKernel

_LOG2_E = math.log2(math.e)
_LARGEST_SUM = 2.0**61  # of 64-bit integers, with room for rounding
_PADDING = 256  # distances beyond reach that a block may read: its queries and keys
_MOST_STEPS = 256  # blocks that one program computes along a diagonal
_KERNEL = TritonKernel()
_MOST_KEYS = 2048  # keys of a program that computes only the gradient of a table


class TritonTableKernel(TableKernel):
    """The Triton kernel with a bias."""

    name = "triton"
    writes_new_memory = True

    def forward(self, q, k, v, call, spec, bias):
        return _KERNEL.forward(q, k, v, call, spec, _make_added(bias))

    def backward(self, dout, q, k, v, out, lse, delta, call, spec, bias):
        inputs = backward_inputs(dout, q, k, v, out, lse, delta)
        added = _add_sums(_make_added(bias), inputs)
        grads = _KERNEL.gradients(inputs, call, spec, added)
        if bias.segments is None:
            _add_along_diagonals(inputs, call, spec, added)
        return *grads, _gradient_of_sums(added, bias)


def table_gradient(dout, q, k, v, out, lse, delta, call, spec, bias) -> Tensor:
    """Compute only dtable (R, H) of what `TableKernel.backward` returns."""
    inputs = backward_inputs(dout, q, k, v, out, lse, delta)
    added = _add_sums(_make_added(bias), inputs)
    if bias.segments is None:
        _add_along_diagonals(inputs, call, spec, added)
    else:
        shape = shape_of("backward_q", inputs[0], added.table)
        programs = _list_parts(call, inputs[0].device, shape.M)
        launch(load_kernels().backward_q, (*inputs, None), call, spec, added, programs)
    return _gradient_of_sums(added, bias)


def _add_along_diagonals(
    inputs: tuple[Tensor, ...], call: KernelCall, spec: Spec, added: Added
) -> None:
    """Launch the kernel that adds to the gradient of a bias by distance."""
    from .triton_terms import backward_table

    shape = shape_of("backward_table", inputs[0], added.table)
    walks = _list_walks(call, inputs[0].device, shape.M, shape.N)
    launch(backward_table, inputs, call, spec, added, walks)


def _gradient_of_sums(added: Added, bias: CallBias) -> Tensor:
    """Return the gradient of the table (R, H) from the integer sums."""
    sums, unit = added.terms.sums, added.terms.unit
    return (sums.double() / unit.unsqueeze(1)).T.to(bias.table.dtype)


def _list_parts(call: KernelCall, device: torch.device, size: int) -> Tensor:
    """List programs of `size` queries each. Without a band, several share the keys of a block."""

    def make() -> Tensor:
        sequences = call.sequences()
        if call.left is None and call.right is None:
            sequences = tuple(
                (q, (start, min(start + _MOST_KEYS, kv[1])))
                for q, kv in sequences
                for start in range(*kv, _MOST_KEYS)
            )
        return send_to_device(list_programs(call, sequences, 0, size), device)

    return prepare_once(call, ("triton parts", size), device, make)


def _list_walks(call: KernelCall, device: torch.device, queries: int, keys: int) -> Tensor:
    """List the programs that follow diagonals, the longest first.

    Return (programs, 7) int32: the first query of the first block, counted in its sequence; the
    number of blocks; the first key of each block minus its first query; then start and number of
    the sequence's queries, and of its keys.
    """

    def make() -> Tensor:
        tiles = torch.tensor([(*q, *kv) for q, kv in call.tiles], dtype=torch.int64).view(-1, 4)
        q_at, q_end, kv_at, kv_end = tiles.unbind(1)
        q_count, kv_count = q_end - q_at, kv_end - kv_at
        # Query i sees keys i + lowest .. i + highest.
        lowest, highest = 1 - q_count, kv_count - 1
        if call.left is not None:
            lowest = torch.maximum(lowest, kv_count - q_count - call.left)
        if call.right is not None:
            highest = torch.minimum(highest, kv_count - q_count + call.right)
        at, nth = number_groups(((highest - lowest + queries - 1) // keys + 1).clamp_min(0))
        ahead = lowest[at] + nth * keys
        # the blocks that have at least one query and one key
        first = ((-ahead - keys) // queries + 1).clamp_min(0)
        stop = (torch.minimum(q_count[at], kv_count[at] - ahead) + queries - 1) // queries
        part, nth = number_groups(((stop - first + _MOST_STEPS - 1) // _MOST_STEPS).clamp_min(0))
        at, start = at[part], first[part] + nth * _MOST_STEPS
        steps = (stop[part] - start).clamp_max(_MOST_STEPS)
        fields = start * queries, steps, ahead[part], q_at[at], q_count[at], kv_at[at], kv_count[at]
        walks = torch.stack(fields, 1)[steps.argsort(descending=True, stable=True)].to(torch.int32)
        return send_to_device(walks, device)

    return prepare_once(call, ("triton walks", queries, keys), device, make)


def _make_added(bias: CallBias) -> Added:
    """Return the bias as the kernels take it, without the sums of its gradient."""
    from . import triton_terms  # CPUs do not need Triton

    if "triton" not in bias.prepared:  # `BiasArguments.distances` and `biases`
        ends = bias.distances[:1].expand(_PADDING), bias.distances[-1:].expand(_PADDING)
        distances = torch.cat([ends[0], bias.distances, ends[1]])
        table = (bias.table.float() * _LOG2_E).T
        biases = torch.cat([table, table.index_select(1, distances)], 1)
        bias.prepared["triton"] = distances, biases
    distances, biases = bias.prepared["triton"]
    positions = map(_align, (bias.q_position, bias.kv_position))
    rows, reach = len(bias.table), bias.reach + _PADDING
    arguments: Any = triton_terms.BiasArguments  # whose types are those inside of a kernel
    terms = arguments(*positions, distances, biases, rows, reach)
    if bias.segments is None:
        return Added("half_by_distance", terms)
    numbers = {name: _align(x) for name, x in vars(bias.segments).items() if isinstance(x, Tensor)}
    terms = terms._replace(**numbers, other=bias.segments.other)
    return Added("half_by_segments", terms, one_part=True)


def _align(x: Tensor) -> Tensor:
    """Return x in aligned memory. Triton would compile the kernel again for other addresses."""
    return x.clone() if x.data_ptr() % 16 else x


def _add_sums(added: Added, inputs: tuple[Tensor, ...]) -> Added:
    """Return the terms of a bias with zeroed sums, and with units in which none overflows. They are
    NaN for a head whose bound is not finite.
    """
    terms, (_, _, v, dout, lse, delta) = added.terms, inputs
    bound = _bound_dscores(dout, v, lse, delta)
    unit = (_LARGEST_SUM / (lse.shape[0] * lse.shape[2]) / bound).clamp_max(2.0**126)
    sums = torch.zeros(len(terms.biases), terms.rows, dtype=torch.int64, device=v.device)
    return added._replace(terms=terms._replace(sums=sums, unit=unit.where(unit > 0, torch.nan)))


def _bound_dscores(dout: Tensor, v: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Bound the sum of |dS| of any query: (H,) in lse's dtype, not finite if an input or score is
    not.

    A query's probabilities sum to 1 at most, so its |dS| sum to max |dP - delta| at most, and |dP|
    = |dout . v| is at most the product of the norms.
    """
    dout_norm, v_norm = (
        torch.linalg.vector_norm(x, dim=3, dtype=lse.dtype).amax((0, 1)) for x in (dout, v)
    )
    v_norm = v_norm.repeat_interleave(len(dout_norm) // len(v_norm))
    return dout_norm * v_norm + delta.abs().amax((0, 2)) + lse.amax((0, 2)).clamp_min(0.0) * 0.0
