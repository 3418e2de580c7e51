"""The Triton kernel of lightning attention, for GPUs. `reference.py` specifies it.

Segments are cut into pieces of up to 2,048 tokens. A state exists in memory only before each piece.

forward_states  sums up k v^T of each piece, then adds up the sums along the pieces of a segment
outputs         goes through each piece in chunks, with the state in registers

So a forward reads k and v twice, and q once. Gradients are the same computation with other
operands, which are called queries, keys and values:

dq  queries dout, keys v, values k, with the states of the forward transposed
dk  queries v, keys dout, values q, against time, with the gradients of states transposed
dv  queries k, keys q, values dout, against time, with the gradients of states

No two programs add to the same sum, so results are bit-identical between runs. Operands of products
are of the inputs' dtype, and sums are fp32.

`triton_blocks.py` has the programs. Letters: T tokens, H heads, D head size, N states.
"""

from __future__ import annotations

import functools
import itertools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.streams import send_to_device
from ..kernels import import_failure
from ..kernels.packed import prepare_once
from ..kernels.triton import LaunchShape, padded_width, precision, refuses_triton
from .rates import ConstantRates
from .reference import States
from .segments import Segments

_LONGEST = 2048  # tokens of a piece, fewer if a GPU would have too few programs
_SHORTEST = 256
_PROGRAMS = 512  # pieces of all heads that keep a GPU busy
_EVEN = 64  # pieces of a segment are of multiples of so many tokens, as chunks are
_CHAINED = 1024  # entries of a state, of a program that adds up states

_Row = tuple[int, ...]


# M tokens of a program's chunks, and N columns of its state.
# Two such programs fit on a multiprocessor of an H100, without spilling registers.
_HALF = {
    "sum_pieces": LaunchShape(64, 64, 4, 3),
    "attend": LaunchShape(64, 64, 4, 2),
    "attend_back": LaunchShape(64, 64, 4, 2),
}
_WIDE = dict.fromkeys(_HALF, LaunchShape(64, 32, 4, 2))  # for heads of more than 128
_SINGLE = {
    **dict.fromkeys(_HALF, LaunchShape(16, 32, 4, 1)),
    "sum_pieces": LaunchShape(32, 32, 4, 2),
}
_INTERPRETED = dict.fromkeys(_HALF, LaunchShape(16, 16, 4, 1))


class Pieces(NamedTuple):
    """The pieces of all segments in one direction, in tables of int32 on a device.

    pieces  (pieces, 5): see `triton_blocks._walk`
    spans   (slots, 2): of each piece whose sum is needed, its first token and its tokens
    chains  (chains, 2): first slot and end of the segments with several slots
    last    (N,): the slots of states that other runs need
    """

    pieces: Tensor
    spans: Tensor
    chains: Tensor
    last: Tensor


def refuses(q: Tensor, tokens_choose: bool) -> str | None:
    """Return why the kernel cannot compute with tensors like q (..., D), or None if it can."""
    if tokens_choose:
        return "it computes slopes, and no log_decay"
    if reason := refuses_triton(q):
        return reason
    most = 128 if q.dtype == torch.float32 else 256
    if q.shape[-1] not in range(16, most + 1, 16):
        return f"head size must be a multiple of 16 up to {most} for {q.dtype}, got {q.shape[-1]}"
    return import_failure("triton", _load_programs)


