"""The order of events of a rank, as data, and its timeline: each event has what it needs before it.

All ranks have one order, and none begins a delivery before it has read the one whose slot it takes.
So none waits for ever, even if each rank is one queue that works in order (test_copy_engine.py).
"""

import collections
import itertools
import sys
from itertools import pairwise

import pytest
import torch

from bmt_burst import Layout, Mask
from bmt_burst.kernels.reference import visible
from bmt_burst.strategies.ring import RingPlan
from bmt_burst.strategies.ring.program import order_events
from bmt_burst.transport import LANES
from examples.timeline import Rates, count_pairs, timelines
from tests.cases import named_calls
from tests.launcher import run_script
from tests.rings import problem

SHAPES = [
    (passes, stages, returning)
    for passes in range(4)
    for rounds in (1, 2, 3)
    for stages in itertools.product(range(4), repeat=rounds)
    for returning in (False, True)
]


def places(events):
    """Of each kind of event, where its events are, by (pass, round, stage)."""
    found = collections.defaultdict(dict)
    for i, event in enumerate(events):
        key = tuple(event[1:])
        assert key not in found[event.do], f"{event} comes twice"
        found[event.do][key] = i
    return found


@pytest.mark.parametrize("returning", [False, True])
def test_every_event_has_what_it_needs_before_it(returning):
    """Each stage is fetched, lands, is computed, goes home and is freed, for any counts."""
    for passes, stages, _ in (shape for shape in SHAPES if shape[2] == returning):
        at = places(order_events(passes, stages, returning))
        every = [
            (h, n, s) for h in range(passes) for n, count in enumerate(stages) for s in range(count)
        ]
        kinds = ["fetch", "land", "compute", *["return"] * returning, "free"]
        for kind in kinds:
            assert sorted(key for key in at[kind] if key[2] >= 0) == every
        for key in every:
            assert [at[kind][key] for kind in kinds] == sorted(at[kind][key] for kind in kinds)
        for kind in kinds:  # and one after the other
            assert [key for key in at[kind] if key[2] >= 0] == every
        assert list(at["own"].values()) == [at["own"][0, 0, 0]]
        later = [(h, n, 0) for h in range(passes) for n in range(1, len(stages))]
        for kind in ("cross", "arrive", *["leave", "receive"] * returning):
            assert sorted(at[kind]) == later
        roots = {key: i for key, i in at["compute"].items() if key[2] < 0}
        assert sorted(roots) == [(h, n, -1) for h, n, _ in later]
        for key in later:
            root = roots[*key[:2], -1]
            assert at["cross"][key] < at["arrive"][key] < root
            if returning:
                assert root < at["leave"][key] < at["receive"][key]
                assert all(
                    at["collect"][*key[:2], s] < at["leave"][key] for s in range(stages[key[1]])
                )
        for h in range(passes):
            mine = {
                (kind, key): i
                for kind in at
                for key, i in at[kind].items()
                if key[0] == h and kind != "own"
            }
            [end] = [i for (kind, _), i in mine.items() if kind == "end"]
            assert at["pack"][h, 0, 0] < at["begin"][h, 0, 0] < end == max(mine.values())
            home = [
                key for kind, key in mine if kind == "collect" or (kind == "end" and key[2] >= 0)
            ]
            assert sorted(home) == ([key for key in every if key[0] == h] if returning else [])


@pytest.mark.parametrize("returning", [False, True])
def test_no_lane_has_more_deliveries_than_it_has_slots(returning):
    for passes, stages, _ in (shape for shape in SHAPES if shape[2] == returning):
        begun = collections.Counter()
        for event in order_events(passes, stages, returning):
            begun["visit"] += {"fetch": 1, "free": -1}.get(event.do, 0)
            begun["return"] += {
                "return": 1,
                "collect": -1,
                "end": -1 if event.stage >= 0 else 0,
            }.get(event.do, 0)
            if not returning:
                begun["return"] = 0
            assert all(0 <= begun[lane] <= slots for lane, slots in LANES.items()), (passes, stages)
        assert not any(begun.values())


def test_what_comes_next_is_on_its_way_before_something_is_computed():
    """Each stage but a pass's first in a round begins to come before the last is computed."""
    for passes, stages, returning in SHAPES:
        at = places(order_events(passes, stages, returning))
        for h, n, s in at["fetch"]:
            if s:
                assert at["fetch"][h, n, s] < at["compute"][h, n, s - 1]
            elif h and not n and stages[-1]:
                assert at["fetch"][h, 0, 0] < at["compute"][h - 1, len(stages) - 1, stages[-1] - 1]
            elif not h and not n:
                assert at["fetch"][0, 0, 0] < at["own"][0, 0, 0]
        if len(stages) == 1:  # there are two buffers
            assert all(at["fetch"][key] < at["own"][0, 0, 0] for key in sorted(at["fetch"])[:2])
        for h, n, _ in at["cross"]:
            before = [i for (g, m, _), i in at["compute"].items() if (g, m) == (h, n - 1)]
            assert all(at["cross"][h, n, 0] < i for i in before)


def striped_plan(documents: int, tokens: int, inner: int, size: int = 8) -> RingPlan:
    """The plan of a rank in the middle, for documents of so many tokens."""
    mask = Mask.documents(range(0, documents * tokens + 1, tokens))
    layout = Layout.striped(mask.seq_len, size)
    return RingPlan(problem(mask, layout, inner, backward="q"), size // 2)


def work_of(plan: RingPlan) -> collections.Counter[str]:
    """How many calls and lines of the library run to plan a forward and a backward."""
    events, before = collections.Counter(), sys.gettrace()

    def count(frame, event, _argument):
        if "bmt_burst" not in frame.f_code.co_filename:
            return None
        events[event] += 1
        return count

    sys.settrace(count)
    try:
        assert plan.forward_program and plan.backward_program
    finally:
        sys.settrace(before)
    return events


def test_work_grows_with_the_runs_that_all_ranks_see():
    """Each rank sees a run of each document from each other rank: ranks x ranks runs in all. A rank
    goes through them once. It works longer only with those that it sees and those that it owns.
    """
    few, many = (work_of(striped_plan(48, 64, size, size))["line"] for size in (8, 32))
    assert many < 11 * few


@pytest.mark.parametrize(("tokens", "inner"), [(10, 2), (64, 8)])
def test_twice_as_many_documents_take_twice_the_work(tokens, inner):
    once, twice = (
        work_of(striped_plan(documents, tokens, inner))["line"] for documents in (128, 256)
    )
    assert twice < 2.2 * once


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
