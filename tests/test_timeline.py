"""Timelines: they count each pair and each byte of a plan once, and nothing starts before what it
waits for.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bench import masks
from bench.tables import measured, read_rows
from bmt_burst import Layout, Mask
from bmt_burst.kernels.reference import visible
from bmt_burst.strategies.machine import H200, Rates
from bmt_burst.strategies.ring import RingPlan
from bmt_burst.strategies.ring.timeline import count_pairs
from tests.helpers import ROOT, named_calls, problem, run_script

CALLS = named_calls(5)
SLOW = Rates(operations=1e6, bytes=1e3, host_bytes=1e3)


def test_pairs_of_a_call_are_counted():
    for kind, call in CALLS.items():
        assert count_pairs(call) == int(visible(call).sum()), kind


@pytest.mark.parametrize("inner", [4, 2])
@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
def test_ranks_compute_each_pair_once_and_wait_for_what_they_need(inner, group_bytes):
    mask = Mask.documents((0, 50, 128))
    sizes = {"heads": 2, "kv_heads": 2, "head_size": 8, "group_bytes": group_bytes}
    call = problem(mask, Layout.zigzag(128, 4), inner, **sizes)
    timelines = [RingPlan(call, rank).timelines(SLOW) for rank in range(4)]
    for column, factor in zip(zip(*timelines, strict=True), (1.0, 2.5), strict=True):
        kernels = [x for one in column for x in one.intervals if x.row == "compute"]
        seconds = sum(x.stop - x.start for x in kernels)
        assert seconds == pytest.approx(factor * 4 * 8 * 2 * mask.area / SLOW.operations)
    for forward, backward in timelines:
        for one in (forward, backward):
            at = {x.event: x for x in one.intervals}
            for event, x in at.items():
                fetch = at.get(event._replace(do="fetch"))
                assert event.do != "compute" or fetch is None or fetch.stop <= x.start
            for row in {x.row for x in one.intervals}:
                mine = sorted(x[2:] for x in one.intervals if x.row == row)
                assert all(a[1] <= b[0] for a, b in pairwise(mine)), "one thing at a time"
            assert 0 < one.busy <= 1
            assert f"{one.busy:.0%}" in str(one)


def test_slow_links_show():
    sizes = {"heads": 4, "kv_heads": 4, "dtype": torch.float16}
    call = problem(Mask.causal(4096), Layout.zigzag(4096, 4), **sizes)
    fast, slow = (RingPlan(call, 1).timelines(Rates(1e12, rate, rate))[0] for rate in (1e12, 1e8))
    assert fast.busy > 0.99
    assert slow.busy < 0.5


def test_the_example_draws_a_double_ring(tmp_path):
    options = ["--ranks", "4", "--inner", "2", "--tokens", "4096", "--output", tmp_path / "t.png"]
    code, said = run_script(None, "examples/timeline.py", *options)
    assert code == 0, said
    assert said.count("rank 3") == 2
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


# By how much predictions may differ from the milliseconds of a forward and backward. The rows of 8
# GPUs are of an older commit, with more host time in each call.
NEAR = {
    "attention-2-nvidia-h200": 0.04,
    "attention-2-nvidia-h200-masks": 0.08,
    "attention-4-nvidia-h200": 0.04,
    "attention-8-nvidia-h200": 0.09,
}


@pytest.mark.parametrize("name", NEAR)
def test_rates_of_h200_predict_what_was_measured(name):
    rows = measured(read_rows([Path(ROOT) / f"bench/results/{name}.jsonl"]))
    rows = [row for row in rows if (row["impl"], row["kernel"]) == ("bmt_burst", "fa4")]
    assert rows
    for row in rows:
        layout = masks.balanced(row["mask"], row["seq_len"], row["gpus"])
        sizes = {"batch": row["batch"], "heads": row["heads"], "kv_heads": row["kv_heads"]}
        sizes |= {"head_size": row["head_dim"], "dtype": torch.bfloat16, "partial": torch.bfloat16}
        mask = masks.mask_of(row["mask"], row["seq_len"])
        both = RingPlan(problem(mask, layout, **sizes), 0).timelines(H200)
        predicted = 1e3 * sum(one.seconds for one in both)
        assert predicted == pytest.approx(row["fwd_bwd_ms"], rel=NEAR[name]), row
