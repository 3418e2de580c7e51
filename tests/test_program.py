"""The order of events of all ranks, as data: what a rank waits for, its peers enqueue before they
wait for more.

Each rank is one queue that works in order, which is the least that a GPU grants its streams
(transport/copy_engine.py), and stands still until what it waits for has been done by others.
"""

import collections
import itertools
import random
import sys
from typing import NamedTuple

import pytest
import torch

from bmt_burst import Layout, Mask
from bmt_burst.strategies import ring as ring_strategy
from bmt_burst.strategies.ring import RingPlan
from bmt_burst.strategies.ring.events import Event, order_events
from bmt_burst.transport import LANES
from tests.cases import random_layout, random_mask
from tests.rings import problem

RINGS = [
    (1, 1),
    (2, 2),
    (3, 3),
    (4, 4),
    (5, 5),
    (8, 8),
    (4, 2),
    (6, 3),
    (6, 2),
    (8, 4),
    (4, 1),
    (8, 2),
]
CASES = 96
PARTS = 2  # tests that share them


class Step(NamedTuple):
    """A step of a rank's queue: it waits until each of `until` is done, and then does `done`.

    There is a name for everything that one rank does and another may wait for.
    """

    event: Event
    until: tuple = ()
    done: tuple = ()


class Queue:
    """A rank's queue: its steps in the calls so far. `host` are the ranks of its host."""

    def __init__(self, rank, inner):
        self.rank, self.inner = rank, inner
        self.host = range(rank // inner * inner, (rank // inner + 1) * inner)
        self.begun = collections.Counter()  # deliveries, by lane
        self.released = collections.Counter()
        self.steps: list[Step] = []

    def add(self, program, call, change=lambda events: events):
        """The steps of a program, which is the ranks' call of that number; `change` may spoil the
        order of events.
        """
        for event in change(program.events):
            self.steps += self._steps(program, call, event)

    def _steps(self, program, call, event):
        if event.do in ("own", "pack", "begin", "compute") or (
            event.do == "end" and event.stage < 0
        ):
            return [Step(event)]
        round_ = program.rounds[event.round]
        if event.do in ("fetch", "return"):
            stage = round_.stages[event.stage]
            outgoing = stage.sends if event.do == "fetch" else stage.returns
            return self._deliver(
                event, "visit" if event.do == "fetch" else "return", {out.peer for out in outgoing}
            )
        if event.do == "land":
            return [
                self._arrival(
                    event, "visit", {peer for peer, _ in round_.stages[event.stage].sources}
                )
            ]
        if event.do == "free":
            return [self._release(event, "visit")]
        if event.do in ("collect", "end"):
            peers = {peer for peer, _ in round_.stages[event.stage].gradient_sources}
            return [self._arrival(event, "return", peers), self._release(event, "return")]
        return self._between_hosts(program, call, event)

    def _deliver(self, event, lane, peers):
        """Into the peers' slots, each once its owner has released what was there."""
        self.begun[lane] += 1
        number = self.begun[lane]
        ranks = [self.host[peer] for peer in sorted(peers)]
        return [
            Step(
                event,
                self._free(lane, rank, number - LANES[lane]),
                (("arrived", lane, self.rank, rank, number),),
            )
            for rank in ranks
        ] or [Step(event)]

    def _free(self, lane, owner, number):
        """What a slot waits for: that its owner has read the delivery before, if there was one."""
        return (("freed", lane, owner, number),) if number > 0 else ()

    def _arrival(self, event, lane, peers):
        number = self.released[lane] + 1
        assert number <= self.begun[lane], (
            f"{event} waits for a delivery that this rank has not begun"
        )
        return Step(
            event, tuple(("arrived", lane, self.host[peer], self.rank, number) for peer in peers)
        )

    def _release(self, event, lane):
        self.released[lane] += 1
        return Step(event, (), (("freed", lane, self.rank, self.released[lane]),))

    def _between_hosts(self, program, call, event):
        """An exchange stands still until both ends of each of its messages are there, as NCCL's
        kernels do.
        """
        round_ = program.rounds[event.round]
        place = self.rank % self.inner
        borrowed = (round_.root,) if round_.landing.tokens else ()
        lent = (round_.lent_to * self.inner + place,) if round_.lent else ()
        if event.do in ("cross", "leave"):
            name = call, event.do, event.number, event.round
            ends = [(self.rank, other) for other in (*borrowed, *lent)]
            there = Step(event, (), tuple(("at", *name, *end) for end in ends))
            return [there, Step(event, tuple(("at", *name, other, mine) for mine, other in ends))]
        assert event.do in ("arrive", "receive"), event
        return [Step(event)]


def stuck(queues):
    """Works off the queues; returns the events at which ranks stand still for ever."""
    done, at = set(), [0] * len(queues)
    going = True
    while going:
        going = False
        for i, queue in enumerate(queues):
            while at[i] < len(queue.steps) and all(
                u in done or (u[-1] <= 0 and u[0] == "freed") for u in queue.steps[at[i]].until
            ):
                done.update(queue.steps[at[i]].done)
                at[i] += 1
                going = True
    return {
        queue.rank: queue.steps[i].event
        for queue, i in zip(queues, at, strict=True)
        if i < len(queue.steps)
    }


def random_plans(chance, size, inner):
    """The plans of all ranks for a random call, of several stages and passes or of few."""
    mask = random_mask(chance, chance.randint(size, 60))
    call = problem(
        mask,
        random_layout(chance, mask, size),
        inner,
        heads=4,
        kv_heads=chance.choice((1, 4)),
        backward=chance.choice(("q", "kv")),
        group_bytes=chance.choice((0, 300, 1000, 4000, 1 << 30)),
    )
    return [RingPlan(call, rank) for rank in range(size)]


def queues_of(calls, inner, change=lambda events: events):
    """Of all ranks, for programs of theirs, one call after the other."""
    queues = [Queue(rank, inner) for rank in range(len(calls[0]))]
    for number, programs in enumerate(calls):
        for queue, program in zip(queues, programs, strict=True):
            queue.add(program, number, change)
    return queues


def orders(plans):
    """Forwards and backwards as they follow one another: of a layer each, of two layers, and with
    more computed.
    """
    forwards = [[plan.forward_program for plan in of_all] for of_all in plans]
    backwards = [[plan.backward_program for plan in of_all] for of_all in plans]
    return [
        [forwards[0], backwards[0], forwards[0], backwards[0]],
        [
            *forwards,
            *backwards[::-1],
            forwards[0],
            forwards[0],
            backwards[0],
            forwards[1],
            backwards[1],
        ],
    ]


@pytest.mark.parametrize("part", range(PARTS))
def test_no_order_of_calls_leaves_a_rank_waiting(part, monkeypatch):
    for seed in range(part, CASES, PARTS):
        chance = random.Random(seed)
        monkeypatch.setattr(ring_strategy, "_ENOUGH_ROWS", chance.choice((1, 1 << 18)))
        size, inner = RINGS[seed % len(RINGS)]
        for calls in orders([random_plans(chance, size, inner) for _ in range(2)]):
            assert stuck(queues_of(calls, inner)) == {}, seed


def causal_plans(monkeypatch, size, inner, backward="kv", group_bytes=400):
    """Causal zigzag in two passes of several stages."""
    monkeypatch.setattr(ring_strategy, "_ENOUGH_ROWS", 1)
    heads = {"heads": 2, "kv_heads": 2, "backward": backward, "group_bytes": group_bytes}
    call = problem(Mask.causal(4 * size), Layout.zigzag(4 * size, size), inner, **heads)
    return [RingPlan(call, rank) for rank in range(size)]


def test_ranks_that_release_nothing_are_found_waiting(monkeypatch):
    plans = causal_plans(monkeypatch, 4, 4)
    forward = [plan.forward_program for plan in plans]
    assert stuck(queues_of([forward] * 2, 4)) == {}
    queues = queues_of([forward] * 2, 4)
    queues[2].steps = [step for step in queues[2].steps if step.event.do != "free"]
    found = stuck(queues)
    assert {event.do for event in found.values()} >= {"fetch"}
    assert len(found) == 4


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
    """For all numbers of passes, rounds and stages: each stage is fetched, lands, is computed, goes
    home, is freed.
    """
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
    """Every stage but a pass's first in a round begins to come before the one before it is
    computed.
    """
    for passes, stages, returning in SHAPES:
        at = places(order_events(passes, stages, returning))
        for h, n, s in at["fetch"]:
            if s:
                assert at["fetch"][h, n, s] < at["compute"][h, n, s - 1]
            elif h and not n and stages[-1]:
                assert at["fetch"][h, 0, 0] < at["compute"][h - 1, len(stages) - 1, stages[-1] - 1]
            elif not h and not n:
                assert at["fetch"][0, 0, 0] < at["own"][0, 0, 0]
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


def test_a_plan_prints_its_program():
    call = problem(Mask.causal(32), Layout.zigzag(32, 4), dtype=torch.bfloat16)
    printed = str(RingPlan(call, 1))
    assert "rank 1, forward: KeysValues in 1 pass" in printed
    assert "rank 1, backward: " in printed
    assert "land" in printed
    assert "kernel calls: 8 x 8 in 1 tiles" in printed
