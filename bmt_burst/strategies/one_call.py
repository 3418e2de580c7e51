"""One call: the ring in one stage, which has the own block too.

The ring computes the own block while others arrive, and merges partial results. Where blocks are
short, kernel launches and the host take longer than the exchange. So here each rank first gathers
all it attends to, and then needs one kernel call for each kind of band: for causal documents or a
window, a single one. The backward gathers again, and returns the gradients.

            gather                          compute
    rank 0  k0 | k0 k1 k2 k3                q0 x k0,  q3 x (k0 k1 k2 k3)     causal, in one call
    rank 1  k0 k1 | k0 k1 k2                q1 x (k0 k1),  q2 x (k0 k1 k2)

The picture shows two ranks with a causal mask and layout zigzag. The tiles of a kernel call share
no keys, so some keys land twice. With a causal mask all ranks still receive equally much. Only the
routes differ from those of the ring: `SeenRuns` gets the runs in the order in which they land.

A layout with steps has no neighbours that could lie in one tile. There, if tokens would land more
than twice on average, and if no rank needs another one's tokens, nothing is gained. The plan is
all-gather's then, which computes the own block while others arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..sequence.gathered_calls import kernel_calls
from ..sequence.layout import RunFields
from ..sequence.span import in_turn, length
from ..sequence.tile import TileFields
from ..sequence.tiling import Tiling
from . import Problem, Strategy
from .all_gather import AllGather
from .compute import ALL
from .ring import RingPlan, make_pass
from .ring.payload import Payload
from .ring.program import Program
from .ring.routes import Landing, Round, SeenRuns

_MOST_COPIES = 2  # of a rank's tokens that land on a rank, on average

# The keys that a rank gathers, as runs in the order in which they land, and the tiles of its
# queries with these keys.
Gathered = tuple[list[RunFields], list[TileFields]]


class OneCall(Strategy):
    """A strategy without partial results, for short blocks. It always sends keys and values."""

    name = "one-call"
    takes_hosts = takes_scorings = False

    def plan(self, problem: Problem, rank: int) -> RingPlan:
        layout = problem.layout
        if all(positions.step == 1 for shard in layout.shards for positions in shard):
            tiling = Tiling(problem.mask, layout)
            everyone = [_gather(tiling, each) for each in range(layout.size)]
            if _gains(problem, everyone):
                return OneCallPlan(problem, rank, everyone)
        return AllGather().plan(problem, rank)


def _gains(problem: Problem, everyone: Sequence[Gathered]) -> bool:
    """Whether a rank needs another one's tokens, and none land too often."""
    tokens = Counter[tuple[int, int]]()  # that land, by the rank where they do and their owner
    for rank, (runs, _) in enumerate(everyone):
        for _, _, owner, span in runs:
            tokens[rank, owner] += length(span)
    is_sent = any(rank != owner for rank, owner in tokens)
    return is_sent and max(tokens.values()) <= _MOST_COPIES * problem.most_tokens


class OneCallPlan(RingPlan):
    """The programs of one rank. `everyone` is what each rank gathers."""

    def __init__(self, problem: Problem, rank: int, everyone: Sequence[Gathered]):
        super().__init__(replace(problem, backward="kv"), rank)
        _, tiles = everyone[rank]
        self.calls = kernel_calls(tiles)
        # The only round. Its only stage has the hop to the rank itself too.
        seen = SeenRuns(problem.inner, rank, is_own=True)
        for viewer, (runs, _) in enumerate(everyone):
            seen.add(viewer, runs)
        root = Landing((), (), sum(map(length, seen.held)))
        stages = (seen.stage(tuple(range(problem.inner))),)
        self.round = Round(rank, seen.held, root, stages)

    def _make_program(self, payload: Payload) -> Program:
        return Program(
            problem=self.problem,
            rank=self.rank,
            payload=payload,
            own=(),
            passes=[make_pass(payload, self.problem.sizes, ALL, ALL)],
            rounds=(self.round,),
            calls={(0, 0): self.calls},
            has_one_stage=True,
        )

    def _most_bytes(self, payload: Payload) -> tuple[int, int]:
        sizes, tokens = self.problem.sizes, _MOST_COPIES * self.problem.most_tokens
        packings = payload.packing(sizes), payload.return_packing(sizes)
        there, back = (p.token_bytes() * tokens * self.problem.inner for p in packings)
        return there, back


def _gather(tiling: Tiling, rank: int) -> Gathered:
    """Return the keys of each tile after those of the tile before."""
    tokens = tiling.mask.seq_len
    by_position = tiling.tiles(rank, [(0, 1, rank, (0, tokens))], [(0, tokens)])
    by_position.sort(key=lambda tile: tile[0])  # the tiles of a call rise on both sides
    runs, tiles = list[RunFields](), list[TileFields]()
    landing = in_turn(keys for _, keys, *_ in by_position)
    for (q, _, low, high), (keys, at) in zip(by_position, landing, strict=True):
        tiles.append((q, at, low, high))
        for run in tiling.runs_at(keys):
            if runs and runs[-1][2] == run[2] and runs[-1][3][1] == run[3][0]:
                # neighbours in a shard that land one after the other are one message
                start, step, owner, span = runs.pop()
                run = start, step, owner, (span[0], run[3][1])
            runs.append(run)
    return runs, tiles
