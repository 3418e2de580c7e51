"""The ring: forward and backward of attention over a sequence that is cut over ranks.

    forward             queries stay, (k, v) travel, partial outputs merge at home
    backward, "kv"      queries stay, (k, v) travel, their gradients come back
    backward, "q"       keys stay, (q, dout, lse, delta) travel, dq comes back (BurstAttention, arXiv 2403.09347)

Everything here composes: the schedule says who moves where, the layout what is visible, `routes` which tokens go where,
`tour` brings them, a kernel computes a tile, `merge` adds up, a transport moves bytes. Nothing here writes to the
caller's tensors.

Each rank computes its own block first. Then the others' come by, some heads at a time, each with a pass round the ring,
and in groups of as many blocks as `Plan.group_bytes` allows: the tokens of a group that this rank looks at lie one
after the other, and what looks at them alike is one kernel call. While a group is computed the next one is on its way,
and so are the gradients of the one before, also from one pass to the next. One block of one kv head a group needs the
least memory; all blocks in one group is attention over gathered keys and values.

Letters: B batch, S tokens of a rank, T tokens of a group, H query heads, G kv heads, D head size. All that travels is
(B, S, heads, ...).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .compiled import fused_on_gpus
from .layout import Tile
from .merge import Gradients, Outputs, Span, add_each, query_rows, tokens_at
from .plan import Plan
from .rings import Rings
from .routes import Group, Piece, Routes
from .tour import Homecoming, Tour

Summand = TypeVar("Summand")

# Partial results are read once more each time they are folded, and stay in memory until they are: so many groups' bytes
# of them wait. In the backward memory is short and kernels take longer.
_OUTPUTS_WAITING = 4
_GRADIENTS_WAITING = 1.25
_SURROGATE_ENTRIES = 3


@dataclass(frozen=True)
class Queries:
    """The query side of a backward: q, dout, out (B, S, H, D), lse, delta (B, H, S); out or delta is None."""

    q: Tensor
    dout: Tensor
    out: Tensor | None
    lse: Tensor
    delta: Tensor | None = None

    def heads(self, at: slice) -> Queries:
        """Some of the heads, views."""
        q, dout, out = (None if x is None else x[:, :, at] for x in (self.q, self.dout, self.out))
        lse, delta = (None if x is None else x[:, at] for x in (self.lse, self.delta))
        return Queries(q, dout, out, lse, delta)


def forward(plan: Plan, rings: Rings, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of this rank's q over the whole sequence: out (B, S, H, D) in q's dtype, lse (B, H, S) fp32 / fp64."""
    passes = plan.passes("kv", q, k, returning=False)
    with Tour(plan, rings, passes, (k, v)) as tour:
        own_out, own_lse = plan.kernel.forward(q, k, v, causal=plan.causal, **plan.kernel_options)
        if not passes:
            return _result(own_out, q), own_lse
        # Not merged into the kernel's own memory: a policy of activation checkpointing may have saved that.
        out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(own_lse)
        for heads in passes:
            queries = q[:, :, heads.q]
            total = Outputs(out[:, :, heads.q], lse[:, heads.q], _OUTPUTS_WAITING * plan.group_bytes)
            total.add((0, q.shape[1]), own_out[:, :, heads.q], own_lse[:, heads.q])
            for group, block in tour.visits(heads):
                _attend(plan, group, queries, block, total)
                del block  # the next one may take its memory
            total.result()
    return out, lse


