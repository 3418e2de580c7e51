"""The contract of `Strategy` and `Plan`, for each registered strategy, on simulated ranks in
float64.

Everything is compared with dense attention over the whole sequence. The simulator poisons buffers
that may not be read yet, and refuses deliveries that `reserve` did not announce.
"""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from bmt_burst import Layout, Mask, Scores, burst_attn_func, simulate, strategies
from bmt_burst.ranks.rings import Rings
from bmt_burst.sequence.tile import KernelCall
from bmt_burst.strategies import Problem, load
from bmt_burst.strategies.ring.payload import forward_payload
from bmt_burst.transport import LANES
from tests.cases import call_tensors, random_layout, random_mask, random_qkv, random_two_lengths
from tests.reference import assert_close, dense_results, relative_error
from tests.rings import CPU_KERNELS, problem, ring_arguments, ring_results

SCALE = 0.31
NAMES = strategies.names()
# ranks, and ranks of a host
RINGS = [(1, 1), (2, 2), (3, 3), (4, 4), (8, 8), (4, 2), (6, 3), (4, 1), (8, 2)]
HEADS = [(4, 4), (8, 2), (6, 3), (3, 1), (7, 1), (12, 2)]
# Limits that only long calls reach, by their names: as they are, and small enough for short calls.
LIMITS = {
    "sequence.gathered_calls._GAP": (256, 3, 0),
    "sequence.gathered_calls._NARROW": (256, 4),
    "sequence.gathered_calls._MOST_SPANS": (8, 1),
    "kernels.tile_by_tile._ROWS": (256, 3),
    "strategies.ring._ENOUGH_ROWS": (1 << 18, 1),
    "strategies.one_call._MOST_COPIES": (2, 1),
    "strategies.ulysses.exchange._MOST_RUNS": (4, 1),
    "strategies.ulysses.heads._MOST_ROWS": (1 << 18, 60),
    "strategies.ulysses.heads._PIECE_WORK": (1 << 40, 1),
}
EXACT = 1e-12  # fp64 rounds at 1e-16; sums have some hundred terms

each_strategy = pytest.mark.parametrize("name", NAMES)
# One call and the plain ring always send keys.
SIDES = [(name, "q") for name in NAMES if name not in ("one-call", "plain-ring")]
SIDES += [(name, "kv") for name in NAMES]
each_side = pytest.mark.parametrize(("name", "side"), SIDES)


def refusal(
    name: str, mask: Mask, layout: Layout, inner: int, heads: int, kv_heads: int, **fields: Any
) -> str | None:
    return load(name).refuses(
        problem(mask, layout, inner, heads=heads, kv_heads=kv_heads, **fields)
    )


def case(
    seed: int, name: str
) -> tuple[Mask, list[Layout | None], int, tuple[int, int], list[torch.Tensor]] | None:
    """Return a random call, or None if the strategy refuses it. Values may have another head size
    than queries and keys. Every other seed has keys of another length or layout.
    """
    chance = random.Random(seed)
    size, inner = RINGS[seed % len(RINGS)]
    mask = random_mask(chance, chance.randint(size, 60))
    layouts = [random_layout(chance, mask, size), None]
    if seed % 2 and load(name).takes_kv_layout:
        mask, *layouts = random_two_lengths(chance, size)
    heads = chance.choice(HEADS)
    if refusal(name, mask, layouts[0], inner, *heads, kv_layout=layouts[1]):
        return None
    call = KernelCall.whole(mask.seq_len, mask.kv_len)
    tensors = call_tensors(call, chance.choice((1, 2)), *heads, 8, seed=seed)
    sizes = chance.choice(((8, 8), (8, 8), (8, 5), (3, 8)))
    tensors = [x[..., : sizes[i > 1]] for i, x in enumerate(tensors)]
    return mask, layouts, inner, heads, tensors


