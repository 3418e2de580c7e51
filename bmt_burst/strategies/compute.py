"""The computations that strategies share: kernel calls on tokens of queries and of keys.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..base.compiled import fused_on_gpus
from ..kernels import Kernel
from ..kernels.bias import CallBias, Segments, dscores_bound
from ..kernels.packed import current_stream, send_to_device
from ..merging.merge import stack_lse_delta
from ..merging.parts import OutputPart
from ..scores import BY_DISTANCE, Scores, is_one_row
from ..sequence.gathered_calls import GatheredCall
from ..sequence.span import Span, hull, in_turn, length
from ..spec import Spec
from . import Problem

ALL = slice(None)  # all tokens, or all heads


@dataclass(frozen=True)
class Queries:
    """The query side of a forward: q (B, S, H, D). With a bias, `tokens` (4, S) are
    `Scores.tokens`.
    """

    q: Tensor
    tokens: Tensor | None = None

    def part(self, tokens: slice, heads: slice = ALL) -> Queries:
        """Return views of some tokens and heads."""
        if tokens == heads == ALL:
            return self
        return Queries(self.q[:, tokens, heads], _slice_tokens(self.tokens, tokens))

    def gather(self, spans: Sequence[Span]) -> Queries:
        """Return the tokens of rising spans, one after the other. It is a view for a single
        span.
        """
        if len(spans) == 1:
            is_all = spans[0] == (0, self.q.shape[1])
            return self if is_all else self.part(slice(*spans[0]))
        return Queries(_gather(self.q, spans, 1), _gather_optional(self.tokens, spans, 1))


@dataclass(frozen=True)
class QueryGradients:
    """The query side of a backward: q, dout (B, S, H, D), lse (B, H, S), and either out or delta.

    delta (B, H, S) is rowsum(out * dout). `tokens` are as for Queries.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    out: Tensor | None = None
    delta: Tensor | None = None
    tokens: Tensor | None = None

    def part(self, tokens: slice, heads: slice = ALL) -> QueryGradients:
        """Return views of some tokens and heads."""
        if tokens == heads == ALL:
            return self
        return QueryGradients(
            self.q[:, tokens, heads],
            self.dout[:, tokens, heads],
            self.lse[:, heads, tokens],
            None if self.out is None else self.out[:, tokens, heads],
            None if self.delta is None else self.delta[:, heads, tokens],
            _slice_tokens(self.tokens, tokens),
        )

    def gather(self, spans: Sequence[Span]) -> QueryGradients:
        """Return the tokens of rising spans, one after the other. It is a view for a single
        span.
        """
        if len(spans) == 1:
            is_all = spans[0] == (0, self.q.shape[1])
            return self if is_all else self.part(slice(*spans[0]))
        return QueryGradients(
            _gather(self.q, spans, 1),
            _gather(self.dout, spans, 1),
            _gather(self.lse, spans, 2),
            _gather_optional(self.out, spans, 1),
            _gather_optional(self.delta, spans, 2),
            _gather_optional(self.tokens, spans, 1),
        )

    def with_delta(self) -> QueryGradients:
        """Return the same queries with delta instead of out."""
        if self.out is None:
            return self
        delta = stack_lse_delta(self.out, self.dout, self.lse)[..., 1].transpose(1, 2)
        return replace(self, out=None, delta=delta.contiguous())

    def get_delta(self) -> Tensor:
        """Return delta (B, H, S). It is computed from out if needed."""
        delta = self.with_delta().delta
        assert delta is not None, "a backward has out or delta"
        return delta


@dataclass(frozen=True)
class Keys:
    """The key side: k and v (B, S, G, D). `tokens` are as for Queries."""

    k: Tensor
    v: Tensor
    tokens: Tensor | None = None

    def part(self, tokens: slice, heads: slice = ALL) -> Keys:
        """Return views of some tokens and heads."""
        if tokens == heads == ALL:
            return self
        return Keys(
            self.k[:, tokens, heads], self.v[:, tokens, heads], _slice_tokens(self.tokens, tokens)
        )

    def gather(self, spans: Sequence[Span]) -> Keys:
        """Return the tokens of rising spans, one after the other. It is a view for a single
        span.
        """
        if len(spans) == 1:
            is_all = spans[0] == (0, self.k.shape[1])
            return self if is_all else self.part(slice(*spans[0]))
        return Keys(
            _gather(self.k, spans, 1),
            _gather(self.v, spans, 1),
            _gather_optional(self.tokens, spans, 1),
        )