def backward(
    plan: Plan, rings: Rings, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's tokens, in the inputs' dtype."""
    travels, home, whole = plan.backward, Queries(q, dout, out, lse), (0, q.shape[1])
    passes = plan.passes(travels, q, k, returning=True)
    departing = (k, v) if travels == "kv" or not passes else _departing(plan, home)
    with ExitStack() as stack:
        tour = stack.enter_context(Tour(plan, rings, passes, departing))
        own = _tile_backward(plan, Tile(whole, whole, plan.causal), home, k, v)
        results = [_result(grad, x) for grad, x in zip(own, (q, k, v), strict=True)]
        before = None  # the homecoming of the pass before, whose last gradients are on their way
        for heads in passes:
            parts = zip(own, results, (heads.q, heads.kv, heads.kv), strict=True)
            sums = [_begun(plan, grad[:, :, at], into[:, :, at]) for grad, into, at in parts]
            staying, leaving = _split(travels, sums)
            homecoming = stack.enter_context(Homecoming(plan, rings, heads, leaving))
            here = home.heads(heads.q), (k[:, :, heads.kv], v[:, :, heads.kv])
            for group, block in tour.visits(heads):
                sides = (here[0], block) if travels == "kv" else (_visiting(plan, block), here[1])
                _differentiate(plan, heads.routes, group, *sides, staying, homecoming)
                del block, sides  # the next one may take its memory
                if before and (not before.outer or group.root != plan.rank):  # between hosts it takes up to a round
                    before.finish()
                    before = None
                homecoming.depart(group)
            for total in staying:
                total.result()
            before = homecoming
        if before:
            before.finish()
    dq, dk, dv = results
    return dq, dk, dv


def reserve(plan: Plan, rings: Rings, q: Tensor, k: Tensor, with_backward: bool) -> None:
    """Lets the transport prepare for what will land on ranks of this host; all ranks call it alike."""
    host, visit, home = rings.outer.rank, 0, 0
    for travels, returning in (("kv", False), *([(plan.backward, True)] if with_backward else [])):
        for heads in plan.passes(travels, q, k, returning):
            tokens, home_tokens = heads.routes.landing_tokens(host)
            visit = max(visit, heads.packing.nbytes(tokens))
            if heads.return_packing:
                home = max(home, heads.return_packing.nbytes(home_tokens))
    rings.inner.reserve({"visit": visit, "return": home}, q.device)


@fused_on_gpus
def surrogate_out(dout: Tensor, delta: Tensor) -> Tensor:
    """A tensor o' (B, S, H, D) in dout's dtype with rowsum(o' * dout) = delta (B, H, S), for kernels that need out.

    Where the softmax is saturated, dq is what is left of dP - delta after nearly all has cancelled, so delta must be
    met far better than o' can be rounded. Therefore few entries carry it: that with the largest |dout| as much as its
    rounding allows, the next ones the rest. Three leave an error below fp32's; in fp16, whose smallest numbers are not
    small, one of some 1e-4 where delta is small beside |dout|, as rounding out would.
    """
    wide = dout.to(delta.dtype)
    magnitude, rest = wide.abs(), delta.transpose(1, 2).unsqueeze(-1)
    out, most = torch.zeros_like(dout), torch.finfo(dout.dtype).max
    for _ in range(_SURROGATE_ENTRIES):
        largest = magnitude.amax(-1, keepdim=True)
        carrying = (magnitude == largest) & (largest > 0)  # several where entries are alike
        divisor = largest * carrying.sum(-1, keepdim=True)
        part = (rest / divisor).where(divisor > 0, 0.0).clamp(-most, most).to(dout.dtype)
        out = torch.where(carrying, part * dout.sign(), out)
        rest = rest - part.to(delta.dtype) * divisor
        magnitude = magnitude.masked_fill(carrying, 0.0)
    return out


def _departing(plan: Plan, home: Queries) -> tuple[Tensor, ...]:
    """What travels of the queries: q and dout (B, S, H, D), and of each row lse and delta, or else lse and out."""
    if plan.send_out:
        return home.q, home.dout, home.lse.transpose(1, 2), home.out
    return home.q, home.dout, query_rows(home.out, home.dout, home.lse)


def _visiting(plan: Plan, block: tuple[Tensor, ...]) -> Queries:
    """The queries of which `block` has arrived."""
    q, dout, rows, *out = block
    if plan.send_out:
        return Queries(q, dout, *out, rows.transpose(1, 2))
    lse, delta = (x.transpose(1, 2) for x in rows.unbind(-1))
    if plan.kernel.takes_delta:
        return Queries(q, dout, None, lse, delta)
    return Queries(q, dout, surrogate_out(dout, delta), lse)


def _result(own: Tensor, like: Tensor) -> Tensor:
    """Where a sum that begins with the own block's share ends up, in the dtype of an input: there, if it can be."""
    return own.to(like.dtype).contiguous()


def _begun(plan: Plan, own: Tensor, into: Tensor) -> Gradients:
    """The sum that begins with the own block's share, (B, S, heads, D) as is `into`, where it ends up."""
    total = Gradients(into.shape, into.dtype, into.device, int(_GRADIENTS_WAITING * plan.group_bytes), into)
    total.add((0, into.shape[1]), own)
    return total


def _attend(plan: Plan, group: Group, q: Tensor, block: tuple[Tensor, ...], total: Outputs) -> None:
    """Adds to `total` what q of the home tokens finds in a group, whose k and v are `block`."""
    for rows, columns, causal in _calls_by_query(group.pieces):
        k, v = (tokens_at(x, columns) for x in block)
        total.add(rows, *plan.kernel.forward(tokens_at(q, rows), k, v, causal=causal, **plan.kernel_options))


def _differentiate(
    plan: Plan,
    routes: Routes,
    group: Group,
    queries: Queries,
    keys: tuple[Tensor, ...],
    staying: Sequence[Gradients],
    homecoming: Homecoming,
) -> None:
    """Adds the gradients of a group's tiles to those that stay, and hands over those that go home."""
    for tile in _calls_by_block(routes, group.pieces):
        mine, theirs = _split(routes.travels, _tile_backward(plan, tile, queries, *keys))
        add_each(staying, routes.home_side(tile), mine)
        homecoming.take(routes.away_side(tile), theirs)


def _split(travels: str, of_qkv: Sequence[Summand]) -> tuple[Sequence[Summand], Sequence[Summand]]:
    """What belongs to dq, dk and dv: those that stay, and those that go home."""
    of_q, of_kv = of_qkv[:1], of_qkv[1:]
    return (of_q, of_kv) if travels == "kv" else (of_kv, of_q)


def _calls_by_query(pieces: Sequence[Piece]) -> Iterator[tuple[Span, Span, bool]]:
    """Kernel calls (home queries, group's tokens, causal) in which every query stands in at most one call.

    Pieces lie in the order of how many queries see them, so what a range of queries sees lies together.
    """
    yield from ((p.tile.q, p.at, True) for p in pieces if p.tile.causal)
    whole = [p for p in pieces if not p.tile.causal]
    cuts = sorted({cut for p in whole for cut in p.tile.q})
    for rows in itertools.pairwise(cuts):
        seen = [p.at for p in whole if p.tile.q[0] <= rows[0] and rows[1] <= p.tile.q[1]]
        if seen:
            yield rows, (seen[0][0], seen[-1][1]), False


def _calls_by_block(routes: Routes, pieces: Sequence[Piece]) -> Iterator[Tile]:
    """Kernel calls in which every token of the group stands in one call: tiles of home tokens and group's tokens."""
    calls: list[tuple[Span, Span, bool]] = []  # home tokens, group's tokens, causal
    for piece in pieces:
        home, causal = routes.home_side(piece.tile), piece.tile.causal
        if calls and not causal and calls[-1][0] == home and calls[-1][1][1] == piece.at[0]:
            calls[-1] = home, (calls[-1][1][0], piece.at[1]), False
        else:
            calls.append((home, piece.at, causal))
    for home, at, causal in calls:
        yield Tile(at, home, causal) if routes.travels == "q" else Tile(home, at, causal)


def _tile_backward(plan: Plan, tile: Tile, side: Queries, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the tokens of one tile."""
    dout, q, out = (None if x is None else tokens_at(x, tile.q) for x in (side.dout, side.q, side.out))
    lse, delta = (None if x is None else x[:, :, slice(*tile.q)] for x in (side.lse, side.delta))
    k, v = tokens_at(k, tile.kv), tokens_at(v, tile.kv)
    return plan.kernel.backward(dout, q, k, v, out, lse, delta, causal=tile.causal, **plan.kernel_options)
