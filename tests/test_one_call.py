"""One call: what lands, which kernel calls there are, and attention against fp64 through the
simulator.
"""

import random
import threading

import pytest
import torch

from bmt_burst import Layout, Mask, burst_attn_func, simulate
from bmt_burst.sequence.span import length
from bmt_burst.strategies import load, one_call
from bmt_burst.strategies.one_call import OneCallPlan
from bmt_burst.strategies.ring import RingPlan
from tests.helpers import (
    CPU_KERNELS,
    dense_results,
    problem,
    random_layout,
    random_mask,
    random_qkv,
    ring_results,
)
from tests.test_ulysses import assert_equal

SCALE = 0.31
HEADS = [(8, 8), (8, 2), (6, 3), (3, 1)]


def plans(mask: Mask, layout: Layout, **fields) -> list:
    call = problem(mask, layout, layout.size, **fields)
    return [load("one-call").plan(call, rank) for rank in range(layout.size)]


@pytest.mark.parametrize("part", range(4))
def test_any_mask_and_layout_equals_dense(part, monkeypatch):
    """Also if tokens may land only once."""
    monkeypatch.setattr(one_call, "_MOST_COPIES", 1 + part % 2)
    for seed in range(part, 72, 4):
        chance = random.Random(seed)
        size = chance.choice((1, 2, 3, 4, 8))
        mask = random_mask(chance, chance.randint(size, 70))
        layout = random_layout(chance, mask, size)
        tensors = random_qkv(
            chance.choice((1, 2, 3)), mask.seq_len, *chance.choice(HEADS), 8, seed=seed
        )
        options = {"mask": mask, "flash": chance.choice(CPU_KERNELS), "strategy": "one-call"}
        got = ring_results(layout, tensors, SCALE, size, **options)
        assert_equal(got, dense_results(mask, tensors, SCALE), tensors[3])


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "mask",
    [
        Mask.causal(96),
        Mask.window(96, 20),
        Mask.documents([0, 40, 43, 73, 96], causal=True),
        Mask.documents([0, 40, 43, 70, 96], causal=True).windowed(16),
        Mask.documents([0, 96], causal=False),
    ],
    ids=["causal", "window", "documents", "windowed documents", "full"],
)
def test_a_rank_makes_a_single_call(mask, size):
    """Its queries are all in it, and each key that lands is seen by one."""
    for plan in plans(mask, Layout.zigzag(96, size)):
        [gathered] = plan.calls
        assert gathered.q_spans == ((0, 96 // size),)
        assert gathered.kv_spans == ((0, plan.gathered[plan.rank].tokens),)


def test_each_rank_of_a_causal_zigzag_gathers_equally_much():
    everyone = plans(Mask.causal(128), Layout.zigzag(128, 4))
    chunk = 128 // 8
    for plan in everyone:
        assert plan.gathered[plan.rank].tokens == 9 * chunk
        pieces = plan.gathered[plan.rank].pieces
        assert sum(at[1] - at[0] for owner, _, at in pieces if owner != plan.rank) == 6 * chunk


class Runs(Layout):
    """Ranks own runs of four tokens in turns."""

    name = "runs"

    def ranges(self, rank: int) -> tuple[range, ...]:
        starts = range(4 * rank, self.seq_len, 4 * self.size)
        return tuple(range(start, start + 4) for start in starts)


def test_a_window_gathers_only_what_it_sees():
    for plan in plans(Mask.window(1024, 17), Layout.zigzag(1024, 4)):
        others = [p for p in plan.gathered[plan.rank].pieces if p.owner != plan.rank]
        assert sum(length(p.span) for p in others) <= 2 * 16


def test_a_token_that_would_land_too_often_lands_once():
    """Each short run of queries sees all earlier keys."""
    for plan in plans(Mask.causal(128), Runs(128, 2)):
        pieces = plan.gathered[plan.rank].pieces
        assert sum(length(p.span) for p in pieces) <= 128


def test_without_traffic_the_plan_is_the_rings():
    layout = Layout.contiguous(64, 2)
    assert all(isinstance(p, RingPlan) for p in plans(Mask.documents([0, 32, 64]), layout))
    assert all(
        isinstance(p, OneCallPlan) for p in plans(Mask.documents([0, 31, 64], causal=False), layout)
    )


def test_a_plan_prints_what_lands():
    plan = plans(Mask.causal(64), Layout.zigzag(64, 2))[1]
    assert str(plan) == (
        "rank 1, forward and backward: 80 tokens land, 48 of them its own; 1 kernel calls: "
        "32 x 80 in 2 tiles"
    )


def test_a_backward_that_fails_on_all_ranks_leaves_the_group_usable(monkeypatch):
    """What was returned is released, so that the next gradients find their place free."""
    tensors = random_qkv(1, 32, 4, 2, 8)
    layout, failing = Layout.zigzag(32, 2), threading.local()
    sum_gradients = OneCallPlan._sum_gradients

    def fail_once(*arguments):
        if failing.now:
            failing.now = False
            raise MemoryError("no memory for the sums")
        return sum_gradients(*arguments)

    monkeypatch.setattr(OneCallPlan, "_sum_gradients", fail_once)

    def work(ring):
        q, k, v, dout = (layout.shard(x, ring.rank) for x in tensors)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        grads = []
        for failing.now in (False, True, False):
            out = burst_attn_func(
                *inputs, causal=True, layout=layout, strategy="one-call", process_group=ring
            )
            if failing.now:
                with pytest.raises(MemoryError, match="no memory for the sums"):
                    torch.autograd.grad(out, inputs, dout)
            else:
                grads.append(torch.autograd.grad(out, inputs, dout))
        return all(a.equal(b) for a, b in zip(*grads, strict=True))

    assert all(simulate(2, work))