def set_forward(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """Make the forward of rings send a side, unless its strategy sets one."""

    def payload(problem):
        return forward_payload(replace(problem, forward=side))

    monkeypatch.setattr(
        "bmt_burst.strategies.ring.forward_payload",
        lambda problem: (payload if problem.forward == "auto" else forward_payload)(problem),
    )


def lse_gradient(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return a gradient of lse (B, H, S), and set some rows of dout, the last tensor, to 0.

    For those rows no out has the delta that a backward needs.
    """
    q, *_, dout = tensors
    rows = torch.rand(*q.shape[:3], 1)
    dout.masked_fill_(rows < 0.3, 0.0)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float64)
    return dlse.masked_fill(rows[..., 0].transpose(1, 2) < 0.1, 0.0)


@each_strategy
def test_equals_dense_attention(name, monkeypatch):
    """With any mask and layout, on one rank to eight, on odd lengths, for all head ratios.

    Some calls have a softcap, sinks, a gradient of lse or transposed inputs. Rings send either side
    in both directions.
    """
    done = 0
    for seed in range(3 * len(RINGS)):
        if found := case(seed, name):
            mask, (layout, kv_layout), inner, (heads, _), tensors = found
            chance = random.Random(seed)
            for limit, values in LIMITS.items():
                monkeypatch.setattr(f"bmt_burst.{limit}", chance.choice(values))
            softcap = chance.choice((None, None, None, 0.6, 40.0))
            learned = {
                "softcap": softcap,
                "sinks": chance.choice((None, torch.linspace(-2, 2, heads).double())),
                "dlse": chance.choice((None, lse_gradient(tensors))),
            }
            options = {
                "flash": "reference" if softcap else chance.choice(CPU_KERNELS),
                "backward": chance.choice(("auto", "q", "kv")),
                "group_bytes": chance.choice((0, 3_000, 1 << 30)),
                "strided": chance.random() < 0.3,
            }
            options = {"mask": mask, "strategy": name, **learned, **options}
            set_forward(monkeypatch, chance.choice(("auto", "q", "kv")))
            got = ring_results(layout, tensors, SCALE, inner, kv_layout=kv_layout, **options)
            expected = dense_results(mask, tensors, SCALE, **learned)
            what = seed, layout, kv_layout, inner, options
            assert_close(got, expected, tensors[3], SCALE, EXACT, what)
            done += 1
    assert done >= len(RINGS), "it refuses nearly everything"


@pytest.mark.parametrize("side", ["q", "kv"])
@pytest.mark.parametrize("group_bytes", [0, 8_000, 1 << 30])
@pytest.mark.parametrize(("size", "inner"), [(2, 2), (8, 8), (6, 3), (8, 2)])
def test_rings_send_either_side_in_passes_and_stages(size, inner, group_bytes, side, monkeypatch):
    """Some queries see nothing, and with many ranks some ranks see no other's tokens."""
    set_forward(monkeypatch, side)
    monkeypatch.setattr("bmt_burst.strategies.ring._ENOUGH_ROWS", 1)
    whole = Mask.documents((0, 9, 31, 60), window=25).rows(20, 60)
    mask = Mask(40, tuple(s for s in whole.slices if s.q[0] != 11), 60)
    layout, kv_layout = Layout.zigzag(40, size), Layout.chunks(60, size, 20)
    tensors = call_tensors(KernelCall.whole(40, 60), 2, 4, 2, 8)
    learned = {"softcap": 3.0, "sinks": torch.linspace(-2, 2, 4).double()}
    options = {"flash": "reference", "group_bytes": group_bytes, "strategy": "ring", **learned}
    got = ring_results(layout, tensors, SCALE, inner, kv_layout=kv_layout, mask=mask, **options)
    assert_close(got, dense_results(mask, tensors, SCALE, **learned), tensors[3], SCALE, EXACT)


class Cut(Layout):
    """Rank r has positions ends[r] to ends[r + 1] - 1."""

    name = "cut"

    def __init__(self, ends: tuple[int, ...]):
        super().__init__(ends[-1], len(ends) - 1)
        self.ends = ends

    def ranges(self, rank):
        return [range(*self.ends[rank : rank + 2])]


@each_strategy
@pytest.mark.parametrize("inner", [2, 4])
@pytest.mark.parametrize("ends", [(0, 3, 54, 57, 60), (0, 20, 60, 60, 60)])
def test_the_longest_shard_may_be_on_any_rank_and_a_host_may_have_none(name, inner, ends):
    """Deliveries reserve memory for its blocks."""
    mask, layout, tensors = Mask.full(60), Cut(ends), random_qkv(1, 60, 4, 2, 8)
    if not refusal(name, mask, layout, inner, 4, 2):
        options = {"mask": mask, "strategy": name, "group_bytes": 0}
        got = ring_results(layout, tensors, SCALE, inner, **options)
        expected = dense_results(mask, tensors, SCALE)
        assert_close(got, expected, tensors[3], SCALE, EXACT)


@each_strategy
def test_does_the_plain_case(name):
    """A causal mask over two ranks in every layout: no strategy may refuse that."""
    mask, tensors = Mask.causal(21), random_qkv(1, 21, 4, 2, 8)
    for layout in (Layout.zigzag(21, 2), Layout.contiguous(21, 2), Layout.balanced(mask, 2)):
        got = ring_results(layout, tensors, SCALE, mask=mask, strategy=name)
        expected = dense_results(mask, tensors, SCALE)
        assert_close(got, expected, tensors[3], SCALE, EXACT, layout)


@each_side
def test_queries_that_see_nothing_have_0_and_minus_inf(name, side, monkeypatch):
    set_forward(monkeypatch, side)
    mask = Mask(20, tuple(s for s in Mask.documents((0, 4, 9, 20)).slices if s.q[0] != 4))
    tensors = random_qkv(1, 20, 4, 2, 8)
    options = {"mask": mask, "strategy": name, "dlse": lse_gradient(tensors).fill_(torch.inf)}
    options["dlse"][:, :, 9:] = 1.0  # the gradient of lse^2 is infinite where lse is -inf
    options["dlse"][:, :, :4] = 1.0
    out, lse, *grads = ring_results(Layout.zigzag(20, 2), tensors, SCALE, **options)
    assert out[:, 4:9].eq(0).all()
    assert lse[:, :, 4:9].eq(-torch.inf).all()
    assert all(grad[:, 4:9].eq(0).all() and grad.isfinite().all() for grad in grads)


@each_strategy
def test_a_learned_bias_is_added_or_refused(name):
    mask = Mask.documents((0, 13, 40))
    scores = Scores.by_distance(mask, torch.arange(21, dtype=torch.int32))
    layout = Layout.zigzag(40, 2)
    table = torch.randn(21, 4, dtype=torch.float64)
    tensors = random_qkv(1, 40, 4, 4, 8)
    options = {"scores": scores, "bias": table, "strategy": name, "flash": "reference"}
    options["dlse"] = dlse = lse_gradient(tensors)
    if refusal(name, mask, layout, 2, 4, 4, scores=scores):
        with pytest.raises(ValueError, match=f"strategy {name!r}"):
            ring_results(layout, tensors, SCALE, **options)
        return
    got = ring_results(layout, tensors, SCALE, **options)
    expected = dense_results(mask, tensors, SCALE, scores.dense(), table, dlse=dlse)
    assert_close(got, expected, tensors[3], SCALE, EXACT)


@each_strategy
def test_rows_of_a_batch_with_masks_of_their_own(name):
    masks, tensors = [Mask.documents((0, 9, 24)), Mask.full(24)], random_qkv(2, 24, 4, 2, 8)
    got = ring_results(Layout.zigzag(24, 2), tensors, SCALE, mask=masks, strategy=name)
    rows = [
        dense_results(mask, [x[i : i + 1] for x in tensors], SCALE) for i, mask in enumerate(masks)
    ]
    expected = [torch.cat(pair) for pair in zip(*rows, strict=True)]
    assert_close(got, expected, tensors[3], SCALE, EXACT)


@each_side
def test_deterministic_results_are_equal_bit_for_bit(name, side, monkeypatch):
    set_forward(monkeypatch, side)
    mask, tensors = Mask.documents((0, 7, 33)), random_qkv(1, 33, 4, 2, 8, torch.float32)
    options = {"mask": mask, "strategy": name, "deterministic": True, "group_bytes": 1000}
    first, again = (ring_results(Layout.zigzag(33, 3), tensors, SCALE, **options) for _ in range(2))
    assert all(x.equal(y) for x, y in zip(first, again, strict=True))


@each_strategy
def test_memory_is_reserved_for_any_mask(name, monkeypatch):
    """Each rank reserves all lanes, even for 0 bytes, and as many bytes whatever the mask."""
    asked: list[tuple[tuple[str, int], ...]] = []
    reserve = Rings.reserve

    def record(self, lane_bytes, device):
        asked.append(tuple(sorted(lane_bytes.items())))
        reserve(self, lane_bytes, device)

    monkeypatch.setattr(Rings, "reserve", record)
    layout, tensors, seen = Layout.zigzag(30, 3), random_qkv(1, 30, 6, 3, 8), []
    for mask in (Mask.documents((0, 4, 30)), Mask.causal(30), Mask.full(30)):
        asked.clear()
        ring_results(layout, tensors, SCALE, mask=mask, strategy=name)
        assert len(asked) >= 3, "a rank reserves nothing"
        assert all({lane for lane, _ in lanes} == {*LANES} for lanes in asked)
        seen.append(sorted(asked))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(
    ("name", "side", "heads", "head_size"),
    [(*pair, 8, 16) for pair in SIDES]
    + [(*pair, 3, 12) for pair in SIDES if pair[0] in ("ulysses", "usp")],
)
def test_partial_results_are_added_up_in_fp32(name, heads, head_size, side, monkeypatch):
    """With bf16 inputs. A result that is rounded once is off by 1.6e-3 on average, 2.1e-3 with the
    rounding of out in delta, and one that is summed in bf16 over eight ranks by 3.3e-3 or more.
    Ulysses sends eight gradients of the kv head, each rounded to bf16: then it is 2.5e-3. It joins
    heads in units of 16 bytes, and 12 numbers are no multiple of them.
    """
    set_forward(monkeypatch, side)
    mask, layout = Mask.causal(64), Layout.zigzag(64, 8)
    tensors = random_qkv(2, 64, heads, 1, head_size, torch.bfloat16)
    got = ring_results(layout, tensors, SCALE, mask=mask, strategy=name, flash="reference")
    exact = dense_results(mask, tensors, SCALE)
    assert max(map(relative_error, got, exact)) < 2.7e-3


@each_strategy
def test_calls_of_one_group_follow_each_other(name):
    """Plans run again. One call's backward may come after the forward of the next."""
    layout = Layout.zigzag(18, 3)
    inputs = [random_qkv(1, 18, 2, 2, 8, seed=seed) for seed in range(3)]

    def work(ring):
        outs, leaves = [], []
        for tensors in inputs:
            q, k, v = (layout.shard(x, ring.rank).requires_grad_() for x in tensors[:3])
            arguments = ring_arguments(ring, ring.size)
            outs.append(
                burst_attn_func(
                    q, k, v, SCALE, causal=True, layout=layout, strategy=name, **arguments
                )
            )
            leaves.append((q, k, v))
        given = [layout.shard(tensors[3], ring.rank) for tensors in inputs]
        return [torch.autograd.grad(outs[i], leaves[i], given[i]) for i in (1, 0, 2)]

    results = simulate(3, work)
    for place, number in enumerate((1, 0, 2)):
        expected = dense_results(Mask.causal(18), inputs[number], SCALE)[2:]
        for which, exact in enumerate(expected):
            mine = layout.unshard([result[place][which] for result in results])
            assert float((mine - exact).norm() / exact.norm()) < EXACT


@each_strategy
def test_a_plan_is_a_pure_function_that_prints(name):
    mask = Mask.documents((0, 11, 40))
    call: Problem = problem(mask, Layout.balanced(mask, 4), heads=4, kv_heads=4)
    if reason := load(name).refuses(call):
        pytest.fail(f"it refuses documents over four ranks: {reason}")
    for rank in range(4):
        plans = [load(name).plan(call, rank) for _ in range(2)]
        assert str(plans[0]) == str(plans[1])
        assert f"rank {rank}" in str(plans[0])


@each_strategy
def test_a_plan_that_nothing_refers_to_is_freed(name):
    """A cache around a method would keep it, with its tilings and tensors."""
    plan = load(name).plan(problem(Mask.causal(24), Layout.zigzag(24, 2), heads=2, kv_heads=2), 0)
    str(plan)  # computes what the plan keeps
    freed = weakref.ref(plan)
    del plan
    gc.collect()
    assert freed() is None


@each_strategy
def test_a_refusal_is_an_error_on_every_rank(name):
    """Double rings, or few heads: whatever it refuses, it says so with its name."""
    mask, heads = Mask.causal(16), random_qkv(1, 16, 2, 1, 8)
    layout = Layout.zigzag(16, 4)
    if not (reason := refusal(name, mask, layout, 2, 2, 1)):
        return
    with pytest.raises(ValueError, match=f"strategy {name!r}") as raised:
        ring_results(layout, heads, SCALE, 2, mask=mask, strategy=name)
    assert reason in str(raised.value)


def test_the_registry_names_each_strategy_as_it_names_itself():
    assert [load(name).name for name in NAMES] == NAMES
