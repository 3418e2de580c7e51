"""Routes: only visible tokens are sent, in few stages, to places that GPUs' kernels may take.

tests/conformance shows that each pair is computed once, and that gradients are added where they
belong.
"""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from bmt_burst import Layout, Mask
from bmt_burst.sequence.layout import LAYOUTS
from bmt_burst.sequence.tiling import Tiling
from bmt_burst.strategies.ring.routes import Round, Routes
from bmt_burst.transport.packing import Packing
from tests.cases import random_layout, random_mask

GRIDS = [(2, 1), (5, 1), (8, 1), (3, 2), (2, 3), (1, 3)]
CASES = 10  # of each grid


@dataclass
class Ring:
    """The routes of all ranks."""

    tiling: Tiling
    inner: int
    routes: list[Routes]
    rounds: list[tuple[Round, ...]]
    limits: tuple[int | None, int | None]

    def host_of(self, rank: int) -> range:
        """The ranks of a rank's host."""
        first = rank // self.inner * self.inner
        return range(first, first + self.inner)


def ring_of(mask, layout, inner, outer, limits=(None, None), transposed=False) -> Ring:
    tiling = Tiling(mask.transposed if transposed else mask, layout)
    routes = [Routes(tiling, inner, outer, rank) for rank in range(inner * outer)]
    return Ring(tiling, inner, routes, [each.rounds(*limits) for each in routes], limits)


def rings(inner, outer):
    """Random ones, and causal ones in every layout."""
    size = inner * outer
    for seed in range(CASES):
        chance = random.Random(seed)
        mask = random_mask(chance, chance.randint(size, 6 * size + 5))
        limits = tuple(chance.choice((None, 1, chance.randint(1, 20))) for _ in range(2))
        layout = random_layout(chance, mask, size)
        yield ring_of(mask, layout, inner, outer, limits, chance.random() < 0.5)
    for name, limit in itertools.product(LAYOUTS, (None, 9)):
        mask = Mask.causal(7 * size + size // 2)
        yield ring_of(mask, Layout.named(name, mask.seq_len, size), inner, outer, (limit, limit))


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_stages_are_few_and_within_limits(inner, outer):
    for ring in rings(inner, outer):
        limit, back = ring.limits
        for number in range(outer):
            for host in range(outer):
                stages = [ring.rounds[rank][number].stages for rank in ring.host_of(host * inner)]
                hops = [stage.hops for stage in stages[0]]
                assert all([stage.hops for stage in other] == hops for other in stages)
                sizes = [len(part) for part in hops]
                every = [hop for part in hops for hop in part]
                assert every == sorted(every)
                assert max(sizes, default=0) - min(sizes, default=0) <= 1
                if sizes:  # the stage that nothing overlaps with is not the longest
                    assert sizes[-1 if back else 0] == min(sizes)
                for stage in itertools.chain(*stages):
                    if len(stage.hops) > 1:
                        assert stage.tokens <= (limit or stage.tokens)
                        assert stage.returned_tokens <= (back or stage.returned_tokens)
                if limit is None and back is None:
                    assert len(hops) <= 1
        for routes, rounds in zip(ring.routes, ring.rounds, strict=True):
            for stage in itertools.chain(*(round_.stages for round_ in rounds)):
                most = routes.landing_tokens(stage.hops)
                assert stage.tokens <= most <= routes.landing_tokens(range(1, inner))


def test_packed_tensors_start_at_multiples_of_256_bytes():
    """CPUs compute with tensors that start anywhere."""
    packing = Packing(3, (((3, 5), torch.bfloat16), ((7,), torch.float32), ((), torch.float16)))
    memory = torch.zeros(packing.nbytes(11), dtype=torch.uint8)
    starts = [x.data_ptr() - memory.data_ptr() for x in packing.views(memory, 11)]
    assert starts == [0, 1024, 2048]
