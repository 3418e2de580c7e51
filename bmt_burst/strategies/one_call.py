"""One call: the ring in one stage, which has the own block too.

The ring computes the own block while others arrive, and merges partial results. Where blocks are
short, kernel launches and the host take longer than the exchange. So here each rank first gathers
all it attends to, and then needs one kernel call for each kind of band: for causal documents or a
window, a single one. The backward gathers again, and returns the gradients.

            gather                          compute
    rank 0  k0 | k0 k1 k2 k3                q0 x k0,  q3 x (k0 k1 k2 k3)     causal, in one call
    rank 1  k0 k1 | k0 k1 k2                q1 x (k0 k1),  q2 x (k0 k1 k2)

The picture shows two ranks with a causal mask and layout zigzag. The tiles of a kernel call share
no keys, so some keys land twice. Where nothing is gained, the plan is all-gather's.
"""

from __future__ import annotations

from dataclasses import replace

from ..sequence.gathered_calls import kernel_calls
from ..sequence.layout import RunFields
from ..sequence.span import in_turn
from ..sequence.tile import TileFields
from . import Problem, Strategy
from .compute import ALL
from .ring import AllGather, RingPlan, make_pass
from .ring.payload import Payload
from .ring.program import Program
from .ring.routes import Landing, Round, SeenRuns

_MOST_COPIES = 2  # of a rank's tokens that land on a rank, on average


class OneCall(Strategy):
    """A strategy without partial results, for short blocks. It always sends keys and values."""

    name = "one-call"
    takes_hosts = takes_scorings = False

    def plan(self, problem: Problem, rank: int) -> RingPlan:
        layouts = problem.layout, problem.kv_layout or problem.layout
        # With steps, no neighbours lie in one tile.
        if all(r.step == 1 for layout in layouts for shard in layout.shards for r in shard):
            plan = OneCallPlan(problem, rank)
            if plan.gains():
                return plan
        return AllGather().plan(problem, rank)


class OneCallPlan(RingPlan):
    """The programs of one rank: routes of the ring whose only stage has the own block too."""

    def __init__(self, problem: Problem, rank: int):
        super().__init__(replace(problem, forward="kv", backward="kv"), rank)
        self._seen = SeenRuns(problem.inner, rank, is_own=True)
        for viewer in range(problem.inner):
            runs, tiles = self._gather(viewer)
            self._seen.add(viewer, runs)
            if viewer == rank:
                self._calls = kernel_calls(tiles)

    def gains(self) -> bool:
        """Whether a rank needs another one's tokens, and none land too often."""
        by_hop = list(zip(*self._seen.tokens, strict=True))  # of each rank
        most = max(map(max, by_hop))
        return any(map(any, by_hop[1:])) and most <= _MOST_COPIES * self.problem.most_keys

    def _gather(self, viewer: int) -> tuple[list[RunFields], list[TileFields]]:
        """Return the keys that a rank gathers, as runs in the order in which they land, and the
        tiles of its queries with them. The keys of each tile follow those of the tile before.
        """
        everyone = (0, self._tiling.mask.kv_len)
        by_position = self._tiling.tiles(viewer, [(0, 1, viewer, everyone)], [everyone])
        by_position.sort(key=lambda tile: tile[0])  # the tiles of a call rise on both sides
        runs, tiles = list[RunFields](), list[TileFields]()
        landing = in_turn(keys for _, keys, *_ in by_position)
        for (q, _, low, high), (keys, at) in zip(by_position, landing, strict=True):
            tiles.append((q, at, low, high))
            for run in self._tiling.runs_at(keys):
                if runs and runs[-1][2] == run[2] and runs[-1][3][1] == run[3][0]:
                    # neighbours in a shard that land one after the other are one message
                    start, step, owner, span = runs.pop()
                    run = start, step, owner, (span[0], run[3][1])
                runs.append(run)
        return runs, tiles

    def _make_program(self, payload: Payload) -> Program:
        stage = self._seen.stage(tuple(range(self.problem.inner)))
        nothing = Landing((), (), 0)  # the own block is in the stage
        passes = [make_pass(payload, self.problem.sizes, ALL, ALL)]
        rounds = (Round(self.rank, self._seen.held, nothing, (stage,)),)
        steps = passes, rounds, {(0, 0): self._calls}
        return Program(self.problem, self.rank, payload, (), *steps, has_one_stage=True)

    def _most_bytes(self, payload: Payload) -> tuple[int, int]:
        tokens = _MOST_COPIES * self.problem.most_keys * self.problem.inner
        there, back = (x.token_bytes() * tokens for x in payload.packings(self.problem.sizes))
        return there, back
