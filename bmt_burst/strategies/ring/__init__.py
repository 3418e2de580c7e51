"""The ring: each rank keeps its queries and sends its keys and values, or the other way round.

    forward, "kv"       queries stay, (k, v) are sent; partial outputs merge at the queries
    forward, "q"        keys stay, q is sent; partial outputs are returned and merge at the queries
    backward, "kv"      queries stay, (k, v) are sent; their gradients are returned
    backward, "q"       keys stay, (q, dout, lse, delta) are sent; dq is returned (BurstAttention,
                        arXiv 2403.09347)

    routes     which tokens each rank sends to which, in stages, and where they land
    payload    the tensors that are sent, and the results that are returned
    program    a rank's part, without tensors: the order of its events, its routes and kernel calls
    execution  performs the events with tensors

A pass has some of the heads. A stage has as many blocks as `group_bytes` allows. "all-gather" has
all blocks in one stage, and one_call.py the own block too. `print(plan)` shows the order.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence

from torch import Tensor

from ...ranks.rings import Rings
from ...sequence.gathered_calls import GatheredCall, by_columns, kernel_calls
from ...sequence.tile import flipped
from ...sequence.tiling import Tiling
from .. import MaskPart, Plan, Problem, Sizes, Strategy
from ..compute import ALL, Keys, Queries, QueryGradients, Tensors
from .execution import Backward, Forward
from .payload import Payload, backward_payloads, forward_payload, select_heads
from .program import Pass, Program
from .routes import Landing, Routes

# rows of queries, over all heads, that keep a GPU busy: about sixteen tiles for each SM
_ENOUGH_ROWS = 1 << 18
# bytes by which aligned tensors may be longer than their tokens
_ALIGNED = 1 << 12


class Ring(Strategy):
    name = "ring"
    stage_bytes: int | None = None

    def plan(self, problem: Problem, rank: int) -> RingPlan:
        return RingPlan(problem, rank, self.stage_bytes)


class AllGather(Ring):
    """The ring with all blocks of a host in one stage, as for Llama 3 (arXiv 2407.21783).

    No other strategy has fewer partial results to add up. But only the own block's kernels hide the
    exchange, and the memory must hold all that is gathered. `group_bytes` only bounds the partial
    results that wait to be added up.
    """

    name = "all-gather"
    stage_bytes = sys.maxsize


class RingPlan(Plan):
    """The programs of a rank's forward and backward. Each is made when it is first used.

    `stage_bytes` replaces the problem's group_bytes as the bound of a stage.
    """

    def __init__(self, problem: Problem, rank: int, stage_bytes: int | None = None):
        self.problem, self.rank = problem, rank
        self.stage_bytes = problem.group_bytes if stage_bytes is None else stage_bytes

    @functools.cached_property
    def forward_program(self) -> Program:
        return self._make_program(forward_payload(self.problem))

    @functools.cached_property
    def backward_program(self) -> Program:
        return self._make_program(self._pick_payload(backward_payloads(self.problem)))

    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, inputs: Tensors = ()
    ) -> tuple[Tensor, Tensor, Tensors]:
        attention = self.problem.scoring.forward(self.problem, q, inputs)
        block = Queries(q), Keys(k, v)
        forward = Forward(self.forward_program, rings, attention, *block, (q, None))
        [(out, lse)] = forward.run()
        return out, lse, attention.kept

    def backward(
        self, rings: Rings, queries: QueryGradients, keys: Keys, inputs: Tensors, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor, Tensors]:
        """Compute the gradients. Queries have out or delta."""
        if self.problem.scoring.prefers_delta:
            queries = queries.with_delta()  # then calls need not gather out
        attention = self.problem.scoring.backward(self.problem, queries, inputs, kept)
        likes = (queries.q, None), (keys.k, keys.dk), (keys.v, keys.dv)
        backward = Backward(self.backward_program, rings, attention, queries, keys, *likes)
        [dq], [dk], [dv] = backward.run()
        return dq.contiguous(), dk, dv, attention.gradients

    def lane_bytes(self, with_backward: bool) -> dict[str, int]:
        payloads = [forward_payload(self.problem)]
        if with_backward:
            payloads += backward_payloads(self.problem)
        visit, returned = map(max, zip(*map(self._most_bytes, payloads), strict=True))
        return {"visit": visit + _ALIGNED, "return": returned + _ALIGNED}

    def __str__(self) -> str:
        programs = ("forward", self.forward_program), ("backward", self.backward_program)
        return "\n".join(f"rank {self.rank}, {name}: {program}" for name, program in programs)

    @functools.cached_property
    def _tiling(self) -> Tiling:
        return Tiling(self.problem.mask, self.problem.layout, self.problem.kv_layout)

    @functools.cached_property
    def _parts(self) -> list[tuple[MaskPart, Tiling]]:
        tiling = self._tiling
        return [
            (part, tiling if part.mask is tiling.mask else tiling.with_mask(part.mask))
            for part in self.problem.parts
        ]

    @functools.cached_property
    def _own_calls(self) -> list[GatheredCall]:
        calls = list[GatheredCall]()
        for part, tiling in self._parts:
            calls += kernel_calls(tiling.own_tiles(self.rank), part.label, part.most_gaps)
        return self.problem.scoring.refine(calls, lambda: (self._positions, self._positions))

    @functools.cached_property
    def _positions(self) -> Tensor:
        return self.problem.layout.positions(self.rank)

    @functools.cached_property
    def _kv_routes(self) -> Routes:
        return self._make_routes(self._tiling)

    def _make_routes(self, tiling: Tiling) -> Routes:
        return Routes(tiling, self.problem.inner, self.problem.outer, self.rank)

    def _make_program(self, payload: Payload) -> Program:
        transposed = payload.sends_queries
        routes = self._make_routes(self._tiling.transposed) if transposed else self._kv_routes
        passes = self._make_passes(payload, routes)
        rounds = routes.rounds(*self._find_limits(passes, payload)) if passes else ()
        calls = {}
        for n, round_ in enumerate(rounds):
            landings = round_.landing, *(stage.landing for stage in round_.stages)
            for i, landing in enumerate(landings, start=-1):
                calls[n, i] = self._find_calls(landing, payload)
        own = self._own_calls
        return Program(self.problem, self.rank, payload, own, passes, rounds, calls)

    def _pick_payload(self, choices: Sequence[Payload]) -> Payload:
        """Return the one with the smallest product of its bytes and the fullest rank's pairs. All
        ranks return the same.

        A rank computes the pairs of the side that stays, and layouts with equal work for queries
        may have unequal work for keys.

        choices  those with fewer bytes first
        """

        def cost(payload: Payload) -> float:
            tiling = self._tiling.transposed if payload.sends_queries else self._tiling
            return payload.most_bytes(self.problem) * max(tiling.pairs)

        first, *others = choices
        mask, size = self.problem.mask, self.problem.layout.size
        # the fullest rank has at least the mean of the pairs
        able = [x for x in others if x.most_bytes(self.problem) * mask.area < cost(first) * size]
        return min((first, *able), key=cost) if able else first

    def _find_calls(self, landing: Landing, payload: Payload) -> list[GatheredCall]:
        """Return the kernel calls of this rank's tokens with those that landed."""
        calls: list[GatheredCall] = []
        for part, tiling in self._parts if landing.runs else ():
            staying = tiling.transposed if payload.sends_queries else tiling
            tiles = staying.tiles(self.rank, landing.runs, landing.places)
            tiles = by_columns(tiles) if payload.returns else tiles
            tiles = [*map(flipped, tiles)] if payload.sends_queries else tiles
            calls += kernel_calls(tiles, part.label, part.most_gaps)

        def sides() -> tuple[Tensor, Tensor]:
            here, landed = self._positions, landing.positions()
            return (landed, here) if payload.sends_queries else (here, landed)

        return self.problem.scoring.refine(calls, sides)

    def _make_passes(self, payload: Payload, routes: Routes) -> list[Pass]:
        """Return the passes in which blocks are sent, or none if no rank needs another's tokens.

        All ranks return the same.
        """
        problem, sizes, hops = self.problem, self.problem.sizes, range(1, self.problem.inner)
        if problem.layout.size == 1 or not routes.traffic():
            return []
        if problem.outer > 1:  # hosts do not know what others need: whole blocks count
            block = payload.most_tokens(problem)
            ring = len(hops) * block
        else:
            block = max(routes.landing_tokens([hop]) for hop in hops)
            ring = routes.landing_tokens(hops)
        count = self._count_passes(payload, self._most_bytes(payload)[0], block, ring)
        if count == 1:
            return [make_pass(payload, sizes, ALL, ALL)]
        ratio = sizes.heads // sizes.kv_heads
        bounds = itertools.pairwise(sizes.kv_heads * i // count for i in range(count + 1))
        heads = ((slice(a * ratio, b * ratio), slice(a, b)) for a, b in bounds)
        return [make_pass(payload, sizes, *each) for each in heads]

    def _count_passes(self, payload: Payload, nbytes: int, block: int, ring: int) -> int:
        """Count the passes, if at most `block` tokens of one block land on a rank, `ring` tokens
        of a whole round, and `nbytes` at once.

        A pass has as few heads as let all that lands of a round fit into one stage: that makes few
        partial results and large kernel calls. But it has enough heads to keep a GPU busy. A single
        block never exceeds the bytes, unless it has only one kv head.
        """
        sizes = self.problem.sizes
        head_bytes = max(payload.packings(sizes)[0].token_bytes() // sizes.kv_heads, 1)
        within, in_one = (nbytes // (head_bytes * max(tokens, 1)) for tokens in (block, ring))
        rows = sizes.batch * self.problem.most_queries * (sizes.heads // sizes.kv_heads)
        most = min(max(in_one, -(-_ENOUGH_ROWS // rows)), max(within, 1), sizes.kv_heads)
        return -(-sizes.kv_heads // most)

    def _find_limits(self, passes: list[Pass], payload: Payload) -> tuple[int, int | None]:
        """Return the most tokens of a stage, and of the results that a stage returns."""
        largest = max(passes, key=lambda each: each.packing.token_bytes())
        visit_bytes, return_bytes = self._most_bytes(payload)
        limit = max(visit_bytes // largest.packing.token_bytes(), 1)
        returned = largest.return_packing.token_bytes()
        return limit, max(return_bytes // returned, 1) if returned else None

    def _most_bytes(self, payload: Payload) -> tuple[int, int]:
        """Return the most bytes of blocks, and of results, that land at once.

        The limits are those of a full mask. So memory that was reserved once fits any mask.
        """
        problem, hops = self.problem, self.problem.inner - 1
        if not hops:
            return 0, 0
        tokens, sizes = payload.most_tokens(problem), problem.sizes
        count = self._count_passes(payload, self.stage_bytes, tokens, hops * tokens)
        part = select_heads(sizes, -(-sizes.kv_heads // count))
        there, back = (packing.token_bytes() * tokens for packing in payload.packings(part))
        width = max(self.stage_bytes // max(there, back), 1)
        width = -(-hops // -(-hops // width))  # stages are nearly equal
        return width * there, width * back


def make_pass(payload: Payload, sizes: Sizes, at: slice, kv_at: slice) -> Pass:
    """Return the pass of some query heads and their kv heads."""
    sizes = select_heads(sizes, len(range(sizes.kv_heads)[kv_at]))
    return Pass(at, kv_at, *payload.packings(sizes))
