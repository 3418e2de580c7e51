"""Ulysses, and around the ring: which heads and tokens ranks have, and what is sent."""

import itertools

import pytest
import torch

from bmt_burst import Layout, Mask, burst_attn_func, simulate
from bmt_burst.sequence.layout import Stacked
from bmt_burst.strategies import load
from bmt_burst.strategies.ulysses.heads import cut_heads, plan_pieces, share_heads
from bmt_burst.strategies.ulysses.heads import kv_heads as kv_heads_of
from tests.cases import random_qkv
from tests.reference import assert_close, dense_results, relative_error
from tests.rings import problem, ring_results

SCALE = 0.31


@pytest.mark.parametrize("rows", [1, 1 << 16, 1 << 20])
def test_every_query_head_is_computed_once_with_its_kv_head(rows):
    for (heads, kv_heads), size in itertools.product(
        [(6, 3), (5, 5), (7, 1), (3, 1), (32, 8), (12, 4), (9, 3), (64, 8), (32, 2)], range(1, 14)
    ):
        ratio, found = heads // kv_heads, []
        cuts = cut_heads(-(-heads // size), ratio, rows, work=1 << 62)
        mine = share_heads(heads, size)
        assert all(-1 < b - a - heads // size < 2 for a, b in mine)
        for part in itertools.chain(*plan_pieces(mine, ratio, cuts)):
            here, there = range(*part), range(*kv_heads_of(part, ratio))
            assert len(here) % max(len(there), 1) == 0
            found += [(q, there[i // (len(here) // len(there))]) for i, q in enumerate(here)]
        found.sort()
        assert found == [(q, q // ratio) for q in range(heads)]


@pytest.mark.parametrize(
    ("heads", "ratio", "size", "tokens_per_gpu", "cuts"),
    [
        (32, 4, 2, 4096, (0, 16)),
        (32, 4, 2, 8192, (0, 16)),
        (32, 1, 2, 8192, (0, 16)),
        (32, 4, 2, 16384, (0, 4, 12, 16)),
        (32, 4, 2, 32768, (0, 4, 8, 12, 16)),
        (32, 4, 4, 8192, (0, 4, 8)),
        (32, 4, 4, 32768, (0, 1, 3, 5, 7, 8)),
        (32, 4, 8, 8192, (0, 1, 3, 4)),
    ],
)
def test_a_call_has_no_more_pieces_than_its_work_pays_for(heads, ratio, size, tokens_per_gpu, cuts):
    """Causal, with heads of 128. Where it is possible, no kv head is in two pieces."""
    tokens, mine = size * tokens_per_gpu, heads // size
    work = mine * Mask.causal(tokens).area * 128
    assert cut_heads(mine, ratio, tokens, work) == cuts


def test_in_inference_mode_and_after_it():
    """With tokens in the order of ranks, whose indices on a device are kept."""
    layout, (q, k, v, _) = Layout.striped(23, 2), random_qkv(1, 23, 4, 2, 8)
    expected = dense_results(Mask.full(23), [q, k, v, v.new_zeros(q.shape)], SCALE)[0]

    def work(ring):
        shards = [layout.shard(x, ring.rank) for x in (q, k, v)]
        options = {"layout": layout, "strategy": "ulysses", "process_group": ring}
        with torch.inference_mode():
            first = burst_attn_func(*shards, SCALE, **options).clone()
        return first, burst_attn_func(*shards, SCALE, **options)

    for outs in zip(*simulate(2, work), strict=True):
        assert relative_error(layout.unshard(outs), expected) < 1e-13


def test_only_the_heads_of_a_rank_are_sent_to_it():
    """In fp64: 8 bytes a number. Of 3 query heads, rank 0 has none."""
    layout, tensors = Layout.zigzag(41, 4), random_qkv(2, 41, 3, 1, 8)

    def work(ring):
        q, k, v = (layout.shard(x, ring.rank) for x in tensors[:3])
        options = {"flash": "cpu", "strategy": "ulysses", "process_group": ring}
        burst_attn_func(q, k, v, causal=True, **options)
        return sum(nbytes for _, nbytes in ring.traffic)

    for rank, nbytes in enumerate(simulate(4, work)):
        tokens, has_head = layout.length(rank), rank > 0
        inputs = (3 - has_head) * 3 * 8 * tokens  # q, k and v, to each other rank with a head
        results = has_head * (8 + 1) * (41 - tokens)  # out and lse
        assert nbytes == 2 * 8 * (inputs + results)


# USP: Ulysses around the ring.


def test_a_striped_layout_of_many_tokens_is_refused():
    mask = Mask.causal(1 << 15)
    reason = load("usp").refuses(problem(mask, Layout.striped(1 << 15, 4), 2))
    assert reason == (
        "expected at most 4096 runs of positions on a host, got 8192 of a striped layout: "
        "choose another layout"
    )
    assert load("usp").refuses(problem(mask, Layout.zigzag(1 << 15, 4), 2)) is None
    rows = Stacked([Layout.contiguous(1 << 15, 4), Layout.striped(1 << 15, 4)])
    assert "got 8192 of a stacked layout" in load("usp").refuses(
        problem(Mask.causal(1 << 16), rows, 2)
    )


@pytest.mark.parametrize("tokens", [32, 35])
@pytest.mark.parametrize("grid", [(4, 2), (6, 3)])
def test_hosts_of_unequal_tokens_cut_heads_alike(grid, tokens, monkeypatch):
    """The ring between hosts computes a piece of each host at a time."""
    monkeypatch.setattr("bmt_burst.strategies.ulysses.heads._PIECE_WORK", 1)
    monkeypatch.setattr("bmt_burst.strategies.ulysses.heads._MOST_ROWS", 64)
    (size, inner), mask = grid, Mask.causal(tokens)
    for name in ("contiguous", "zigzag"):
        layout, tensors = Layout.named(name, tokens, size), random_qkv(1, tokens, 24, 12, 8)
        plans = [
            load("usp").plan(problem(mask, layout, inner, heads=24, kv_heads=12), rank)
            for rank in range(0, size, inner)
        ]
        assert len(plans[0].pieces) > 1
        assert all(plan.pieces == plans[0].pieces for plan in plans)
        got = ring_results(layout, tensors, SCALE, inner, mask=mask, strategy="usp", flash="cpu")
        expected = dense_results(mask, tensors, SCALE)
        assert_close(got, expected, tensors[3], SCALE, 1e-10, name)
