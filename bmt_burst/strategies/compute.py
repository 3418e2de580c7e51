"""What strategies compute: kernel calls on parts of a query side and of a key side.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..compiled import fused_on_gpus
from ..kernels import Kernel
from ..kernels.bias import CallBias, Segments, dscores_bound
from ..kernels.packed import current_stream, sent
from ..merge import OutputPart, query_rows
from ..scores import BY_DISTANCE, Scores, is_one_row
from ..span import Span, hull, in_turn, length
from ..spec import Spec
from ..tiling import Cut
from . import Problem


@dataclass(frozen=True)
class Queries:
    """The query side: q (B, S, H, D), in a backward also dout, out (B, S, H, D), lse, delta (B, H, S).

    In a backward out or delta is None. `tokens` (4, S), where there is a bias, are `Scores.tokens`.
    """

    q: Tensor
    dout: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    delta: Tensor | None = None
    tokens: Tensor | None = None

    def part(self, tokens: Span, heads: slice = slice(None)) -> Queries:
        """Some of the tokens and heads, views."""
        wide = (None if x is None else x[:, slice(*tokens), heads] for x in (self.q, self.dout, self.out))
        rows = (None if x is None else x[:, heads, slice(*tokens)] for x in (self.lse, self.delta))
        return Queries(*wide, *rows, _tokens(self, tokens))

    def at(self, spans: Sequence[Span]) -> Queries:
        """The tokens of rising spans, one after the other: a view if it is one span."""
        if len(spans) == 1:
            return self.part(spans[0])
        return Queries(*(_joined(getattr(self, name), spans, dim) for name, dim in _QUERIES.items()))

    def with_delta(self) -> Queries:
        """With delta = rowsum(out * dout) in place of out."""
        delta = query_rows(self.out, self.dout, self.lse)[..., 1].transpose(1, 2)
        return replace(self, out=None, delta=delta.contiguous())


_QUERIES = {"q": 1, "dout": 1, "out": 1, "lse": 2, "delta": 2, "tokens": 1}  # fields, and their dimension of tokens


@dataclass(frozen=True)
class Keys:
    """The key side: k and v (B, S, G, D); `tokens` as of Queries."""

    k: Tensor
    v: Tensor
    tokens: Tensor | None = None

    def part(self, tokens: Span, heads: slice = slice(None)) -> Keys:
        """Some of the tokens and heads, views."""
        k, v = (x[:, slice(*tokens), heads] for x in (self.k, self.v))
        return Keys(k, v, _tokens(self, tokens))

    def at(self, spans: Sequence[Span]) -> Keys:
        """The tokens of rising spans, one after the other: a view if it is one span."""
        if len(spans) == 1:
            return self.part(spans[0])
        return Keys(*(_joined(x, spans, 1) for x in (self.k, self.v, self.tokens)))


def _joined(x: Tensor | None, spans: Sequence[Span], dim: int) -> Tensor | None:
    return None if x is None else torch.cat([x.narrow(dim, span[0], length(span)) for span in spans], dim)


def _tokens(side: Side, span: Span) -> Tensor | None:
    return None if side.tokens is None else side.tokens[:, slice(*span)]


Side = Queries | Keys


@dataclass(frozen=True)
class Bias:
    """What attention adds to the scores of H heads: see `bmt_burst.scores`.

    kernel, spec      for pairs that have a row of their own each
    table             (R, H) fp32, or fp64
    pairs, distances  of the Scores, on the device
    other             of the Scores
    rows              that calls have as a whole, in the order of
    row_lse           (rows, B, H, S): for each the logsumexp of a rank's queries over the pairs with it
    dtable            (R, H), in a backward: where the table's gradient adds up
    prepared          what kernels keep for the table
    parts             of some heads, that were asked for
    """

    kernel: Kernel
    spec: Spec
    table: Tensor
    pairs: Tensor
    distances: Tensor
    other: int
    rows: tuple[int, ...]
    row_lse: Tensor
    dtable: Tensor | None = None
    prepared: dict[Any, Any] = field(default_factory=dict)
    parts: dict[tuple[int, int], Bias] = field(default_factory=dict)

    def of(self, heads: slice) -> Bias:
        """That of some heads, views; the same one each time, for what is kept for its table."""
        key = heads.start, heads.stop
        if key not in self.parts:
            table, row_lse = self.table[:, heads], self.row_lse[:, :, heads]
            dtable = None if self.dtable is None else self.dtable[:, heads]
            self.parts[key] = replace(self, table=table, row_lse=row_lse, dtable=dtable, prepared={}, parts={})
        return self.parts[key]

    def of_call(self, queries: Queries, keys: Keys, cut: Cut, bound: Tensor | None = None) -> CallBias:
        """What a kernel has to know where pairs have rows of their own, or go by distance."""
        q_group, q_base, _, q_position = queries.tokens
        group, _, segment, position = keys.tokens
        segments = None if cut.row == BY_DISTANCE else Segments(q_group, q_base, group, segment, self.pairs, self.other)
        return CallBias(self.table, q_position, position, self.distances, segments, cut.apart, bound, self.prepared)

    def add_lse(self, row: int, spans: Sequence[Span], lse: Tensor) -> None:
        """What the queries of rising spans see in a call whose pairs have this row: lse (B, H, T)."""
        for span, place in in_turn(spans):
            total = self.row_lse[self.rows.index(row), :, :, slice(*span)]
            torch.logaddexp(total, lse[:, :, slice(*place)], out=total)

    def subtract_delta(self, queries: Queries) -> None:
        """Takes sum P delta off the gradients of rows that calls have as a whole, for all queries of this rank.

        Such a row's gradient is sum dS = sum P dP - sum P delta over its pairs, P = exp(scores - lse). The second
        follows from its logsumexp; the first is in each call's gradient of v: dv_j = sum_i P_ij dout_i, so
        v_j . dv_j = sum_i P_ij dP_ij.
        """
        if self.rows and queries.delta is None:
            queries = queries.with_delta()
        for row, lse in zip(self.rows, self.row_lse, strict=True):
            probs = (lse - queries.lse).exp().masked_fill(lse == -torch.inf, 0.0)
            self.dtable[row] -= (probs * queries.delta).sum((0, 2))


@dataclass(frozen=True)
class Attention:
    """What computes calls: a kernel and, where scores have a bias, that."""

    kernel: Kernel
    spec: Spec
    bias: Bias | None = None

    @staticmethod
    def begin(problem: Problem, queries: Queries, table: Tensor | None, row_lse: Tensor | None = None) -> Attention:
        """That of a call, or with the `row_lse` of its forward of its backward."""
        if table is None:
            return Attention(problem.kernel, problem.spec)
        device, dtable = queries.q.device, None if row_lse is None else torch.zeros_like(table)
        pairs, distances = _lookups(problem.scores, device, current_stream(device))
        if row_lse is None:
            batch, tokens, heads, _ = queries.q.shape
            row_lse = table.new_full((len(problem.rows), batch, heads, tokens), -torch.inf)
        kernel, spec = problem.biased_kernel, replace(problem.spec, biased=True)
        bias = Bias(kernel, spec, table, pairs, distances, problem.scores.other, problem.rows, row_lse, dtable)
        if dtable is not None:
            bias.subtract_delta(queries)
        return Attention(problem.kernel, problem.spec, bias)

    @property
    def writes_new_memory(self) -> bool:
        """Whether all its kernels do."""
        return self.kernel.writes_new_memory and (self.bias is None or self.bias.kernel.writes_new_memory)

    def of(self, heads: slice) -> Attention:
        return self if self.bias is None else replace(self, bias=self.bias.of(heads))

    def forward(self, q: Queries, keys: Keys, cut: Cut) -> tuple[Tensor, Tensor]:
        bias, call, row = self.bias, cut.call, cut.row
        if bias and not is_one_row(row):
            return bias.kernel.forward(q.q, keys.k, keys.v, call, bias.spec, bias.of_call(q, keys, cut))
        out, lse = self.kernel.forward(q.q, keys.k, keys.v, call, self.spec)
        if bias is None:
            return out, lse
        lse = lse + bias.table[row].unsqueeze(-1)
        return out, lse.masked_fill_(lse == torch.inf, torch.nan)  # to be merged so: out does not know of the bias

    def backward(self, q: Queries, keys: Keys, cut: Cut, bound: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv; the table's gradient adds up. `bound` is `dscores_bound` of more queries and keys, or None."""
        bias, call, row = self.bias, cut.call, cut.row
        inputs = q.dout, q.q, keys.k, keys.v, q.out
        if bias is None:
            return self.kernel.backward(*inputs, q.lse, q.delta, call, self.spec)
        if not is_one_row(row):
            added = bias.of_call(q, keys, cut, bound)
            *grads, dtable = bias.kernel.backward(*inputs, q.lse, q.delta, call, bias.spec, added)
            bias.dtable.add_(dtable)
            return tuple(grads)
        lse = q.lse - bias.table[row].unsqueeze(-1)
        dq, dk, dv = self.kernel.backward(*inputs, lse, q.delta, call, self.spec)
        bias.dtable[row] += _sum_of_products(dv, keys.v)
        return dq, dk, dv


