"""One call and all-gather: what lands, and which kernel calls there are.

tests/conformance compares their attention with dense attention."""

import pytest

from bmt_burst import Layout, Mask, kernels, simulate
from bmt_burst.ranks.rings import make_rings
from bmt_burst.sequence.span import length
from bmt_burst.strategies import load
from bmt_burst.strategies import ring as ring_strategy
from bmt_burst.strategies.compute import Keys, QueryGradients
from bmt_burst.strategies.one_call import OneCallPlan
from bmt_burst.strategies.ring.routes import Stage
from tests.cases import random_qkv
from tests.rings import problem


def stage_of(plan: OneCallPlan) -> Stage:
    """Return the only stage of a plan."""
    [round_] = plan.forward_program.rounds
    [stage] = round_.stages
    return stage


def received_tokens(plan: OneCallPlan) -> int:
    """Count the tokens that land and are another rank's."""
    return sum(length(at) for peer, at in stage_of(plan).sources if peer != plan.rank)


def plans(mask: Mask, layout: Layout, **fields) -> list:
    call = problem(mask, layout, layout.size, **fields)
    return [load("one-call").plan(call, rank) for rank in range(layout.size)]


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
        for program in (plan.forward_program, plan.backward_program):
            assert not program.own
            [gathered] = program.calls[0, 0]
            assert gathered.q_spans == ((0, 96 // size),)
            assert gathered.kv_spans == ((0, stage_of(plan).tokens),)


def test_each_rank_of_a_causal_zigzag_gathers_equally_much():
    everyone = plans(Mask.causal(128), Layout.zigzag(128, 4))
    chunk = 128 // 8
    for plan in everyone:
        stage = stage_of(plan)
        assert stage.tokens == 9 * chunk
        assert received_tokens(plan) == 6 * chunk


class Runs(Layout):
    """Ranks own runs of four tokens in turns."""

    name = "runs"

    def ranges(self, rank: int) -> tuple[range, ...]:
        starts = range(4 * rank, self.seq_len, 4 * self.size)
        return tuple(range(start, start + 4) for start in starts)


def test_a_window_gathers_only_what_it_sees():
    for plan in plans(Mask.window(1024, 17), Layout.zigzag(1024, 4)):
        assert received_tokens(plan) <= 2 * 16


@pytest.mark.parametrize(
    ("mask", "layout"),
    [
        (Mask.documents([0, 32, 64]), Layout.contiguous(64, 2)),
        (Mask.causal(128), Runs(128, 2)),
        (Mask.causal(64), Layout.striped(64, 2)),
    ],
    ids=["nothing is sent", "each short run of queries sees all earlier keys", "striped"],
)
def test_where_one_call_gains_nothing_the_plan_is_all_gathers(mask, layout):
    found = plans(mask, layout)
    expected = [load("all-gather").plan(plan.problem, plan.rank) for plan in found]
    assert [*map(str, found)] == [*map(str, expected)]
    assert isinstance(plans(mask, Layout.zigzag(mask.seq_len, 4))[0], OneCallPlan)


def test_a_whole_result_is_not_copied(monkeypatch):
    """Neither out nor dq, which are those of the kernel's only call."""
    kernel, made = kernels.load("cpu"), []
    for name in ("forward", "backward"):
        compute = getattr(kernel, name)
        keep = lambda *inputs, compute=compute: made.append(compute(*inputs)) or made[-1]  # noqa: E731
        monkeypatch.setattr(kernel, name, keep)
    layout, tensors = Layout.zigzag(32, 2), random_qkv(1, 32, 4, 2, 8)
    everyone = plans(Mask.causal(32), layout, heads=4, kv_heads=2, dtype=tensors[0].dtype)

    def work(ring):
        q, k, v, dout = (layout.shard(x, ring.rank) for x in tensors)
        plan, rings = everyone[ring.rank], make_rings(ring, (None, None))
        plan.reserve(rings, q.device, with_backward=True)
        out, lse, _ = plan.forward(rings, q, k, v)
        dq, *_ = plan.backward(rings, QueryGradients(q, dout, lse, out), Keys(k, v), (), ())
        return [x.data_ptr() for x in (out, lse, dq)]

    first, second = simulate(2, work)
    assert {*first, *second} <= {x.data_ptr() for results in made for x in results}


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize(("size", "inner"), [(2, 2), (8, 8), (8, 4)])
def test_all_comes_in_one_stage_of_one_pass(size, inner, backward, monkeypatch):
    """Of each host; the ring has several of both with as few bytes."""
    monkeypatch.setattr(ring_strategy, "_ENOUGH_ROWS", 1)
    sizes = {"heads": 4, "kv_heads": 4, "head_size": 128, "backward": backward, "group_bytes": 0}
    call = problem(Mask.causal(64 * size), Layout.zigzag(64 * size, size), inner, **sizes)
    for rank in range(size):
        gathered, ring = (load(name).plan(call, rank) for name in ("all-gather", "ring"))
        for program in (gathered.forward_program, gathered.backward_program):
            assert len(program.passes) == 1
            assert [len(round_.stages) for round_ in program.rounds] == [1] * (size // inner)
            assert [event.do for event in program.events].count("fetch") == size // inner
        for program in (ring.forward_program, ring.backward_program):
            assert len(program.passes) == 4
            assert max(len(round_.stages) for round_ in program.rounds) == inner - 1
    assert str(gathered).startswith(f"rank {size - 1}, forward: KeysValues in 1 pass")
