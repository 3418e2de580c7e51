"""Adding up: partial attention outputs, partial gradients, and delta.

Outputs. With o_i the attention output over key set i and l_i = logsumexp of its scores (natural
log), that over all
sets is  o = sum_i exp(l_i - l) o_i  with  l = logsumexp_i l_i.  No exponent is positive, so nothing
         overflows at any
difference. A row that has seen nothing has l = -inf and leaves the others exactly alone; without
any its o remains: 0, or NaN where all that it saw has a score of -inf, as dense attention says.

Gradients are plain sums, and so is delta = rowsum(out * dout), by which a backward corrects for the
softmax's divisor (FlashAttention-2, arXiv 2307.08691, algorithm 2).

Partial results are kept as the kernels made them until there is enough to add up, so that each is
read once; the arithmetic is fp32, or fp64 for fp64 inputs. Tokens of which there is one part, which
lies where the sum goes, are left alone; so are those of an earlier sum to which nothing came.

A part is of the tokens of rising spans, which lie in it one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..sequence.span import Span, hull, in_turn, length, overlap, shifted

_MOST_PARTS = 8  # that are added up in one pass over memory

Part = tuple[Sequence[Span], Tensor]  # tokens, and a gradient (B, T, H, D) of them
# queries, and out (B, T, H, D) and lse (B, H, T) of them
OutputPart = tuple[Sequence[Span], Tensor, Tensor]


def tokens_at(x: Tensor, span: Span) -> Tensor:
    """Tokens span[0]..span[1] - 1 of (B, S, ...), a view."""
    return x[:, slice(*span)]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of inputs of `dtype` are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Outputs:
    """Adds up the attention output over key sets as they come; it ends up in out (B, S, H, D) and
    lse (B, H, S).

    Partial results are folded into one, in lse's dtype, whenever those that came exceed `limit`
    bytes. The sum begins
    with `parts`, which do not count: their memory is held elsewhere. Out may be that of the first;
    lse then begins as a copy of its.
    """

    def __init__(self, out: Tensor, lse: Tensor, limit: int = 0, parts: Iterable[OutputPart] = ()):
        self.out, self.lse, self.limit = out, lse, limit
        self.parts: list[OutputPart] = []
        self.wide: tuple[Tensor, Tensor] | None = None  # once folded, the first of the parts
        self.waiting = 0  # bytes that came
        for part in parts:
            self._take(part)

    def add(self, spans: Sequence[Span], out: Tensor, lse: Tensor) -> None:
        """A partial result of the queries of rising spans: out (B, T, H, D), lse (B, H, T)."""
        self.waiting += out.nbytes
        self._take((spans, out, lse))

    def _take(self, part: OutputPart) -> None:
        self.parts.append(part)
        if _too_many(self.parts, self.waiting, self.limit):
            self._fold()

    def _fold(self) -> None:
        if self.wide is None:
            wide = torch.empty(self.out.shape, dtype=self.lse.dtype, device=self.out.device)
            self.wide = wide, torch.empty_like(self.lse)
        out, lse = self.wide
        self._merge(out, lse)
        # a copy is read while lse is written
        self.parts = [([(0, out.shape[1])], out, lse.clone())]
        self.waiting = 0

    def result(self) -> None:
        """Fills out and lse; 0 and -inf where no part came."""
        if not self.parts:
            self.out.zero_()
            self.lse.fill_(-torch.inf)
            return
        self._merge(self.out, self.lse)

    def _merge(self, total: Tensor, total_lse: Tensor) -> None:
        if span := _unfinished(self.parts, total):
            parts = [
                (spans, tokens_at(out, place), lse[:, :, slice(*place)])
                for spans, place, out, lse in _clipped(self.parts, span)
            ]
            _backend(total, "merge_outputs")(
                tokens_at(total, span), total_lse[:, :, slice(*span)], parts
            )


class Gradients:
    """Adds up the gradient of a tensor (B, S, H, D) as its parts come; `limit` and `parts` as for
    Outputs.

    The sum ends up in `into`, if that is given, which may be the memory of the first of `parts`.
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
        self.shape, self.dtype, self.device, self.limit, self.into = (
            torch.Size(shape),
            dtype,
            device,
            limit,
            into,
        )
        self.parts: list[Part] = []
        self.total: Tensor | None = None  # once folded, the first of the parts
        self.waiting = 0  # bytes that came
        for part in parts:
            self._take(part)

    def add(self, spans: Sequence[Span], grad: Tensor) -> None:
        """The part of the tokens of rising spans: (B, T, ...), any float dtype."""
        self.waiting += grad.nbytes
        self._take((spans, grad))

    def _take(self, part: Part) -> None:
        self.parts.append(part)
        if _too_many(self.parts, self.waiting, self.limit):
            self.fold()

    def fold(self) -> None:
        """Adds up what has come, in the accumulator's dtype; memory of the parts is not read again."""
        if self.total is None:
            self.total = torch.empty(
                self.shape, dtype=accumulator_dtype(self.dtype), device=self.device
            )
        self._sum(self.total)
        self.parts, self.waiting = [([(0, self.shape[1])], self.total)], 0

    def result(self, dtype: torch.dtype | None = None) -> Tensor:
        """The sum, 0 where no part came: in `into`, else contiguous in `dtype` (by default the
        tensor's).
        """
        assert dtype is None or self.into is None, "the sum's place has a dtype"
        dtype = dtype or self.dtype
        if (
            self.into is None
            and is_whole(self.parts, self.shape[1])
            and self.parts[0][1].dtype == dtype
        ):
            return self.parts[0][1].contiguous()
        total = (
            torch.empty(self.shape, dtype=dtype, device=self.device)
            if self.into is None
            else self.into
        )
        if not self.parts:
            return total.zero_()
        self._sum(total)
        return total

    def _sum(self, total: Tensor) -> None:
        if span := _unfinished(self.parts, total):
            parts = [
                (spans, tokens_at(grad, place)) for spans, place, grad in _clipped(self.parts, span)
            ]
            _backend(total, "sum_gradients")(tokens_at(total, span), parts)


