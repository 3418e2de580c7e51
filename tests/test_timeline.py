"""Timelines: they count each pair and each byte of a plan once, and nothing starts before what it
waits for.
"""

from itertools import pairwise

import pytest
import torch

from bmt_burst import Layout, Mask
from bmt_burst.kernels.reference import visible
from bmt_burst.strategies.ring import RingPlan
from examples.timeline import Rates, count_pairs, timelines
from tests.cases import named_calls
from tests.launcher import run_script
from tests.rings import problem

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
    lines = [timelines(RingPlan(call, rank), SLOW) for rank in range(4)]
    for column, factor in zip(zip(*lines, strict=True), (1.0, 2.5), strict=True):
        kernels = [x for one in column for x in one.intervals if x.row == "compute"]
        seconds = sum(x.stop - x.start for x in kernels)
        assert seconds == pytest.approx(factor * 4 * 8 * 2 * mask.area / SLOW.operations)
    for forward, backward in lines:
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
    fast, slow = (timelines(RingPlan(call, 1), Rates(1e12, rate, rate))[0] for rate in (1e12, 1e8))
    assert fast.busy > 0.99
    assert slow.busy < 0.5


def test_the_example_draws_a_double_ring(tmp_path):
    options = ["--ranks", "4", "--inner", "2", "--tokens", "4096", "--output", tmp_path / "t.png"]
    code, printed = run_script(None, "examples/timeline.py", *options)
    assert code == 0, printed
    assert printed.count("rank 3") == 2
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
