"""Routes by brute force: every visible pair once, both ends of a message at one place, nothing on top of another."""

import itertools

import pytest
import torch
from bmt_burst.packing import Packing
from bmt_burst.routes import Routes

from bmt_burst import Layout, Schedule

GRIDS = [(2, 1), (3, 1), (8, 1), (3, 2), (2, 3), (4, 2)]


def all_routes(inner, outer, tokens_a_rank=7):
    size = inner * outer
    for layout in ("zigzag", "striped", "contiguous"):
        for causal in (True, False):
            for travels in ("q", "kv"):
                for width in (1, 2, 3, inner):
                    whole = Layout(layout, size * tokens_a_rank + size // 2, size)
                    yield Routes(whole, Schedule(inner, outer), causal, travels, width, width % 2 == 0)


def all_groups(inner, outer):
    """(routes, place of a rank on its host, a group of it, the same group of every rank of the host), of all."""
    for routes in all_routes(inner, outer):
        for host, place in itertools.product(range(outer), range(inner)):
            by_place = [routes.rounds(host * inner + other) for other in range(inner)]
            for number, groups in enumerate(by_place[place]):
                for index, group in enumerate(groups[1:], 1):
                    yield routes, place, group, [rounds[number][index] for rounds in by_place]


def landed(total, arriving):
    """What lies at each of `total` places, given legs and the names of what they bring, in order."""
    places = [None] * total
    for leg, names in arriving:
        assert leg.total == total
        assert len(names) == leg.span[1] - leg.span[0]
        for at, name in enumerate(names, leg.at):
            assert places[at] is None
            places[at] = name
    return places


def named(routes, piece):
    """(block, token) of each token of a piece."""
    return [(piece.step.block, t) for t in range(*(piece.tile.q if routes.travels == "q" else piece.tile.kv))]


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_tokens_of_a_group_are_those_that_are_looked_at(inner, outer):
    """Following the legs, the token that lands at each place of a group is the one that the piece's tile names."""
    for routes, place, group, peers in all_groups(inner, outer):
        legs = [(there, leg) for there in peers for leg in there.sends if leg.peer == place]
        arriving = [(leg, [(there.root, there.held[0] + t) for t in range(*leg.span)]) for there, leg in legs]
        assert landed(group.tokens, arriving) == [name for p in group.pieces for name in named(routes, p)]


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_gradients_come_home_to_the_tokens_they_belong_to(inner, outer):
    for routes, place, group, peers in all_groups(inner, outer):
        arriving = []
        for peer, there in enumerate(peers):
            in_group = [zip(range(*p.at), named(routes, p), strict=True) for p in there.pieces]
            names = dict(itertools.chain.from_iterable(in_group))
            legs = [leg for leg in there.returns if leg.peer == place]
            arriving += [(leg, [(peer, names[at]) for at in range(*leg.span)]) for leg in legs]
        assert landed(group.home_tokens, arriving) == [
            (entry.peer, (group.root, group.held[0] + t)) for entry in group.homecoming for t in range(*entry.span)
        ]


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_hosts_hand_on_what_is_looked_at_from_then_on(inner, outer):
    """Each token that a rank looks at in a round came to its host, none came that nobody looks at there or later."""
    for routes in all_routes(inner, outer):
        for rank in range(inner * outer):
            host, place = divmod(rank, inner)
            for number, (opening, *groups) in enumerate(routes.rounds(rank)):
                looked_at = [
                    (piece.tile.q if routes.travels == "q" else piece.tile.kv)
                    for later in range(number, outer)
                    for other in range(inner)
                    for group in routes.rounds((host - later + number) % outer * inner + other)[later]
                    for piece in group.pieces
                    if piece.step.block == opening.root
                ]
                if number:
                    hull = (min(a for a, _ in looked_at), max(b for _, b in looked_at)) if looked_at else (0, 0)
                    assert opening.held == hull
                start = opening.held[0]
                assert opening.tokens == opening.held[1] - start
                for piece in opening.pieces:
                    side = piece.tile.q if routes.travels == "q" else piece.tile.kv
                    assert (piece.at[0] + start, piece.at[1] + start) == side
                [step] = opening.steps
                if step.outer:
                    there = routes.rounds(step.outer.send_to * inner + place)[number + 1][0]
                    sent = [start + t for t in range(*opening.onward)]
                    assert (there.root, sent) == (opening.root, list(range(*there.held)))
                    assert routes.rounds(there.root)[number + 1][-1].lent == there.held
                assert all(group.held == opening.held for group in groups)


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_every_block_is_in_one_group_and_no_group_is_wider_than_allowed(inner, outer):
    for routes in all_routes(inner, outer):
        visits, homes = zip(*(routes.landing_tokens(host) for host in range(outer)), strict=True)
        for rank in range(inner * outer):
            groups = [group for round_ in routes.rounds(rank) for group in round_]
            assert sorted(s.block for g in groups for s in g.steps) == list(range(inner * outer))
            assert all(len(g.steps) <= routes.width for g in groups)
            for groups in routes.rounds(rank):
                sizes = [len(g.steps) for g in groups[1:]]
                assert sizes == sorted(sizes, reverse=routes.returning)
                assert max(sizes, default=0) - min(sizes, default=0) <= 1
                assert max((g.tokens for g in groups[1:]), default=0) <= visits[rank // inner]
                assert max((g.home_tokens for g in groups[1:]), default=0) <= homes[rank // inner]


@pytest.mark.parametrize("batch", [1, 3])
def test_packed_tensors_do_not_overlap_and_messages_are_where_the_views_are(batch):
    packing = Packing(batch, (((3, 5), torch.bfloat16), ((7,), torch.float32), ((3, 5), torch.bfloat16)))
    tokens, span = 11, (4, 9)
    memory = torch.zeros(packing.nbytes(tokens), dtype=torch.uint8)
    views = packing.views(memory, tokens)
    for view, (shape, dtype) in zip(views, packing.rows, strict=True):
        assert view.shape == (batch, tokens, *shape)
        assert view.dtype == dtype
        assert (view.data_ptr() - memory.data_ptr()) % 256 == 0
    for index, row, offset, nbytes in packing.messages(tokens, span):
        assert not memory[offset : offset + nbytes].any()
        memory[offset : offset + nbytes] = 1
        part = views[index][row, slice(*span)]
        assert part.is_contiguous()
        assert (part.data_ptr() - memory.data_ptr(), part.nbytes) == (offset, nbytes)
    assert packing.token_bytes() == batch * (15 * 2 + 7 * 4 + 15 * 2)
    assert memory.sum() == packing.token_bytes() * 5
