"""Ulysses around the ring: against dense attention in fp64 through the simulator, over gloo and by
copy engines.
"""

import pytest

from bmt_burst import Layout, Mask, init_sequence_parallel
from bmt_burst.sequence.layout import Stacked
from bmt_burst.strategies import load
from tests.cases import random_qkv
from tests.launcher import RANKS, needs_ranks, run_ranks
from tests.reference import dense_results
from tests.rings import problem, ring_results
from tests.test_ulysses import (
    BF16,
    SCALE,
    assert_equal,
    gpu_cases,
    gpu_error,
)


def test_one_host_is_ulysses():
    mask, tensors = Mask.documents((0, 5, 30, 61)), random_qkv(2, 61, 6, 2, 8)
    layout = Layout.balanced(mask, 4)
    by_name = [
        ring_results(layout, tensors, SCALE, 4, mask=mask, strategy=name)
        for name in ("ulysses", "usp")
    ]
    assert all(a.equal(b) for a, b in zip(*by_name, strict=True))


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


def test_a_plan_prints_what_its_rings_do():
    printed = str(load("usp").plan(problem(Mask.causal(40), Layout.zigzag(40, 4), 2), 3))
    assert printed.startswith(
        "rank 3 of 4: 20 tokens, 1 head rings; heads at a time: 1\n"
        "  rank 2 computes query heads 0 to"
    )
    assert "between hosts, of head ring 0:\nrank 1, forward:" in printed


def on_gpus(rank: int, size: int) -> dict[str, float]:
    """Return the worst error of each case, for each grid of the ranks."""
    errors = {}
    for ulysses_size in (u for u in (1, 2, size) if size % u == 0):
        sp = init_sequence_parallel(size, ulysses_size=ulysses_size)
        groups = {"process_group": sp.process_group, "double_group": sp.double_group}
        for case in gpu_cases(size, (((4, 4), 1024), ((6, 2), 1031))):
            name = f"{ulysses_size} {case[0]!r} {case[1]!r} {case[2][0].shape}"
            errors[name] = gpu_error(rank, *case, strategy="usp", **groups)
    return errors


@pytest.mark.gpu
@pytest.mark.ranks
@needs_ranks(2)
def test_on_gpus():
    size = 4 if RANKS >= 4 else 2
    for errors in run_ranks(size, on_gpus, size, backend="nccl"):
        name, worst = max(errors.items(), key=lambda entry: entry[1])
        assert worst < BF16, (name, worst)


@pytest.mark.parametrize("tokens", [32, 35])
@pytest.mark.parametrize("grid", [(4, 2), (6, 3)])
def test_hosts_of_unequal_tokens_cut_heads_alike(grid, tokens, monkeypatch):
    """The ring between hosts computes a piece of each host at a time."""
    monkeypatch.setattr("bmt_burst.strategies.ulysses.heads._ENOUGH_WORK", 0)
    monkeypatch.setattr("bmt_burst.strategies.ulysses.heads._ENOUGH_ROWS", 64)
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
        assert_equal(got, expected, tensors[3], where=(tokens, name))