def sum_parts(
    parts: Sequence[Part],
    span: Span,
    batch: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The gradient of tokens span[0]..span[1] - 1 of which there are `parts`: (B, T, *shape), a
    view if one has it.
    """
    here = [(spans, tokens_at(grad, place)) for spans, place, grad in _clipped(parts, span)]
    if is_whole(here, length(span)) and here[0][1].dtype == dtype:
        return here[0][1]
    return Gradients((batch, length(span), *shape), dtype, device, parts=here).result()


def empty_lse(q: Tensor) -> Tensor:
    """(B, H, S) for q (B, S, H, D), in the accumulator's dtype."""
    batch, tokens, heads, _ = q.shape
    return torch.empty(batch, heads, tokens, dtype=accumulator_dtype(q.dtype), device=q.device)


def stack_lse_delta(out: Tensor, dout: Tensor, lse: Tensor) -> Tensor:
    """lse (B, H, S) and delta side by side, as they travel: (B, S, H, 2) in lse's dtype; out, dout
    (B, S, H, D).
    """
    batch, tokens, heads, _ = out.shape
    rows = torch.empty(batch, tokens, heads, 2, dtype=lse.dtype, device=out.device)
    _backend(out, "fill_lse_delta")(rows, out, dout, lse)
    return rows


def split_lse_delta(rows: Tensor) -> tuple[Tensor, Tensor]:
    """What `stack_lse_delta` put side by side, (B, H, S) each and contiguous, as kernels want them."""
    lse, delta = (x.transpose(1, 2).contiguous() for x in rows.unbind(-1))
    return lse, delta


def merge_outputs(out: Tensor, lse: Tensor, parts: list[OutputPart]) -> None:
    """Fills out (B, S, H, D) and lse (B, H, S) with the merge of `parts`. Specifies the fused
    kernel.

    Out may be the first part's, whole; lse may not, but holds the same numbers then.
    """
    total = torch.zeros_like(out, dtype=lse.dtype)
    lse.fill_(-torch.inf)
    for spans, part, part_lse in parts:
        for span, place in in_turn(spans):
            rows, row_lse = tokens_at(total, span), lse[:, :, slice(*span)]
            more, more_lse = (
                tokens_at(part, place).to(lse.dtype),
                part_lse[:, :, slice(*place)].to(lse.dtype),
            )
            rows.copy_(_share(rows, row_lse, more_lse) + _share(more, more_lse, row_lse))
            row_lse.copy_(torch.logaddexp(row_lse, more_lse))
    out.copy_(total)


def sum_gradients(total: Tensor, parts: list[Part]) -> None:
    """Fills total (B, S, H, D) with the sum of `parts`; it may be the first, whole. Specifies the
    fused kernel.
    """
    wide = torch.zeros_like(total, dtype=accumulator_dtype(total.dtype))
    for spans, part in parts:
        for span, place in in_turn(spans):
            tokens_at(wide, span).add_(tokens_at(part, place))
    total.copy_(wide)


def fill_lse_delta(rows: Tensor, out: Tensor, dout: Tensor, lse: Tensor) -> None:
    """Fills rows as `stack_lse_delta` returns them. Specifies the fused kernel."""
    rows[..., 0] = lse.transpose(1, 2)
    rows[..., 1] = (out.to(rows.dtype) * dout).sum(-1)


def _share(out: Tensor, lse: Tensor, other: Tensor) -> Tensor:
    """What out (B, S, H, D) with `lse` (B, H, S) adds to the merge with a side that has lse
    `other`.

    Nothing, also if it is NaN, if this side alone saw nothing; all if neither saw anything.
    """
    nothing = lse == -torch.inf
    share = torch.sigmoid(lse - other).masked_fill_(nothing, 1.0)  # -inf - -inf would be NaN
    skipped = nothing & (other != -torch.inf)
    return (out * _by_row(share)).masked_fill_(_by_row(skipped), 0.0)


def _by_row(x: Tensor) -> Tensor:
    """(B, H, S), shaped to go with (B, S, H, D)."""
    return x.transpose(1, 2).unsqueeze(-1)


def is_whole(parts: Sequence[tuple], tokens: int) -> bool:
    """Whether there is one part, of all tokens."""
    return len(parts) == 1 and [*parts[0][0]] == [(0, tokens)]


def _too_many(parts: Sequence[tuple], waiting: int, limit: int) -> bool:
    """Whether it is time to add up parts, of which `waiting` bytes came."""
    return len(parts) > 1 and (waiting > limit or len(parts) > _MOST_PARTS)


def lies_in(part: tuple, into: Tensor) -> bool:
    """Whether a part is of all tokens and lies where the sum goes."""
    if not is_whole([part], into.shape[1]):
        return False
    return part[1].data_ptr() == into.data_ptr() and part[1].dtype == into.dtype


def _unfinished(parts: Sequence[tuple], into: Tensor) -> Span | None:
    """The tokens whose sum is still to be written to `into`: all, or those around what came after
    the first part.
    """
    if not parts or not lies_in(parts[0], into):
        return 0, into.shape[1]
    return hull(span for part in parts[1:] for span in part[0]) if len(parts) > 1 else None


def _clipped(parts: Sequence[tuple], within: Span) -> Iterator[tuple]:
    """Of parts (spans, tensors) what is `within` a span: spans, counted from its start, where in
    the part they lie, and the tensors.
    """
    for spans, *tensors in parts:
        found = [
            (at, shifted(at, place[0] - span[0]))
            for span, place in in_turn(spans)
            if length(at := overlap(span, within))
        ]
        if found:
            yield (
                [shifted(at, -within[0]) for at, _ in found],
                (found[0][1][0], found[-1][1][1]),
                *tensors,
            )


def _backend(x: Tensor, name: str) -> Callable[..., None]:
    """The function called `name` for tensors like x: fused in Triton on GPUs, plain torch elsewhere
    and for fp64.
    """
    if x.is_cuda and x.dtype != torch.float64:
        from . import fused

        return getattr(fused, name)
    return globals()[name]
