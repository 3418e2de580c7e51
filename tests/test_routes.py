"""Routes by brute force: every visible pair once, both ends of a message at one place, nothing on
top of another.
"""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from bmt_burst import Layout, Mask
from bmt_burst.sequence.layout import LAYOUTS
from bmt_burst.sequence.span import length
from bmt_burst.sequence.tile import Tile
from bmt_burst.sequence.tiling import Tiling
from bmt_burst.strategies.ring.routes import Landing, Round, Routes, Stage
from bmt_burst.strategies.ring.schedule import Schedule
from bmt_burst.transport.packing import Packing
from tests.cases import random_layout, random_mask
from tests.test_tiling import painted

GRIDS = [(2, 1), (3, 1), (5, 1), (8, 1), (3, 2), (2, 3), (4, 2), (1, 3)]
CASES = 10  # of each grid


@dataclass
class Ring:
    """The routes of all ranks. Tokens have names: (owner, token of its shard)."""

    tiling: Tiling
    schedule: Schedule
    routes: list[Routes]
    rounds: list[tuple[Round, ...]]
    limits: tuple[int | None, int | None]

    def held(self, round_: Round) -> list[tuple[int, int]]:
        """The names of the tokens that are there of a round's root."""
        return [(round_.root, t) for span in round_.held for t in range(*span)]

    def tiles(self, rank: int, landing: Landing) -> list[Tile]:
        """Return the tiles of a rank's queries with the tokens in memory."""
        return self.tiling.tiles(rank, landing.runs, landing.places)

    def stages(self):
        """(rank, number of the round, the same stage of all ranks of its host) of all."""
        for rank, rounds in enumerate(self.rounds):
            host = self.schedule.ranks(rank // self.schedule.inner)
            for number, round_ in enumerate(rounds):
                for index in range(len(round_.stages)):
                    yield rank, number, [self.rounds[peer][number].stages[index] for peer in host]

    def landed(self, number: int, rank: int, stages: list[Stage]) -> list[tuple[int, int]]:
        """The names of the tokens that land on a rank in a stage."""
        inner = self.schedule.inner
        place, names = rank % inner, [None] * stages[rank % inner].tokens
        for peer, there in enumerate(stages):
            held = self.held(self.rounds[rank - place + peer][number])
            for out in there.sends:
                if out.peer == place:
                    assert out.total == len(names)
                    put(names, out.at, held[slice(*out.span)])
        return names


def put(names, at, new):
    """Into places that are free and there."""
    assert names[at : at + len(new)] == [None] * len(new)
    names[at : at + len(new)] = new


def ring_of(mask, layout, inner, outer, limits=(None, None), transposed=False) -> Ring:
    tiling = Tiling(mask.transposed if transposed else mask, layout)
    schedule = Schedule(inner, outer)
    routes = [Routes(tiling, schedule, rank) for rank in range(schedule.size)]
    return Ring(tiling, schedule, routes, [each.rounds(*limits) for each in routes], limits)


def rings(inner, outer):
    """Random ones, and causal ones in every layout."""
    size = inner * outer
    for seed in range(CASES):
        chance = random.Random(seed)
        mask = random_mask(chance, chance.randint(size, 6 * size + 5))
        limits = tuple(chance.choice((None, 1, chance.randint(1, 20))) for _ in range(2))
        yield ring_of(
            mask, random_layout(chance, mask, size), inner, outer, limits, chance.random() < 0.5
        )
    for name, limit in itertools.product(LAYOUTS, (None, 9)):
        mask = Mask.causal(7 * size + size // 2)
        yield ring_of(mask, Layout.named(name, mask.seq_len, size), inner, outer, (limit, limit))


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_every_visible_pair_is_computed_once(inner, outer):
    """Following the messages to where they land, and there the tiles."""
    for ring in rings(inner, outer):
        positions = [ring.tiling.layout.positions(rank) for rank in range(ring.schedule.size)]
        count = torch.zeros(ring.tiling.mask.seq_len, ring.tiling.mask.seq_len, dtype=torch.int)

        def add(rank, tiles, names, positions=positions, count=count):
            mine, keys = (
                positions[rank],
                torch.tensor([positions[owner][t] for owner, t in names], dtype=torch.long),
            )
            assert keys.unique().numel() == keys.numel()
            count[mine.unsqueeze(1), keys] += painted(tiles, len(mine), len(keys))

        for rank, rounds in enumerate(ring.rounds):
            add(rank, ring.tiling.own_tiles(rank), [(rank, t) for t in range(len(positions[rank]))])
            for round_ in rounds:
                add(rank, ring.tiles(rank, round_.landing), ring.held(round_))
        for rank, number, stages in ring.stages():
            add(
                rank,
                ring.tiles(rank, stages[rank % inner].landing),
                ring.landed(number, rank, stages),
            )
        assert count.equal(ring.tiling.mask.dense().int())


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_what_lands_is_what_its_receiver_expects(inner, outer):
    """All of its memory, from the places that it expects it from, in one order, as transports
    demand.
    """
    for ring in rings(inner, outer):
        for rank, number, stages in ring.stages():
            place = rank % inner
            names, here = ring.landed(number, rank, stages), stages[place]
            for peer, at in here.sources:
                assert {owner % inner for owner, _ in names[slice(*at)]} == {peer}
            assert sum(length(at) for _, at in here.sources) == len(names) == here.tokens
            assert None not in names
            for peer, there in enumerate(stages):
                sent = [(out.at, length(out.span)) for out in there.sends if out.peer == place]
                assert sent == [
                    (at[0], length(at)) for source, at in here.sources if source == peer
                ]


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_gradients_come_home_to_the_tokens_they_belong_to(inner, outer):
    """Each of a token that landed somewhere comes home once: to the rank that sent it."""
    for ring in rings(inner, outer):
        for rank, number, stages in ring.stages():
            place, home = rank % inner, [None] * stages[rank % inner].gradient_tokens
            for peer, there in enumerate(stages):
                names = [(peer, name) for name in ring.landed(number, rank - place + peer, stages)]
                legs = [out for out in there.returns if out.peer == place]
                for out in legs:
                    assert out.total == len(home)
                    put(home, out.at, names[slice(*out.span)])
                expected = [
                    (at[0], length(at))
                    for source, at in stages[place].gradient_sources
                    if source == peer
                ]
                assert [(out.at, length(out.span)) for out in legs] == expected
            held = ring.held(ring.rounds[rank][number])
            sent = [(out.peer, held[t]) for out in stages[place].sends for t in range(*out.span)]
            assert home == sent
            ends = [at[1] for _, at in stages[place].gradient_sources]
            assert ends == [*itertools.accumulate(length(x.span) for x in stages[place].sends)]


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_hosts_borrow_the_tokens_that_they_attend_to(inner, outer):
    """A host has the tokens of a root that any of its ranks attends to, as lent by the owner."""
    for ring in rings(inner, outer):
        layout, dense = ring.tiling.layout, ring.tiling.mask.dense()
        for rank, rounds in enumerate(ring.rounds):
            host = rank // inner
            assert len(rounds) == outer
            for number, round_ in enumerate(rounds):
                assert round_.root == ring.schedule.block(rank, number, 0)
                if not number:
                    assert not round_.lent and not round_.landing.runs
                    continue
                owner = ring.rounds[round_.root][number]
                assert (owner.lent, owner.lent_to) == (round_.held, host)
                rows = torch.cat([layout.positions(other) for other in ring.schedule.ranks(host)])
                seen = dense[rows][:, layout.positions(round_.root)].any(0)
                borrowed = torch.zeros_like(seen)
                for span in round_.held:
                    borrowed[slice(*span)] = True
                assert borrowed[seen].all()
                if (
                    all(run.step == 1 for run in layout.runs(round_.root))
                    and len(ring.tiling.mask.slices) == 1
                ):
                    assert borrowed.equal(seen)


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_stages_are_few_and_within_limits(inner, outer):
    for ring in rings(inner, outer):
        limit, back = ring.limits
        for number in range(outer):
            for host in range(outer):
                stages = [ring.rounds[rank][number].stages for rank in ring.schedule.ranks(host)]
                hops = [stage.hops for stage in stages[0]]
                assert all([stage.hops for stage in other] == hops for other in stages), (
                    "alike on all ranks of a host"
                )
                sizes = [len(part) for part in hops]
                assert sorted(hop for part in hops for hop in part) == [
                    hop for part in hops for hop in part
                ]
                assert max(sizes, default=0) - min(sizes, default=0) <= 1
                if sizes:
                    assert sizes[-1 if back else 0] == min(sizes), (
                        "what nothing overlaps with is not the longest"
                    )
                for stage in itertools.chain(*stages):
                    if len(stage.hops) > 1:
                        assert stage.tokens <= (limit or stage.tokens)
                        assert stage.gradient_tokens <= (back or stage.gradient_tokens)
                if limit is None and back is None:
                    assert len(hops) <= 1
        for routes, rounds in zip(ring.routes, ring.rounds, strict=True):
            for stage in itertools.chain(*(round_.stages for round_ in rounds)):
                assert (
                    stage.tokens
                    <= routes.landing_tokens(stage.hops)
                    <= routes.landing_tokens(range(1, inner))
                )


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_a_rank_knows_whether_it_has_a_part_in_what_travels(inner, outer):
    """It does where a rank of its host attends to another one, or another host to it."""
    for ring in rings(inner, outer):
        layout, dense = ring.tiling.layout, ring.tiling.mask.dense()
        exact = len(ring.tiling.mask.slices) == 1 and all(run.step == 1 for run in layout.runs(0))
        for rank, routes in enumerate(ring.routes):
            mine = ring.schedule.ranks(rank // inner)
            seen = [
                dense[layout.positions(r)].any(0).index_fill(0, layout.positions(r), False).any()
                for r in mine
            ]
            others = [layout.positions(r) for r in range(layout.size) if r not in mine]
            lent = (
                dense[torch.cat(others)][:, layout.positions(rank)].any()
                if others
                else torch.tensor(False)
            )
            expected = bool(torch.stack([*seen, lent]).any())
            assert routes.traffic() == expected if exact else routes.traffic() >= expected


def test_only_visible_tokens_are_sent():
    """Rank r of 4 sees the last w - 1 tokens before its own; whole documents of a rank do not
    travel at all.
    """
    layout = Layout.contiguous(64, 4)
    ring = ring_of(Mask.window(64, 6), layout, 4, 1)
    for rank, [round_] in enumerate(ring.rounds):
        assert [(s.hops, s.tokens) for s in round_.stages] == [((1,), 5 if rank else 0)]
        assert [(length(out.span), out.peer) for out in round_.stages[0].sends] == (
            [(5, rank + 1)] if rank < 3 else []
        )
    for [round_] in ring_of(Mask.documents(range(0, 65, 8)), layout, 4, 1).rounds:
        assert round_.stages == ()
        assert round_.landing.tokens == 0


@pytest.mark.parametrize("batch", [1, 3])
def test_packed_tensors_do_not_overlap_and_messages_are_where_the_views_are(batch):
    packing = Packing(
        batch, (((3, 5), torch.bfloat16), ((7,), torch.float32), ((3, 5), torch.bfloat16))
    )
    tokens, span = 11, (4, 9)
    memory = torch.zeros(packing.nbytes(tokens), dtype=torch.uint8)
    tensors = [torch.rand(batch, 8, *shape).to(dtype) for shape, dtype in packing.entries]
    puts = packing.puts(tensors, (2, 7), 1, 4, tokens)
    arrivals = packing.arrivals(1, span, tokens)
    views = packing.views(memory, tokens)
    for x, view, (shape, dtype) in zip(tensors, views, packing.entries, strict=True):
        assert view.shape == (batch, tokens, *shape)
        assert view.dtype == dtype
        assert (view.data_ptr() - memory.data_ptr()) % 256 == 0
        for row in range(batch):
            peer, offset, nbytes = next(arrivals)
            put = next(puts)
            assert put[1:] == (peer, offset) == (1, offset)
            assert put.tensor.equal(x[row, 2:7])
            place = memory[offset:][:nbytes]
            assert not place.any()
            place.fill_(1)
            part = view[row, slice(*span)]
            assert part.view(torch.uint8).eq(1).all()
            assert part.nbytes == nbytes
    assert packing.token_bytes() == batch * (15 * 2 + 7 * 4 + 15 * 2)
    assert memory.sum() == packing.token_bytes() * 5
