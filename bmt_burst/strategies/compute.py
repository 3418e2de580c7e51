"""What strategies compute: kernel calls on parts of a query side and of a key side.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import Kernel
from ..merge import Gradients, Part, tokens_at
from ..span import Span, length
from ..spec import Spec
from ..tiling import Cut


@dataclass(frozen=True)
class Queries:
    """The query side: q (B, S, H, D), in a backward also dout, out (B, S, H, D), lse, delta (B, H, S).

    In a backward out or delta is None.
    """

    q: Tensor
    dout: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    delta: Tensor | None = None

    def part(self, tokens: Span, heads: slice = slice(None)) -> Queries:
        """Some of the tokens and heads, views."""
        wide = (None if x is None else x[:, slice(*tokens), heads] for x in (self.q, self.dout, self.out))
        rows = (None if x is None else x[:, heads, slice(*tokens)] for x in (self.lse, self.delta))
        return Queries(*wide, *rows)

    def at(self, spans: Sequence[Span]) -> Queries:
        """The tokens of rising spans, one after the other: a view if it is one span."""
        parts = [self.part(span) for span in spans]
        return parts[0] if len(parts) == 1 else Queries(*(_joined(parts, name) for name in _FIELDS))


_FIELDS = {"q": 1, "dout": 1, "out": 1, "lse": 2, "delta": 2}  # and their dimension of tokens


@dataclass(frozen=True)
class Keys:
    """The key side: k and v (B, S, G, D)."""

    k: Tensor
    v: Tensor

    def part(self, tokens: Span, heads: slice = slice(None)) -> Keys:
        """Some of the tokens and heads, views."""
        return Keys(self.k[:, slice(*tokens), heads], self.v[:, slice(*tokens), heads])

    def at(self, spans: Sequence[Span]) -> Keys:
        """The tokens of rising spans, one after the other: a view if it is one span."""
        parts = [self.part(span) for span in spans]
        if len(parts) == 1:
            return parts[0]
        return Keys(torch.cat([p.k for p in parts], 1), torch.cat([p.v for p in parts], 1))


def _joined(parts: Sequence[Queries], name: str) -> Tensor | None:
    tensors = [getattr(part, name) for part in parts]
    return None if tensors[0] is None else torch.cat(tensors, _FIELDS[name])


Side = Queries | Keys


def outputs(
    kernel: Kernel, spec: Spec, cuts: Sequence[Cut], q: Tensor, keys: Keys
) -> Iterator[tuple[Span, Tensor, Tensor]]:
    """Partial out (B, T, H, D) and lse (B, H, T) of T queries each, as they are computed."""
    for rows, columns, call in cuts:
        seen = keys.at(columns)
        out, lse = kernel.forward(Queries(q).at(rows).q, seen.k, seen.v, call, spec)
        for span, place in _in_turn(rows):
            yield span, tokens_at(out, place), lse[:, :, slice(*place)]


def gradients(
    kernel: Kernel, spec: Spec, cuts: Sequence[Cut], queries: Queries, keys: Keys
) -> Iterator[tuple[Sequence[Span], Sequence[Span], tuple[Tensor, Tensor, Tensor]]]:
    """Rows and columns of each cut, and partial dq of those and dk, dv of these, as they are computed."""
    for rows, columns, call in cuts:
        x, y = queries.at(rows), keys.at(columns)
        yield rows, columns, kernel.backward(x.dout, x.q, y.k, y.v, x.out, x.lse, x.delta, call, spec)


def split(spans: Sequence[Span], x: Tensor) -> list[Part]:
    """The parts of x (B, T, ...), in which the tokens of `spans` lie one after the other."""
    return [(span, tokens_at(x, place)) for span, place in _in_turn(spans)]


def add_each(sums: Sequence[Gradients], spans: Sequence[Span], grads: Sequence[Tensor]) -> None:
    """Adds to each of `sums` its gradient (B, T, ...), in which the tokens of `spans` lie one after the other."""
    for total, grad in zip(sums, grads, strict=True):
        for span, part in split(spans, grad):
            total.add(span, part)


def _in_turn(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """Each span, and where it lies when they lie one after the other."""
    at = 0
    for span in spans:
        yield span, (at, at + length(span))
        at += length(span)
