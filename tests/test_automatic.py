"""strategy="auto": one rule, from the problem alone."""

import logging
from pathlib import Path

import pytest
import torch

from bench import masks
from bench.tables import read_rows
from bmt_burst import InfLLMV2, Layout, Mask, strategies
from bmt_burst.calls import softmax as calls
from bmt_burst.calls.softmax import _find_strategy
from bmt_burst.strategies import choose
from bmt_burst.strategies.ring import RingPlan
from tests.cases import random_qkv
from tests.launcher import ROOT
from tests.reference import assert_close, dense_results
from tests.rings import problem, ring_results

HALF = {"dtype": torch.bfloat16, "partial": torch.bfloat16, "head_size": 128}


@pytest.fixture(autouse=True)
def nothing_was_logged(monkeypatch):
    monkeypatch.setattr(strategies, "_logged", set())


def taken(tokens: int, size: int, mask=None, inner=None, **changes) -> str:
    """Return the strategy for `tokens` tokens a rank."""
    mask = mask or Mask.causal(tokens * size)
    changes = {"heads": 32, "kv_heads": 8, **HALF, **changes}
    return choose("auto", problem(mask, Layout.zigzag(mask.seq_len, size), inner, **changes)).name


def test_short_work_gets_one_call_and_long_work_the_ring():
    assert [taken(n << 10, 2) for n in (2, 4, 8, 16, 64, 512)] == ["one-call"] * 2 + ["ring"] * 4


def test_the_work_of_a_rank_counts():
    """Pairs, batch, heads and head size count. 4K tokens on each of 2 ranks have 0.27 TFLOP."""
    assert taken(4096, 2, batch=2, group_bytes=1 << 30) == "ring"
    assert taken(4096, 2, heads=64, kv_heads=8) == "ring"
    assert taken(4096, 2, head_size=256) == "ring"
    assert taken(4096, 4) == "ring", "twice the pairs of each query"
    assert taken(4096, 4, Mask.documents(range(0, 16385, 4096))) == "one-call"


def test_ranks_of_many_tokens_take_the_ring_however_little_they_compute():
    """There a window of 1,024 tokens took the ring less time on two H100."""
    windows = {n: taken(n, 2, Mask.window(2 * n, 128), kv_heads=2) for n in (8192, 8193)}
    assert windows == {8192: "one-call", 8193: "ring"}


def test_what_does_not_fit_or_is_refused_gets_the_ring():
    assert taken(2048, 2, group_bytes=1 << 20) == "ring"
    assert taken(1024, 4, inner=2) == "ring", "of two hosts"
    assert taken(2048, 1) == "ring", "of a single rank"


def test_each_choice_is_logged_once_with_its_reason(caplog):
    caplog.set_level(logging.INFO, "bmt_burst")
    for _ in range(2):
        taken(4096, 2)
        taken(1 << 16, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "strategy='auto' took 'one-call': a rank's forward has 0.275 TFLOP",
        "strategy='auto' took 'ring': a rank's forward has 70.369 TFLOP",
    ]


def test_a_strategy_that_was_asked_for_is_used_or_refused():
    call = problem(Mask.causal(64), Layout.zigzag(64, 4), 2)
    assert choose("usp", call).name == "usp"
    with pytest.raises(ValueError, match="strategy 'one-call': expected a single group"):
        choose("one-call", call)


def test_choices_are_near_the_best_that_was_measured():
    """Peers were imagined. The same strategy by its name and by "auto" differs by up to 6 %."""
    rows = read_rows([Path(ROOT) / "bench/results/one-rank-1-nvidia-h200-auto.jsonl"])
    shape = ("mask", "seq_len", "gpus", "batch", "heads", "kv_heads", "head_dim")
    measured: dict[tuple, dict[str, float]] = {}
    for row in rows:
        if row["impl"] in ("ring", "one-call", "ulysses"):
            times = measured.setdefault(tuple(row[x] for x in shape), {})
            times[row["impl"]] = row["fwd_bwd_ms"]
    assert len(measured) >= 11
    for (mask, tokens, gpus, *numbers), times in measured.items():
        sizes = dict(zip(("batch", "heads", "kv_heads", "head_size"), numbers, strict=True))
        chosen = taken(tokens // gpus, gpus, masks.mask_of(mask, tokens), **sizes)
        assert times[chosen] <= 1.07 * min(times.values()), (mask, tokens, gpus, numbers, chosen)


def test_only_calls_on_gpus_may_be_short():
    assert _find_strategy("auto", "cuda") == "auto"
    assert _find_strategy("auto", "cpu") == "ring"
    assert _find_strategy("one-call", "cpu") == "one-call"


def test_the_near_part_of_sparse_calls_takes_the_ring():
    short = problem(Mask.causal(64), Layout.zigzag(64, 2))
    sparse = InfLLMV2(2, 2, 1, window_size=4, topk=3, dense_len=-1)
    assert isinstance(sparse.plan(short, 0, "auto").near, RingPlan)


def test_a_short_call_gets_one_call(monkeypatch, caplog):
    """As on a GPU, for which the host's kernels stand."""
    caplog.set_level(logging.INFO, "bmt_burst")
    monkeypatch.setattr(calls, "_find_strategy", lambda name, device: name)
    tensors, layout = random_qkv(1, 24, 4, 2, 8), Layout.zigzag(24, 3)
    got = ring_results(layout, tensors, 0.3, 3, causal=True)
    assert_close(got, dense_results(Mask.causal(24), tensors, 0.3), tensors[3], 0.3, 1e-12)
    assert any("took 'one-call'" in record.getMessage() for record in caplog.records)
