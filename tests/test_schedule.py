"""The schedule against its invariants, by playing all ranks at once."""

import itertools

import pytest

from bmt_burst.strategies.ring.schedule import Schedule

GRIDS = [*itertools.product((1, 2, 3, 8), (1, 2, 4)), (64, 1), (37, 1), (8, 8), (7, 9), (1, 64)]


def moments(schedule: Schedule):
    """Return each (round, hop), in the order in which ranks attend to them."""
    return itertools.product(range(schedule.outer), range(schedule.inner))


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_every_block_visits_every_rank_once_its_own_first(inner, outer):
    schedule = Schedule(inner, outer)
    for rank in range(schedule.size):
        blocks = [schedule.block(rank, *moment) for moment in moments(schedule)]
        assert sorted(blocks) == list(range(schedule.size))
        assert blocks[0] == rank


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_ranks_send_one_block_and_receive_one_at_a_time(inner, outer):
    """What all ranks attend to at a hop are all blocks, and so is what they open a round with."""
    schedule = Schedule(inner, outer)
    for moment in moments(schedule):
        assert sorted(schedule.block(rank, *moment) for rank in range(schedule.size)) == list(
            range(schedule.size)
        )


@pytest.mark.parametrize(("inner", "outer"), GRIDS)
def test_blocks_are_at_hand_in_the_host_or_come_straight_from_their_owner(inner, outer):
    """A round opens with the block of the same place of another host; at its hops come those that
    places opened with.

    So a gradient that goes back to the rank that opened the round with the block crosses hosts once
    a round.
    """
    schedule = Schedule(inner, outer)
    for rank in range(schedule.size):
        host, place = divmod(rank, inner)
        for number, hop in moments(schedule):
            block = schedule.block(rank, number, hop)
            opener = host * inner + (place - hop) % inner
            assert opener in schedule.ranks(host)
            assert schedule.block(opener, number, 0) == block
            assert block % inner == opener % inner
            assert block // inner == schedule.host_of_round(host, number)


def test_a_schedule_prints():
    lines = str(Schedule(3, 2)).splitlines()
    assert lines[0].startswith("2 x 3 ranks")
    assert lines[6].split() == ["rank", "5:", "5", "4", "3", "2", "1", "0"]


def test_wrong_sizes_are_refused():
    for rank in (2, -1):
        with pytest.raises(ValueError, match=f"expected a rank from 0 to 1, got {rank}"):
            Schedule(2).block(rank, 0, 0)
    for sizes in ((0,), (1, 0), (-1, 1)):
        with pytest.raises(ValueError, match="inner and outer of at least 1"):
            Schedule(*sizes)