def forward_states(
    k: Tensor, v: Tensor, rates: ConstantRates, segments: Segments, against: bool = False
) -> States:
    """Return the states after `segments.leaves` and, in `chunks` (slots, H, D, D) fp32, those that
    pieces begin with. `against` time, chunks lack the factor `scale`.
    """
    _, heads, size = k.shape
    pieces = _prepare(segments, k, against)
    slots, chains = len(pieces.spans), len(pieces.chains)
    states = k.new_empty(slots, heads, size, size, dtype=torch.float32)
    if slots:
        inputs = k, v, k.stride(), v.stride(), rates.slopes, pieces.spans, states
        _launch("sum_pieces", slots, inputs, AGAINST=int(against))
    if chains:
        programs = chains * heads * -(-size * size // _CHAINED)
        tables = rates.slopes, pieces.spans, pieces.chains
        constants = {"SIZE": size * size, "BLOCK": _CHAINED, "enable_fp_fusion": True}
        _load_programs().chain_states[programs,](*tables, states, heads, **constants)
    return States(states.index_select(0, pieces.last), states)


def outputs(
    q: Tensor, k: Tensor, v: Tensor, rates: ConstantRates, scale: float,
    segments: Segments, states: States, initial: Tensor, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """Return out (T, H, D). The segments `segments.opens` begin with `initial`.

    transposed  whether states have the entries of v first
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    pieces = _prepare(segments, q, against=False).pieces
    strides = [x.stride() for x in (q, k, v, out)]
    inputs = q, k, v, out, *strides, rates.slopes, pieces, states.chunks, initial, scale
    _launch("attend", len(pieces), inputs, TRANSPOSED=transposed)
    return out


def backward_states(
    q: Tensor, dout: Tensor, rates: ConstantRates, scale: float, segments: Segments
) -> States:
    """Return the gradients of the states after pieces, and before `segments.opens`."""
    states = forward_states(q, dout, rates, segments, against=True)
    return states._replace(last=states.last * scale)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rates: ConstantRates, scale: float,
    segments: Segments, initial: Tensor, gradient_states: States, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv (T, H, D). States after `segments.leaves` have gradients `dfinal`."""
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    strides = [x.stride() for x in (q, k, v, dout, dk)]
    pieces = _prepare(segments, q, against=True).pieces
    states = gradient_states.chunks, dfinal / scale
    inputs = q, k, v, dout, dk, dv, *strides, rates.slopes, pieces, *states, scale
    _launch("attend_back", 2 * len(pieces), inputs)
    before = forward_states(k, v, rates, segments)
    dq = outputs(dout, v, k, rates, scale, segments, before, initial, transposed=True)
    return dq, dk, dv


def _launch(name: str, pieces: int, inputs: tuple[Any, ...], **constants: Any) -> None:
    """Launch a program for each piece, head and block of columns. The first input is (T, H, D)."""
    _, heads, size = inputs[0].shape
    shape, width = _find_shape(name, inputs[0]), padded_width(inputs[0])
    columns = min(shape.N, width)
    kernel = getattr(_load_programs(), name)
    kernel[pieces * heads * -(-size // columns),](
        *inputs,
        heads,
        N=shape.M,
        D=size,
        WIDTH=width,
        COLUMNS=columns,
        PRECISION=precision(inputs[0]),
        **constants,
        **shape.options,
    )


def _find_shape(name: str, x: Tensor) -> LaunchShape:
    """Return the shape of a kernel's programs for inputs like x (T, H, D)."""
    if not x.is_cuda:
        return _INTERPRETED[name]
    if x.dtype == torch.float32:
        return _SINGLE[name]
    return (_HALF if x.shape[-1] <= 128 else _WIDE)[name]


def longest_piece(tokens: int, heads: int) -> int:
    """Return the most tokens of a piece, where this rank has so many tokens and heads."""
    longest = _LONGEST
    while longest > _SHORTEST and tokens * heads < longest * _PROGRAMS:
        longest //= 2
    return longest


def _prepare(segments: Segments, x: Tensor, against: bool) -> Pieces:
    """Return the pieces of segments, on the device of x (T, H, D)."""
    tokens, heads, _ = x.shape
    longest = longest_piece(tokens, heads)
    name = "pieces", longest, against
    return prepare_once(
        segments, name, x.device, lambda: _cut(segments, longest, against, x.device)
    )


def _cut(segments: Segments, longest: int, against: bool, device: torch.device) -> Pieces:
    """Cut segments into pieces of at most `longest` tokens."""
    begins, leaves = segments.opens, segments.leaves
    if against:
        begins, leaves = leaves, begins
    edges = {segment: edge for edge, segment in enumerate(begins)}
    leaving = set(leaves)
    pieces, spans, chains, last = list[_Row](), list[_Row](), list[_Row](), list[int]()
    for number, (first, end) in enumerate(itertools.pairwise(segments.cuts)):
        begin, done, edge = len(spans), 0, edges.get(number, -1)
        for count in _split(end - first, longest):
            start = end - 1 - done if against else first + done
            slot = len(spans) - 1 if done else -1
            pieces.append((start, count, slot, edge, done))
            done += count
            if done < end - first or number in leaving:
                spans.append((start, count))
        if number in leaving:
            last.append(len(spans) - 1)
        if len(spans) - begin > 1:
            chains.append((begin, len(spans)))
    pieces.sort(key=lambda piece: -piece[1])  # the most work first

    def send(rows: list[Any], columns: int) -> Tensor:
        return send_to_device(torch.tensor(rows, dtype=torch.int32).view(-1, columns), device)

    return Pieces(send(pieces, 5), send(spans, 2), send(chains, 2), send(last, 1).view(-1))


def _split(tokens: int, longest: int) -> list[int]:
    """Split a number of tokens evenly."""
    step, pieces = min(_EVEN, longest), -(-tokens // longest)
    size = -(-tokens // (pieces * step)) * step
    return [min(size, tokens - done) for done in range(0, tokens, size)]


@functools.cache
def _load_programs() -> ModuleType:
    """Import the programs when they are first used. CPUs do not need Triton."""
    from . import triton_blocks

    return triton_blocks
