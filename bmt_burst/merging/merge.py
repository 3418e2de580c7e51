"""Adding up: partial attention outputs, partial gradients, and delta.

Outputs. Let o_i be the attention output over key set i, and l_i the logsumexp of its scores
(natural log). The output over all sets is

    o = sum_i exp(l_i - l) o_i   with   l = logsumexp_i l_i

No exponent is positive, so nothing overflows. A row that saw nothing has l = -inf and does not
change the others. If no row saw anything, o stays: 0, or NaN where all scores are -inf. Gradients
are plain sums. `Kernel.backward` says what delta is.

Parts are kept as the kernels made them until enough are waiting, so that each is read only once.
The arithmetic is fp32, or fp64 for fp64 inputs. Tokens are not written again if their only part, or
their earlier sum, already lies in the memory of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..base.ranges import in_range
from ..base.registry import Modules
from ..sequence.span import Span, length
from .parts import clip_parts, is_whole

Tensors = tuple[Tensor, ...]

_MODULES = Modules(__package__, {"triton": "fused", "torch": "parts"})
_MOST_PARTS = 15  # that wait. With the next one, they are added up in one pass over memory


class Sum:
    """A sum of partial gradients of a tensor (B, S, H, D). They are added up once they take more
    than `limit` bytes, or are many.

    limit    bytes of parts that may wait, or None if all wait for the result
    into     the memory of the result, if given. It may be that of the first of `parts`. An lse is
             then a copy of that part's.
    parts    parts that the sum begins with
    waiting  bytes of parts that were added since the last fold. Those that the sum begins with do
             not count, because their memory is held elsewhere.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        limit: float | None = 0,
        into: Tensors | None = None,
        parts: Iterable[Any] = (),
    ):
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self.limit, self.waiting, self.into = limit, 0, into
        self.wide: Tensors | None = None  # the memory of the first part, once parts were folded
        self.parts: list[Any] = []
        for part in parts:
            self._append(part)

    def add(self, spans: Sequence[Span], *tensors: Tensor) -> None:
        """Add a partial result of the tokens of rising spans: a gradient (B, T, ...) in any float
        dtype, or out (B, T, H, D) and lse (B, H, T).
        """
        self.waiting += tensors[0].nbytes
        self._append((spans, *tensors))

    add_sent = add  # a partial result in the form of `sent`

    def _append(self, part: Any) -> None:
        self.parts.append(part)
        if self.limit is None or len(self.parts) == 1:
            return
        if self.waiting > self.limit or len(self.parts) > _MOST_PARTS:
            self.fold()

    def fold(self) -> None:
        """Add up the parts so far, in the accumulator's dtype. Their memory is not read again."""
        self.wide = self.wide or self.new(self.shape, accumulator_dtype(self.dtype), self.device)
        in_range("merge", self._fill, self.wide)
        total, *lse = self.wide
        # the next sum reads this copy of lse while it writes lse
        self.parts, self.waiting = [([(0, self.shape[1])], total, *(x.clone() for x in lse))], 0

    def result(self) -> Tensors:
        """Return the sum: a gradient in `dtype`, or out in `dtype` and lse. Tokens without a part
        have 0, and an lse of -inf. Without `into`, it may be the only part itself.
        """
        into = self.into
        if into is None:
            if is_whole(self.parts, self.shape[1]) and self.parts[0][1].dtype == self.dtype:
                return tuple(self.parts[0][1:])
            into = self.new(self.shape, self.dtype, self.device)
        in_range("merge", self._fill, into)
        return into

    def sent(self, span: Span) -> Tensors:
        """Return the sum of tokens as it is sent: (B, T, heads, ...), a view if one part has it."""
        return self.like(length(span), self.dtype, 0, clip_parts(self.parts, span)).result()

    def like(
        self, tokens: int, dtype: torch.dtype, limit: float | None, parts: Iterable[Any] = ()
    ) -> Self:
        """Return a sum of the same kind for other tokens."""
        shape = self.shape[0], tokens, *self.shape[2:]
        return type(self)(shape, dtype, self.device, limit, parts=parts)

    @staticmethod
    def new(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
        return (torch.empty(shape, dtype=dtype, device=device),)

    def _fill(self, into: Tensors) -> None:
        [total] = into
        if self.parts:
            _MODULES.find(total).sum_gradients(total, self.parts)
        else:
            total.zero_()


class Outputs(Sum):
    """A sum of partial attention outputs: out (B, S, H, D) and lse (B, H, S)."""

    def add_sent(self, spans: Sequence[Span], *tensors: Tensor) -> None:
        out, lse = tensors
        self.add(spans, out, lse.transpose(1, 2))

    def sent(self, span: Span) -> Tensors:
        out, lse = super().sent(span)
        return out, lse.transpose(1, 2)

    @staticmethod
    def new(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
        out = torch.empty(shape, dtype=dtype, device=device)
        return out, empty_lse(out)

    def _fill(self, into: Tensors) -> None:
        out, lse = into
        if self.parts:
            _MODULES.find(out).merge_outputs(out, lse, self.parts)
        else:
            out.zero_()
            lse.fill_(-torch.inf)


def empty_lse(q: Tensor) -> Tensor:
    """Return an uninitialized lse (B, H, S) for q (B, S, H, D), in the accumulator's dtype."""
    batch, tokens, heads, _ = q.shape
    return torch.empty(batch, heads, tokens, dtype=accumulator_dtype(q.dtype), device=q.device)


def stack_lse_delta(out: Tensor, dout: Tensor, lse: Tensor, width: int = 2) -> Tensor:
    """Return lse (B, H, S) and delta of out and dout (B, S, H, D) side by side, as they are sent:
    (B, S, H, width) in lse's dtype. Columns after these two are uninitialized.
    """
    rows = torch.empty(*out.shape[:3], width, dtype=lse.dtype, device=out.device)
    _MODULES.find(out).fill_lse_delta(rows, out, dout, lse)
    return rows