@functools.lru_cache(maxsize=8)
def _lookups(scores: Scores, device: torch.device, stream: torch.cuda.Stream | None) -> tuple[Tensor, Tensor]:
    """pairs and distances on a device."""
    return sent(scores.pairs, device), sent(scores.distances, device)


@fused_on_gpus
def _sum_of_products(x: Tensor, y: Tensor) -> Tensor:
    """Of each head the sum of x * y, both (B, S, H, D): (H,) fp32, or fp64 for fp64 inputs."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * y.to(wide)).sum((0, 1, 3))


def outputs(attention: Attention, cuts: Sequence[Cut], queries: Queries, keys: Keys) -> Iterator[OutputPart]:
    """Rows of each cut, and partial out (B, T, H, D) and lse (B, H, T) of those, as they are computed."""
    for cut in cuts:
        out, lse = attention.forward(queries.at(cut.rows), keys.at(cut.columns), cut)
        if is_one_row(cut.row):
            attention.bias.add_lse(cut.row, cut.rows, lse)
        yield cut.rows, out, lse


def gradients(
    attention: Attention, cuts: Sequence[Cut], queries: Queries, keys: Keys
) -> Iterator[tuple[Sequence[Span], Sequence[Span], tuple[Tensor, Tensor, Tensor]]]:
    """Rows and columns of each cut, and partial dq of those and dk, dv of these, as they are computed."""
    bound = _bound(cuts, queries, keys) if attention.bias and queries.delta is not None else None
    for cut in cuts:
        rows, columns = cut.rows, cut.columns
        yield rows, columns, attention.backward(queries.at(rows), keys.at(columns), cut, bound)


def _bound(cuts: Sequence[Cut], queries: Queries, keys: Keys) -> Tensor | None:
    """`dscores_bound` of all cuts whose pairs have rows of their own. Tokens around these, as padding, have no say."""
    biased = [cut for cut in cuts if not is_one_row(cut.row)]
    if not biased:
        return None
    queries = queries.part(hull(span for cut in biased for span in cut.rows))
    keys = keys.part(hull(span for cut in biased for span in cut.columns))
    return dscores_bound(queries.dout, keys.v, queries.lse, queries.delta)