Side = Queries | QueryGradients | Keys


def _gather(x: Tensor, spans: Sequence[Span], dim: int) -> Tensor:
    return torch.cat([x.narrow(dim, span[0], length(span)) for span in spans], dim)


def _gather_optional(x: Tensor | None, spans: Sequence[Span], dim: int) -> Tensor | None:
    return None if x is None else _gather(x, spans, dim)


def _slice_tokens(x: Tensor | None, tokens: slice) -> Tensor | None:
    return None if x is None else x[:, tokens]


@dataclass(frozen=True)
class LearnedBias:
    """A learned bias that is added to the scores of H heads: see `bmt_burst.scores`.

    kernel, spec      compute pairs that do not share a row
    table             (R, H) fp32 or fp64
    pairs, distances  fields of the Scores, on the device
    other             a field of the Scores
    rows              the rows that all pairs of some calls share, in the order of row_lse
    row_lse           (rows, B, H, S): for each row and query the logsumexp over the pairs with it
    prepared          what kernels keep for the table
    parts             the biases of some heads, each made once
    """

    kernel: Kernel
    spec: Spec
    table: Tensor
    pairs: Tensor
    distances: Tensor
    other: int
    rows: tuple[int, ...]
    row_lse: Tensor
    prepared: dict[Any, Any] = field(default_factory=dict)
    parts: dict[tuple[int, int], LearnedBias] = field(default_factory=dict)

    def of_heads(self, heads: slice) -> LearnedBias:
        """Return views of some heads. It is the same object each time, because kernels keep results
        for its table.
        """
        key = heads.start, heads.stop
        if key not in self.parts:
            table, row_lse = self.table[:, heads], self.row_lse[:, :, heads]
            self.parts[key] = replace(self, table=table, row_lse=row_lse, prepared={}, parts={})
        return self.parts[key]

    def of_call(
        self,
        query_tokens: Tensor | None,
        key_tokens: Tensor | None,
        gathered: GatheredCall,
        bound: Tensor | None = None,
    ) -> CallBias:
        """Return the bias of a call without one row for all pairs, as kernels take it."""
        assert query_tokens is not None, "with a bias, both sides have `tokens`"
        assert key_tokens is not None
        q_group, q_base, _, q_position = query_tokens
        group, _, segment, position = key_tokens
        segments = (
            None
            if gathered.row == BY_DISTANCE
            else Segments(q_group, q_base, group, segment, self.pairs, self.other)
        )
        return CallBias(
            self.table,
            q_position,
            position,
            self.distances,
            segments,
            gathered.apart,
            bound,
            self.prepared,
        )

    def add_lse(self, row: int, spans: Sequence[Span], lse: Tensor) -> None:
        """Add the lse (B, H, T) of a call whose pairs share a row. Its queries are those of rising
        spans.
        """
        for span, place in in_turn(spans):
            total = self.row_lse[self.rows.index(row), :, :, slice(*span)]
            torch.logaddexp(total, lse[:, :, slice(*place)], out=total)


@dataclass(frozen=True)
class TableGradient:
    """The sum dtable (R, H) of the gradients of a bias's table."""

    bias: LearnedBias
    dtable: Tensor

    def of_heads(self, heads: slice) -> TableGradient:
        """Return views for some heads."""
        return TableGradient(self.bias.of_heads(heads), self.dtable[:, heads])

    def subtract_delta(self, queries: QueryGradients) -> None:
        """Subtract sum P delta from the gradients of shared rows, for all queries of this rank.

        The gradient of a shared row is sum dS = sum P dP - sum P delta over its pairs, with P =
        exp(scores - lse). The second sum follows from the row's logsumexp. The first follows from
        each call's gradient of v: dv_j = sum_i P_ij dout_i, so v_j . dv_j = sum_i P_ij dP_ij.
        """
        if not self.bias.rows:
            return
        delta = queries.get_delta()
        for row, lse in zip(self.bias.rows, self.bias.row_lse, strict=True):
            probs = (lse - queries.lse).exp().masked_fill(lse == -torch.inf, 0.0)
            self.dtable[row] -= (probs * delta).sum((0, 2))


