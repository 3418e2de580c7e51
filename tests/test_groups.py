"""SequenceParallel with layouts: names for any length, Layout objects for one."""

import copy
import pickle

import pytest
import torch

from bmt_burst import Layout, Mask, SequenceParallel, simulate
from tests.refusals import refusal

MASK = Mask.documents((0, 5, 6, 21))


def test_a_layout_of_ones_own_cuts_and_joins_as_a_named_one():
    x = torch.arange(2 * 21 * 3).view(2, 21, 3)
    layout = Layout.balanced(MASK, 3)

    def work(ring):
        named = SequenceParallel(ring.rank, 3, process_group=ring)
        sp = named.with_layout(layout)
        assert (named.layout, sp.layout) == ("zigzag", layout)
        assert sp.groups == named.groups | {"layout": layout}
        assert sp.positions(21).equal(layout.positions(ring.rank))
        assert sp.shard(x).equal(layout.shard(x, ring.rank))
        assert sp.unshard(sp.shard(x), 21).equal(x)
        assert sp.with_layout("striped").unshard(sp.with_layout("striped").shard(x), 21).equal(x)
        return sp.with_layout("zigzag") == named

    assert all(simulate(3, work))


def test_a_layout_is_for_its_length_and_its_ranks():
    sp = SequenceParallel(1, 2).with_layout(Layout.balanced(MASK, 2))
    for call in (
        lambda: sp.positions(20),
        lambda: sp.shard(torch.zeros(1, 20)),
        lambda: sp.layout_of(20),
    ):
        with refusal("ValueError: the layout is for sequences of 21 tokens, got one of 20"):
            call()
    with pytest.raises(ValueError, match="expected a layout on 2 ranks, got one on 3"):
        sp.with_layout(Layout.zigzag(21, 3))
    with pytest.raises(ValueError, match="unknown layout 'ring'"):
        sp.with_layout("ring")
    with pytest.raises(TypeError, match=r"layout must be one of .*, got int"):
        sp.with_layout(3)
    assert SequenceParallel().with_layout("striped").layout_of(7) == Layout.striped(7, 1)


def test_a_layout_of_ones_own_is_copied_and_pickled_with_its_groups():
    sp = SequenceParallel().with_layout(Layout.balanced(MASK, 1))
    for again in (copy.deepcopy(sp), pickle.loads(pickle.dumps(sp))):
        assert again == sp
        assert again.layout_of(21) == Layout.balanced(MASK, 1)
