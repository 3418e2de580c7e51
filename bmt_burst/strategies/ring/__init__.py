"""The ring: queries stay home while keys and values come by.

    forward             queries stay, (k, v) travel, partial outputs merge at home
    backward, "kv"      queries stay, (k, v) travel, their gradients come back
    backward, "q"       keys stay, (q, dout, lse, delta) travel, dq comes back (BurstAttention,
                        arXiv 2403.09347)

    schedule   whose block a rank attends to at which hop
    routes     which tokens go to whom, in stages, and where they land
    payload    what travels, in which bytes, and what comes home
    program    the order of events of a rank, as data
    executor   what each event does with tensors

Each rank computes its own block first. Then the others' come by, some heads at a time, each with a
pass round the ring, and in stages of as many blocks as `group_bytes` allows: the tokens of a stage
that this rank looks at lie one after the other, and what looks at them alike is one kernel call.
While a stage is computed the next one is on its way, and so are the gradients of the one before,
also from one pass to the next. One block of one kv head a stage needs the least memory; all blocks
in one stage is attention over gathered keys and values, which is a strategy too (all_gather.py).
`print(plan)` shows it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...ranks.rings import Rings
from ...scores import BY_DISTANCE
from ...sequence.tiling import Cut, Tiling, by_columns, flipped, kernel_calls
from .. import Plan, Problem, Sizes, Strategy
from ..compute import Keys, Queries, QueryGradients
from .executor import Backward, Forward, Pass, Program, landing_positions
from .payload import KeysValues, Payload, QueriesTravel, backward_payload, of_heads
from .program import order_events
from .routes import Landing, Routes
from .schedule import Schedule
from .timeline import Rates, Timeline, timeline

# rows of queries, over all heads, that keep a GPU busy: some sixteen tiles for each SM
_ENOUGH_ROWS = 1 << 18
# bytes by which a block may be longer than its tokens, since tensors are aligned
_ALIGNED = 1 << 12


class Ring(Strategy):
    name = "ring"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def plan(self, problem: Problem, rank: int) -> RingPlan:
        return RingPlan(problem, rank)


class RingPlan(Plan):
    """The programs of a rank's forward and backward, made when they are needed.

    `stage_bytes` are the most of travelling blocks that come in together, in place of the problem's
    group_bytes.
    """

    def __init__(self, problem: Problem, rank: int, stage_bytes: int | None = None):
        self.problem, self.rank = problem, rank
        self.stage_bytes = problem.group_bytes if stage_bytes is None else stage_bytes
        self.schedule = Schedule(problem.inner, problem.outer)

    @functools.cached_property
    def forward_program(self) -> Program:
        return self._make_program(KeysValues(), returning=False)

    @functools.cached_property
    def backward_program(self) -> Program:
        return self._make_program(self._backward_payload, returning=True)

    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return Forward(
            self.forward_program, KeysValues(), rings, Queries(q), Keys(k, v), table
        ).result()

    def backward(
        self,
        rings: Rings,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        table: Tensor | None = None,
        row_lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self.differentiate(
            rings, QueryGradients(q, dout, lse, out), Keys(k, v), table, row_lse
        )

    def differentiate(
        self,
        rings: Rings,
        queries: QueryGradients,
        keys: Keys,
        table: Tensor | None,
        row_lse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Do as `backward`, for queries with out or, if the kernel takes it and `send_out` is not
        asked for, delta.
        """
        payload = self._backward_payload
        return Backward(
            self.backward_program, payload, rings, queries, keys, table, row_lse
        ).result()

    def reserve(self, rings: Rings, device: torch.device, with_backward: bool) -> None:
        visit, home = self._most_bytes(KeysValues(), returning=False)[0], 0
        if with_backward:
            there, home = self._most_bytes(self._backward_payload, returning=True)
            visit = max(visit, there)
        rings.reserve({"visit": visit + _ALIGNED, "return": home + _ALIGNED}, device)

    def timelines(self, rates: Rates | None = None) -> tuple[Timeline, Timeline]:
        """Return when this rank computes and sends in the forward and in the backward, at assumed
        rates.
        """
        rates = rates or Rates()
        return timeline(self.forward_program, rates), timeline(
            self.backward_program, rates, returning=True
        )

    def __str__(self) -> str:
        return f"rank {self.rank}, forward: {self.forward_program}\nrank {self.rank}, backward: {self.backward_program}"

    @functools.cached_property
    def _backward_payload(self) -> KeysValues | QueriesTravel:
        problem = self.problem
        return backward_payload(problem.backward, problem.send_out, problem.sizes)

    @functools.cached_property
    def _tiling(self) -> Tiling:
        return Tiling(self.problem.mask, self.problem.layout)

    @functools.cached_property
    def _terms(self) -> list[tuple[int | None, Tiling]]:
        """A tiling for each term of the problem, with its row."""
        tiling = self._tiling
        return [
            (t.row, tiling if t.mask is tiling.mask else tiling.of(t.mask))
            for t in self.problem.terms
        ]

    @functools.cached_property
    def _own_calls(self) -> list[Cut]:
        cuts = [
            cut
            for row, tiling in self._terms
            for cut in kernel_calls(tiling.own_tiles(self.rank), row)
        ]
        return _noted(cuts, lambda: (self._positions, self._positions))

    @functools.cached_property
    def _positions(self) -> Tensor:
        """Of the own tokens."""
        return self.problem.layout.positions(self.rank)

    @functools.cached_property
    def _kv_routes(self) -> Routes:
        return Routes(self._tiling, self.schedule, self.rank)

    def _make_program(self, payload: Payload, returning: bool) -> Program:
        problem, queries_travel = self.problem, payload.queries_travel
        routes = (
            Routes(self._tiling.transposed, self.schedule, self.rank)
            if queries_travel
            else self._kv_routes
        )
        passes = self._passes(payload, routes, returning)
        rounds = routes.rounds(*self._limits(payload, passes, returning)) if passes else ()

        terms = [
            (row, tiling.transposed if queries_travel else tiling) for row, tiling in self._terms
        ]

        def calls(landings: Sequence[Landing], tokens: int) -> list[Cut]:
            found: list[Cut] = []
            for row, tiling in terms if landings else ():
                tiles = tiling.tiles(
                    self.rank, [x.piece for x in landings], [x.at for x in landings]
                )
                tiles = by_columns(tiles) if returning else tiles
                found += kernel_calls(map(flipped, tiles) if queries_travel else tiles, row)

            def sides() -> tuple[Tensor, Tensor]:
                here, landed = self._positions, landing_positions(landings, tokens)
                return (landed, here) if queries_travel else (here, landed)

            return _noted(found, sides)

        cuts = {
            (n, -1): calls(round_.landings, round_.held_tokens) for n, round_ in enumerate(rounds)
        }
        for n, round_ in enumerate(rounds):
            cuts |= {
                (n, i): calls(stage.landings, stage.tokens) for i, stage in enumerate(round_.stages)
            }
        return Program(
            problem=problem,
            rank=self.rank,
            payload=payload,
            own=self._own_calls,
            passes=passes,
            rounds=rounds,
            cuts=cuts,
            events=tuple(
                order_events(len(passes), [len(r.stages) for r in rounds] or [0], returning)
            ),
        )

    def _passes(self, payload: Payload, routes: Routes, returning: bool) -> list[Pass]:
        """The passes in which blocks go round, none if nothing has to.

        All ranks must say the same, so between hosts, whose ranks do not know what others look at,
        blocks count whole.
        """
        sizes = self.problem.sizes
        if self.problem.layout.size == 1 or not routes.traffic():
            return []
        nbytes, _ = self._most_bytes(payload, returning)
        count = self._count(payload, nbytes, *self._landing_tokens(routes))
        ratio = sizes.heads // sizes.kv_heads
        cuts = itertools.pairwise(sizes.kv_heads * i // count for i in range(count + 1))
        return [_pass(payload, sizes, slice(a * ratio, b * ratio), slice(a, b)) for a, b in cuts]

    def _count(self, payload: Payload, nbytes: int, block: int, ring: int) -> int:
        """How many passes, if `block` tokens land of one block and `ring` of a whole round, and may
        have `nbytes`.

        Each has as few heads as let what lands of a round come in one stage, which makes partial
        results few and kernel calls large, but enough heads to keep a GPU busy; a single block is
        within the bytes in any case, down to one kv head, whatever that has.
        """
        sizes = self.problem.sizes
        head_bytes = max(payload.packing(sizes).token_bytes() // sizes.kv_heads, 1)
        within, in_one = (nbytes // (head_bytes * max(tokens, 1)) for tokens in (block, ring))
        rows = sizes.batch * self.problem.most_tokens * (sizes.heads // sizes.kv_heads)
        most = min(max(in_one, -(-_ENOUGH_ROWS // rows)), max(within, 1), sizes.kv_heads)
        return -(-sizes.kv_heads // most)

    def _landing_tokens(self, routes: Routes) -> tuple[int, int]:
        """The most tokens that land on a rank of one block, and of all blocks of a round."""
        hops = range(1, self.schedule.inner)
        if self.schedule.outer > 1:
            return self.problem.most_tokens, len(hops) * self.problem.most_tokens
        return max(routes.landing_tokens([hop]) for hop in hops), routes.landing_tokens(hops)

    def _limits(
        self, payload: Payload, passes: list[Pass], returning: bool
    ) -> tuple[int, int | None]:
        """The most tokens of a stage, and of the gradients that come home from one."""
        there, back = self._most_bytes(payload, returning)
        limit = min(there // each.packing.token_bytes() for each in passes)
        back_limit = min(back // each.return_packing.token_bytes() for each in passes)
        return max(limit, 1), max(back_limit, 1) if returning else None

    def _most_bytes(self, payload: Payload, returning: bool) -> tuple[int, int]:
        """The most bytes that land at once, of blocks and of gradients: as many as where all look
        at all.

        Other masks get no more, so that what is reserved does for any mask.
        """
        problem, hops = self.problem, self.schedule.inner - 1
        if not hops:
            return 0, 0
        tokens, sizes = problem.most_tokens, problem.sizes
        count = self._count(payload, self.stage_bytes, tokens, hops * tokens)
        part = of_heads(sizes, -(-sizes.kv_heads // count))
        there, back = (
            p(part).token_bytes() * tokens for p in (payload.packing, payload.return_packing)
        )
        width = max(self.stage_bytes // (max(there, back) if returning else there), 1)
        width = -(-hops // -(-hops // width))  # stages are nearly equal
        return width * there, width * back


def _pass(payload: Payload, sizes: Sizes, at: slice, kv_at: slice) -> Pass:
    sizes = of_heads(sizes, kv_at.stop - kv_at.start)
    return Pass(at, kv_at, payload.packing(sizes), payload.return_packing(sizes))


def _noted(cuts: list[Cut], sides: Callable[[], tuple[Tensor, Tensor]]) -> list[Cut]:
    """The cuts, with what positions say of those that go by distance: see `_with_positions`.

    `sides` makes the positions of queries (S,) and of keys (T,): calls without biases need none.
    """
    if all(cut.row != BY_DISTANCE for cut in cuts):
        return cuts
    queries, keys = sides()
    return [_with_positions(cut, queries, keys) if cut.row == BY_DISTANCE else cut for cut in cuts]


def _with_positions(cut: Cut, queries: Tensor, keys: Tensor) -> Cut:
    """A cut that goes by distance, with `apart` as it is.

    Kernels that go by distance count on positions that rise in a tile. They do not where pieces
    with steps are one
    tile: such pairs have a row of their own each.
    """
    pairs = (queries, cut.rows), (keys, cut.columns)
    sides = [torch.cat([x[slice(*span)] for span in spans]).numpy() for x, spans in pairs]
    runs = [
        [x[slice(*span)] for x, span in zip(sides, tile, strict=True)] for tile in cut.call.tiles
    ]
    steps = [run[1:] - run[:-1] for tile in runs for run in tile]
    if any((step < 1).any() for step in steps):
        return cut._replace(row=None)
    neighbours = all((step == 1).all() for step in steps)
    return cut._replace(apart=tuple(int(kv[0] - q[0]) for q, kv in runs) if neighbours else None)
