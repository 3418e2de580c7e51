"""The learned bias as strategies see it: a `Scoring` that adds rows of a table to scores.

If all pairs of a call share one row, the bias only adds that row to the call's lse, as any kernel
can. So `Scores` splits the mask into areas of one row each and the rest, for which kernels take a
`CallBias`.

The gradient of a row is the sum of dS = P (dP - delta) over its pairs, with P = exp(scores - lse).
Kernels do not return P. For an area of one row the sum follows from what they return:

    sum P dP     = sum v_j . dv_j, with the call's own dv, since dv_j = sum_i P_ij dout_i
    sum P delta  = sum exp(row_lse - lse) delta over queries, where row_lse is a query's lse over
                   all pairs with the row. The forward adds it up.

Each rank finds its share from its own calls and queries. With fewer kv heads there are no areas of
one row, since dv belongs to several query heads.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size, R rows of the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.compiled import fused_on_gpus
from ..base.streams import Stream, current_stream, send_to_device
from ..sequence.gathered_calls import GatheredCall
from ..sequence.span import Span, in_turn
from ..strategies import MaskPart, Problem, Scoring
from ..strategies.compute import Attention, AttentionGradient, Keys, Queries, QueryGradients
from ..strategies.extension import Tensors
from .areas import BY_DISTANCE, is_one_row
from .call_bias import CallBias, SegmentIds
from .kernels import TableKernel
from .scores import Scores

# Calls include all gaps if they have at most this share of the tiles' tokens: writing zeros is
# faster than copying tiles. Attention of CPM-Bee at 64K tokens took 118.6 ms instead of 123.5 for
# forward and backward, on one H200. Without a bias there was no gain.
_MOST_GAPS = 0.75


class PairRows(NamedTuple):
    """The rows of the table that the pairs of a call have: the label of its `MaskPart`.

    row    as `Term.row`
    apart  how far the first key of each tile is ahead of its first query, for rows by distance
    sides  the positions of the queries (S,) and the keys (T,) from which the call gathers its own,
           unless it has one row
    """

    row: int | None
    apart: tuple[int, ...] | None = None
    sides: tuple[Tensor, Tensor] | None = None

    @property
    def is_one(self) -> bool:
        """Whether all pairs have the same row."""
        return is_one_row(self.row)


@dataclass(frozen=True)
class TableScoring(Scoring):
    """Scores plus rows of a table, which is the only input: (R, H) in lse's dtype.

    scores  the row of each pair
    kernel  computes the pairs that do not share one row
    """

    scores: Scores
    kernel: TableKernel

    name = "a bias"
    prefers_delta = True  # the table's gradient needs it
    host_work = 16  # each area has calls of its own

    def parts(self, problem: Problem) -> tuple[MaskPart, ...]:
        if problem.sizes.heads != problem.sizes.kv_heads:
            return (MaskPart(problem.mask, PairRows(None)),)
        return tuple(
            MaskPart(term.mask, PairRows(term.row), 0.0 if term.row is None else _MOST_GAPS)
            for term in self.scores.terms
        )

    def refine(
        self, calls: list[GatheredCall], sides: Callable[[], tuple[Tensor, Tensor]]
    ) -> list[GatheredCall]:
        if all(x.label.is_one for x in calls):
            return calls
        both = sides()
        return [x if x.label.is_one else x._replace(label=_label(x, both)) for x in calls]

    def select_heads(self, inputs: Tensors, heads: slice) -> Tensors:
        return tuple(table[:, heads] for table in inputs)

    def forward(self, problem: Problem, q: Tensor, inputs: Tensors) -> BiasedAttention:
        [table], (batch, tokens, heads, _) = inputs, q.shape
        rows = _shared_rows(problem)
        row_lse = table.new_full((len(rows), batch, heads, tokens), -torch.inf)
        bias = LearnedBias(self.kernel, self.scores, table, rows, row_lse)
        return BiasedAttention(problem.kernel, problem.spec, bias)

    def backward(
        self, problem: Problem, queries: QueryGradients, inputs: Tensors, kept: Tensors
    ) -> BiasedGradient:
        [table], [row_lse] = inputs, kept
        bias = LearnedBias(self.kernel, self.scores, table, _shared_rows(problem), row_lse)
        dtable = torch.zeros_like(table)
        _subtract_delta(dtable, bias, queries)
        return BiasedGradient(problem.kernel, problem.spec, bias, dtable)


def _shared_rows(problem: Problem) -> tuple[int, ...]:
    """Return the rows that all pairs of some part of the problem share."""
    return tuple(part.label.row for part in problem.parts if part.label.is_one)


def _label(gathered: GatheredCall, both: tuple[Tensor, Tensor]) -> PairRows:
    """Return the label of a call without one row for all pairs. `both` are its sides. If neighbours
    in a tile are no neighbours in the sequence, as in striped layouts, no row goes by distance.
    """
    if gathered.label.row == BY_DISTANCE:
        pairs = zip(both, (gathered.q_spans, gathered.kv_spans), strict=True)
        sides = (torch.cat([x[slice(*span)] for span in spans]) for x, spans in pairs)
        queries, keys = (x.numpy() for x in sides)  # whose short slices take less time
        runs = [(queries[slice(*q)], keys[slice(*kv)]) for q, kv in gathered.call.tiles]
        if all((run[1:] - run[:-1] == 1).all() for tile in runs for run in tile):
            return PairRows(BY_DISTANCE, tuple(int(kv[0] - q[0]) for q, kv in runs), both)
    return PairRows(None, None, both)


@functools.lru_cache(maxsize=8)
def _send_lookups(
    scores: Scores, device: torch.device, stream: Stream | None
) -> tuple[Tensor, Tensor]:
    """Return pairs and distances on a device, for work on `stream`."""
    return send_to_device(scores.pairs, device), send_to_device(scores.distances, device)


# Each stage of a plan has positions of its own, and a call asks for all of them in turn. With less
# room than for a plan of 60 ranks, each call would send all tokens again. If each step has other
# documents, this bounds the memory that they take on GPUs.
@functools.lru_cache(maxsize=128)
def _send_tokens(
    scores: Scores, positions: Tensor, device: torch.device, stream: Stream | None
) -> Tensor:
    """Return `Scores.tokens` on a device, for work on `stream`. Keys are tensors, not values."""
    return send_to_device(scores.tokens(positions), device)


@dataclass(frozen=True)
class LearnedBias:
    """A bias that is added to the scores of H heads.

    kernel    computes pairs that do not share a row
    scores    the row of each pair
    table     (R, H) fp32 or fp64
    rows      the rows that all pairs of some calls share, in the order of row_lse
    row_lse   (rows, B, H, S): for each row and query the logsumexp over the pairs with it
    prepared  what kernels keep for the table, and the biases of some heads, each made once
    """

    kernel: TableKernel
    scores: Scores
    table: Tensor
    rows: tuple[int, ...]
    row_lse: Tensor
    prepared: dict[Any, Any] = field(default_factory=dict)

    def of_heads(self, heads: slice) -> LearnedBias:
        """Return views of some heads."""
        key = heads.start, heads.stop
        if key not in self.prepared:
            table, row_lse = self.table[:, heads], self.row_lse[:, :, heads]
            self.prepared[key] = replace(self, table=table, row_lse=row_lse, prepared={})
        found: LearnedBias = self.prepared[key]
        return found

    def of_call(self, gathered: GatheredCall) -> CallBias:
        """Return the bias of a call without one row for all pairs, as kernels take it."""
        row, apart, (queries, keys) = gathered.label
        place = self.table.device, current_stream(self.table.device)
        q_group, q_base, _, q_position = self._gather_tokens(queries, gathered.q_spans, place)
        group, _, segment, position = self._gather_tokens(keys, gathered.kv_spans, place)
        pairs, distances = _send_lookups(self.scores, *place)
        segments = None
        if row != BY_DISTANCE:
            segments = SegmentIds(q_group, q_base, group, segment, pairs, self.scores.other)
        places = q_position, position, distances
        return CallBias(self.table, *places, segments, apart, self.prepared)

    def _gather_tokens(
        self, positions: Tensor, spans: Sequence[Span], place: tuple[torch.device, Stream | None]
    ) -> Tensor:
        """Return `Scores.tokens` of the positions in some spans: (4, T)."""
        tokens = _send_tokens(self.scores, positions, *place)
        parts = [tokens[:, slice(*span)] for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@dataclass(frozen=True)
class BiasedAttention(Attention):
    """The forward of kernel calls with a bias."""

    bias: LearnedBias

    @property
    def kept(self) -> Tensors:
        return (self.bias.row_lse,)

    @property
    def writes_new_memory(self) -> bool:
        return self.kernel.writes_new_memory and self.bias.kernel.writes_new_memory

    def of_heads(self, heads: slice) -> BiasedAttention:
        return replace(self, bias=self.bias.of_heads(heads))

    def is_complete(self, gathered: GatheredCall) -> bool:
        # The out of a call with one row does not know whether that is infinite. Its lse does.
        return not gathered.label.is_one

    def forward(
        self, queries: Queries, keys: Keys, gathered: GatheredCall
    ) -> tuple[Tensor, Tensor]:
        bias, call, row = self.bias, gathered.call, gathered.label.row
        if not gathered.label.is_one:
            added = bias.of_call(gathered)
            return bias.kernel.forward(queries.q, keys.k, keys.v, call, self.spec, added)
        out, lse = self.kernel.forward(queries.q, keys.k, keys.v, call, self.spec)
        lse = lse + bias.table[row].unsqueeze(-1)
        lse.masked_fill_(lse == torch.inf, torch.nan)  # an infinite row makes the merged out NaN
        of_row = bias.row_lse[bias.rows.index(row)]
        for span, place in in_turn(gathered.q_spans):  # they rise
            total = of_row[:, :, slice(*span)]
            torch.logaddexp(total, lse[:, :, slice(*place)], out=total)
        return out, lse


@dataclass(frozen=True)
class BiasedGradient(AttentionGradient):
    """The backward of kernel calls with a bias. It adds to dtable (R, H)."""

    bias: LearnedBias
    dtable: Tensor

    @property
    def gradients(self) -> Tensors:
        return (self.dtable,)

    def of_heads(self, heads: slice) -> BiasedGradient:
        return replace(self, bias=self.bias.of_heads(heads), dtable=self.dtable[:, heads])

    def backward(
        self, queries: QueryGradients, keys: Keys, gathered: GatheredCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        bias, row, delta = self.bias, gathered.label.row, queries.delta
        inputs, how = (queries.dout, queries.q, keys.k, keys.v), (gathered.call, self.spec)
        out, lse = queries.out, queries.lse
        if not gathered.label.is_one:
            added = bias.of_call(gathered)
            dq, dk, dv, dtable = bias.kernel.backward(*inputs, out, lse, delta, *how, added)
            self.dtable.add_(dtable)
            return dq, dk, dv
        # the kernel does not know the row: exp(scores + row - lse) = exp(scores - (lse - row))
        lse = lse - bias.table[row].unsqueeze(-1)
        dq, dk, dv = self.kernel.backward(*inputs, out, lse, delta, *how)
        self.dtable[row] += _sum_rows(dv, keys.v).sum((0, 1))
        return dq, dk, dv


def _subtract_delta(dtable: Tensor, bias: LearnedBias, queries: QueryGradients) -> None:
    """Subtract sum P delta from the gradients of shared rows, for all queries of this rank."""
    if not bias.rows:
        return
    delta = queries.with_delta().delta
    assert delta is not None, "a backward has out or delta"
    for row, lse in zip(bias.rows, bias.row_lse, strict=True):
        probs = (lse - queries.lse).exp().masked_fill(lse == -torch.inf, 0.0)
        dtable[row] -= (probs * delta).sum((0, 2))


@fused_on_gpus
def _sum_rows(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of x * y (B, S, H, D) of each row: (B, S, H) fp32, or fp64 for fp64 inputs.

    Where x is 0, y may be anything: tokens that nobody sees may hold NaN. To sum the rows later
    takes half the time of one sum: 2.5 ms instead of 4.7, for CPM-Bee at 64K tokens on one H200.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * y.to(wide)).masked_fill(x == 0, 0.0).sum(3)
