"""Adding up: partial attention outputs, partial gradients, and delta.

Outputs. Let o_i be the attention output over key set i, and l_i the logsumexp of its scores
(natural log). The output over all sets is

    o = sum_i exp(l_i - l) o_i   with   l = logsumexp_i l_i

No exponent is positive, so nothing overflows. A row that saw nothing has l = -inf and does not
change the others. If no row saw anything, o stays: 0, or NaN where all scores are -inf, as in dense
attention.

Gradients are plain sums. So is delta = rowsum(out * dout), with which a backward corrects for the
softmax's divisor (FlashAttention-2, arXiv 2307.08691, algorithm 2).

Parts are kept as the kernels made them until enough are waiting, so that each is read only once.
The arithmetic is fp32, or fp64 for fp64 inputs. Tokens are not written again if their only part, or
their earlier sum, already lies in the memory of the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..base.registry import Modules
from ..sequence.span import Span, length
from .parts import OutputPart, Part, clip_parts, is_whole

_MODULES = Modules(__package__, {"triton": "fused", "torch": "plain"})
_MOST_PARTS = 15  # that wait. With the next one, they are added up in one pass over memory


class Sum(ABC):
    """Parts that are added up once they take more than `limit` bytes, or are many.

    limit    bytes of parts that may wait
    waiting  bytes of parts that were added since the last fold. Those that the sum begins with do
             not count, because their memory is held elsewhere.
    """

    def __init__(self, limit: int, parts: Iterable[Any]):
        self.limit, self.waiting = limit, 0
        self.parts: list[Any] = []
        for part in parts:
            self._append(part)

    def add(self, spans: Sequence[Span], *tensors: Tensor) -> None:
        """Add a partial result of the tokens of rising spans: a gradient (B, T, ...) in any float
        dtype, or out (B, T, H, D) and lse (B, H, T).
        """
        self.waiting += tensors[0].nbytes
        self._append((spans, *tensors))

    def _append(self, part: Any) -> None:
        self.parts.append(part)
        too_many = self.waiting > self.limit or len(self.parts) > _MOST_PARTS
        if too_many and len(self.parts) > 1:
            self.fold()

    @abstractmethod
    def fold(self) -> None:
        """Add up the parts so far, in the accumulator's dtype. Their memory is not read again."""

    @abstractmethod
    def like(self, tokens: int) -> Self:
        """Return an empty sum of the same kind for other tokens, in memory of its own."""


class Outputs(Sum):
    """The sum of partial attention outputs, written to out (B, S, H, D) and lse (B, H, S).

    limit  bytes of parts that may wait. If there are more, they are folded into one part in lse's
           dtype.
    parts  parts that the sum begins with. `out` may be the memory of the first; then `lse` begins
           as a copy of its lse.
    """

    def __init__(self, out: Tensor, lse: Tensor, limit: int = 0, parts: Iterable[OutputPart] = ()):
        self.out, self.lse = out, lse
        self.wide: tuple[Tensor, Tensor] | None = None  # the first of the parts once they folded
        super().__init__(limit, parts)

    def like(self, tokens: int) -> Outputs:
        out = self.out.new_empty(self.out.shape[0], tokens, *self.out.shape[2:])
        return Outputs(out, empty_lse(out), self.limit)

    def result(self) -> None:
        """Fill out and lse. Queries without a part get 0 and -inf."""
        self._fill(self.out, self.lse)

    def fold(self) -> None:
        if self.wide is None:
            wide = torch.empty(self.out.shape, dtype=self.lse.dtype, device=self.out.device)
            self.wide = wide, torch.empty_like(self.lse)
        out, lse = self.wide
        self._fill(out, lse)
        # the next merge reads this copy while it writes lse
        self.parts, self.waiting = [([(0, out.shape[1])], out, lse.clone())], 0

    def _fill(self, out: Tensor, lse: Tensor) -> None:
        if self.parts:
            _MODULES.find(out).merge_outputs(out, lse, self.parts)
        else:
            out.zero_()
            lse.fill_(-torch.inf)


class Gradients(Sum):
    """The sum of partial gradients of a tensor (B, S, H, D).

    limit, parts  as for Outputs
    into          the memory of the result, if given. It may be that of the first of `parts`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        limit: int = 0,
        into: Tensor | None = None,
        parts: Iterable[Part] = (),
    ):
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self.into = into
        self.total: Tensor | None = None  # the first of the parts once they folded
        super().__init__(limit, parts)

    def fold(self) -> None:
        if self.total is None:
            self.total = self._empty(accumulator_dtype(self.dtype))
        self._fill(self.total)
        self.parts, self.waiting = [([(0, self.shape[1])], self.total)], 0

    def like(self, tokens: int) -> Gradients:
        shape = self.shape[0], tokens, *self.shape[2:]
        return Gradients(shape, self.dtype, self.device, self.limit)

    def result(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the sum, 0 where there is no part.

        It lies in `into`. Without `into` it is contiguous and has `dtype`, by default the tensor's.
        """
        assert dtype is None or self.into is None, "`into` has a dtype"
        dtype = dtype or self.dtype
        if self.into is not None:
            return self._fill(self.into)
        if is_whole(self.parts, self.shape[1]) and self.parts[0][1].dtype == dtype:
            grad: Tensor = self.parts[0][1]
            return grad.contiguous()
        return self._fill(self._empty(dtype))

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.shape, dtype=dtype, device=self.device)

    def _fill(self, total: Tensor) -> Tensor:
        """Write the sum of the parts to `total`."""
        if not self.parts:
            return total.zero_()
        _MODULES.find(total).sum_gradients(total, self.parts)
        return total


def sum_parts(
    parts: Sequence[Part],
    span: Span,
    batch: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the sum of `parts` for tokens span[0]..span[1] - 1: (B, T, *shape).

    It is a view if one part has it.
    """
    here = clip_parts(parts, span)
    if is_whole(here, length(span)) and here[0][1].dtype == dtype:
        only: Tensor = here[0][1]
        return only
    return Gradients((batch, length(span), *shape), dtype, device, parts=here).result()


def merge_parts(
    parts: Sequence[OutputPart],
    span: Span,
    batch: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the merge of `parts` for tokens span[0]..span[1] - 1: out (B, T, *shape) and lse (B,
    H, T).

    They are views if one part has them.
    """
    here = clip_parts(parts, span)
    if is_whole(here, length(span)) and here[0][1].dtype == dtype:
        return here[0][1], here[0][2]
    out = torch.empty((batch, length(span), *shape), dtype=dtype, device=device)
    merged = Outputs(out, empty_lse(out), parts=here)
    merged.result()
    return merged.out, merged.lse


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
