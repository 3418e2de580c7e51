"""A `KernelCall` cut into calls of fewer queries, for kernels that count entries in 32 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..sequence.span import Span, length
from ..sequence.tile import KernelCall


@dataclass(frozen=True)
class Rows:
    """A call on the queries `q` and the keys `kv` of another call."""

    q: Span
    kv: Span
    call: KernelCall


def cut_rows(call: KernelCall, most: int) -> tuple[Rows, ...]:
    """Cut a call into calls of at most `most` queries. Each query is in exactly one of them.

    Keys that no query of a part sees may be missing from it.
    """
    name = "rows", most
    if name not in call.prepared:
        call.prepared[name] = tuple(_cut_call(call, most))
    return call.prepared[name]


def _cut_call(call: KernelCall, most: int) -> Iterator[Rows]:
    together: list[tuple[Span, Span]] = []  # tiles and gaps of the next part
    for q, kv in call.sequences():
        if together and q[1] - together[0][0][0] > most:
            yield _join(call, together)
            together = []
        if length(q) > most:
            yield from _cut_tile(call, q, kv, most)
        else:
            together.append((q, kv))
    if together:
        yield _join(call, together)


def _join(call: KernelCall, spans: list[tuple[Span, Span]]) -> Rows:
    """Return the part of consecutive tiles and gaps."""
    (q_first, kv_first), (q_last, kv_last) = spans[0], spans[-1]
    rows, keys = (q_first[0], q_last[1]), (kv_first[0], kv_last[1])
    tiles = tuple(
        ((q[0] - rows[0], q[1] - rows[0]), (kv[0] - keys[0], kv[1] - keys[0]))
        for q, kv in spans
        if length(q) and length(kv)
    )
    return Rows(rows, keys, KernelCall(length(rows), length(keys), tiles, call.left, call.right))


def _cut_tile(call: KernelCall, q: Span, kv: Span, most: int) -> Iterator[Rows]:
    """Cut one tile, or a gap, which has no keys."""
    for start in range(q[0], q[1], most):
        stop = min(start + most, q[1])
        # A band is counted from the last query and the last key. Dropping as many of both keeps it.
        below, right = q[1] - stop, call.right
        hidden = 0 if right is None else min(max(below - max(right, 0), 0), length(kv))
        shift = below - hidden
        keys, count = (kv[0], kv[1] - hidden), stop - start
        tiles = (((0, count), (0, length(keys))),) if length(keys) else ()
        band = (
            None if call.left is None else call.left + shift,
            None if right is None else right - shift,
        )
        yield Rows((start, stop), keys, KernelCall(count, length(keys), tiles, *band))