@dataclass(frozen=True)
class Attention:
    """The forward of kernel calls, with a bias if the scores have one."""

    kernel: Kernel
    spec: Spec
    bias: LearnedBias | None = None

    @staticmethod
    def begin(problem: Problem, q: Tensor, table: Tensor | None) -> Attention:
        """Begin a call with queries q (B, S, H, D) and the table of its bias, if any."""
        if table is None:
            return Attention(problem.kernel, problem.spec)
        batch, tokens, heads, _ = q.shape
        row_lse = table.new_full((len(problem.rows), batch, heads, tokens), -torch.inf)
        return Attention(
            problem.kernel, problem.spec, _make_bias(problem, q.device, table, row_lse)
        )

    @property
    def row_lse(self) -> Tensor | None:
        """The row_lse that the backward needs if there is a bias."""
        return None if self.bias is None else self.bias.row_lse

    @property
    def writes_new_memory(self) -> bool:
        """Whether all kernels return new memory."""
        return self.kernel.writes_new_memory and (
            self.bias is None or self.bias.kernel.writes_new_memory
        )

    def of_heads(self, heads: slice) -> Attention:
        return self if self.bias is None else replace(self, bias=self.bias.of_heads(heads))

    def forward(
        self, queries: Queries, keys: Keys, gathered: GatheredCall
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of one call. `queries` and `keys` are its gathered tokens."""
        bias, call, row = self.bias, gathered.call, gathered.row
        if bias and not is_one_row(row):
            added = bias.of_call(queries.tokens, keys.tokens, gathered)
            return bias.kernel.forward(queries.q, keys.k, keys.v, call, bias.spec, added)
        out, lse = self.kernel.forward(queries.q, keys.k, keys.v, call, self.spec)
        if bias is None or row is None:
            return out, lse
        lse = lse + bias.table[row].unsqueeze(-1)
        # An infinite row makes the merged output NaN: `out` alone does not know of the bias.
        return out, lse.masked_fill_(lse == torch.inf, torch.nan)


@dataclass(frozen=True)
class AttentionGradient:
    """The backward of kernel calls. It adds the gradient of a bias's table to `table`."""

    kernel: Kernel
    spec: Spec
    table: TableGradient | None = None

    @staticmethod
    def begin(
        problem: Problem, queries: QueryGradients, table: Tensor | None, row_lse: Tensor | None
    ) -> AttentionGradient:
        """Begin the backward of a call with these queries. `row_lse` is from its forward."""
        if table is None:
            return AttentionGradient(problem.kernel, problem.spec)
        assert row_lse is not None, "the forward of a call with a bias returns row_lse"
        bias = _make_bias(problem, queries.q.device, table, row_lse)
        gradient = TableGradient(bias, torch.zeros_like(table))
        gradient.subtract_delta(queries)
        return AttentionGradient(problem.kernel, problem.spec, gradient)

    @property
    def dtable(self) -> Tensor | None:
        return None if self.table is None else self.table.dtable

    def of_heads(self, heads: slice) -> AttentionGradient:
        return self if self.table is None else replace(self, table=self.table.of_heads(heads))

    def backward(
        self, queries: QueryGradients, keys: Keys, gathered: GatheredCall, bound: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of one call. `bound` is `dscores_bound` of at least its queries and
        keys, or None.
        """
        table, call, row = self.table, gathered.call, gathered.row
        q, dout, k, v, out, delta = (
            queries.q,
            queries.dout,
            keys.k,
            keys.v,
            queries.out,
            queries.delta,
        )
        lse = queries.lse
        if table and not is_one_row(row):
            bias = table.bias
            added = bias.of_call(queries.tokens, keys.tokens, gathered, bound)
            dq, dk, dv, dtable = bias.kernel.backward(
                dout, q, k, v, out, lse, delta, call, bias.spec, added
            )
            table.dtable.add_(dtable)
            return dq, dk, dv
        if table and row is not None:
            lse = lse - table.bias.table[row].unsqueeze(-1)
        dq, dk, dv = self.kernel.backward(dout, q, k, v, out, lse, delta, call, self.spec)
        if table and row is not None:
            table.dtable[row] += _sum_products(dv, v)
        return dq, dk, dv


def _make_bias(
    problem: Problem, device: torch.device, table: Tensor, row_lse: Tensor
) -> LearnedBias:
    scores, kernel = problem.scores, problem.biased_kernel
    assert scores is not None, "a call with a table has scores"
    assert kernel is not None
    pairs, distances = _send_lookups(scores, device, current_stream(device))
    spec = replace(problem.spec, biased=True)
    return LearnedBias(kernel, spec, table, pairs, distances, scores.other, problem.rows, row_lse)


@functools.lru_cache(maxsize=8)
def _send_lookups(
    scores: Scores, device: torch.device, stream: torch.cuda.Stream | None
) -> tuple[Tensor, Tensor]:
    """Return pairs and distances on a device."""
    return send_to_device(scores.pairs, device), send_to_device(scores.distances, device)


def _sum_products(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of x * y for each head: (H,) fp32, or fp64 for fp64 inputs. Both are (B, S, H,
    D). Where x is 0, y may be anything: tokens that nobody sees may hold NaN.
    """
    return _sum_rows(x, y).sum((0, 1))


@fused_on_gpus
def _sum_rows(x: Tensor, y: Tensor) -> Tensor:
    """Return the part of `_sum_products` of each token: (B, S, H).

    Two sums take half the time of one, because these entries are neighbours in memory: 2.5 ms
    instead of 4.7, in a backward of CPM-Bee at 64K tokens on one H200.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * y.to(wide)).masked_fill(x == 0, 0.0).sum(3)


def compute_outputs(
    attention: Attention, calls: Sequence[GatheredCall], queries: Queries, keys: Keys
) -> Iterator[OutputPart]:
    """Compute calls. Yield the query spans of each, with their partial out (B, T, H, D) and lse (B,
    H, T).
    """
    for gathered in calls:
        out, lse = attention.forward(
            queries.gather(gathered.q_spans), keys.gather(gathered.kv_spans), gathered
        )
        if attention.bias and gathered.row is not None and is_one_row(gathered.row):
            attention.bias.add_lse(gathered.row, gathered.q_spans, lse)
        yield gathered.q_spans, out, lse


def compute_gradients(
    attention: AttentionGradient, calls: Sequence[GatheredCall], queries: QueryGradients, keys: Keys
) -> Iterator[tuple[Sequence[Span], Sequence[Span], tuple[Tensor, Tensor, Tensor]]]:
    """Compute the gradients of calls. Yield the query and key spans of each, with partial (dq, dk,
    dv).
    """
    bound = _find_bound(calls, queries, keys) if attention.table else None
    for gathered in calls:
        rows, columns = gathered.q_spans, gathered.kv_spans
        yield (
            rows,
            columns,
            attention.backward(queries.gather(rows), keys.gather(columns), gathered, bound),
        )


def _find_bound(
    calls: Sequence[GatheredCall], queries: QueryGradients, keys: Keys
) -> Tensor | None:
    """Return `dscores_bound` of the tokens of all calls without one row for all pairs. It counts
    tokens between theirs, too.
    """
    biased = [gathered for gathered in calls if not is_one_row(gathered.row)]
    if queries.delta is None or not biased:
        return None
    queries = queries.part(slice(*hull(span for gathered in biased for span in gathered.q_spans)))
    keys = keys.part(slice(*hull(span for gathered in biased for span in gathered.kv_spans)))
    assert queries.delta is not None
    return dscores_bound(queries.dout, keys.v, queries.lse, queries.delta)
