"""The ring equals dense attention: out, lse, dq, dk, dv in fp64 to 1e-10, through the simulator."""

import itertools

import pytest
import torch

from bmt_burst import Layout, Mask, burst_attn_func, simulate
from bmt_burst.sequence.layout import LAYOUTS
from bmt_burst.strategies import ring as ring_strategy
from tests.cases import random_qkv
from tests.reference import dense_results, relative_error
from tests.rings import CPU_KERNELS, ring_results

# ranks, ranks of a host
RINGS = [(1, 1), (2, 2), (3, 3), (4, 4), (8, 8), (4, 2), (6, 3), (8, 4), (8, 2), (4, 1)]
# tokens, batch, q heads, kv heads, head size: odd and short lengths, GQA ratios 1 to 4
SHAPES = [
    (16, 2, 4, 2, 8),
    (37, 1, 3, 3, 24),
    (61, 2, 4, 1, 40),
    (8, 1, 2, 2, 8),
    (129, 1, 6, 2, 8),
]
CASES = [
    (*ring, layout, causal, backward, SHAPES[index % len(SHAPES)], index)
    for index, (ring, layout, causal, backward) in enumerate(
        itertools.product(RINGS, LAYOUTS, (True, False), ("q", "kv"))
    )
]
CASES += [
    (*ring, layout, True, backward, shape, 7)
    for ring, layout, backward, shape in itertools.product(
        [(3, 3), (4, 2), (8, 8)], LAYOUTS, ("q", "kv"), SHAPES
    )
]
CASES = CASES[::7]  # tests/conformance has random ones, for every strategy
# a message of one entry, whose strides say nothing
CASES += [(8, 4, "striped", True, "q", (17, 3, 1, 1, 2), 6)]
SCALE = 0.31


def whole_mask(causal, tensors):
    return (Mask.causal if causal else Mask.full)(tensors[0].shape[1])


def dense(causal, tensors):
    return dense_results(whole_mask(causal, tensors), tensors, SCALE)


def ring_attention(size, inner, layout, causal, backward, tensors, **options):
    """Whole out, lse, dq, dk, dv of a simulated ring."""
    whole = Layout.named(layout, tensors[0].shape[1], size)
    options = {"causal": causal, "layout": layout, "backward": backward, **options}
    return ring_results(whole, tensors, SCALE, inner, **options)


@pytest.mark.parametrize(("size", "inner", "layout", "causal", "backward", "shape", "seed"), CASES)
def test_ring_equals_dense(size, inner, layout, causal, backward, shape, seed):
    tokens, batch, heads, kv_heads, head_size = shape
    tensors = random_qkv(batch, tokens, heads, kv_heads, head_size, seed=seed)
    # Independent of what CASES runs through fastest: kernel, delta or out on the way, blocks in a
    # group.
    flash, optimize, group_bytes = (
        CPU_KERNELS[seed // 2 % len(CPU_KERNELS)],
        seed % 3 > 0,
        (0, 20_000, 1 << 30)[seed // 4 % 3],
    )
    options = {"flash": flash, "optimize_bwd_comm": optimize, "group_bytes": group_bytes}
    got = ring_attention(size, inner, layout, causal, backward, tensors, **options)
    for name, mine, expected in zip(
        ("out", "lse", "dq", "dk", "dv"), got, dense(causal, tensors), strict=True
    ):
        assert mine.dtype == torch.float64
        assert relative_error(mine, expected) < 1e-10, name


@pytest.mark.parametrize(("size", "inner"), [(4, 4), (4, 2), (6, 3)])
@pytest.mark.parametrize(
    ("layout", "optimize"), [("zigzag", True), ("zigzag", False), ("striped", True)]
)
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("blocks", [1, 7])
def test_a_pass_for_each_kv_head_equals_dense(
    size, inner, layout, optimize, backward, blocks, monkeypatch
):
    """In groups of so many blocks."""
    monkeypatch.setattr(ring_strategy, "_ENOUGH_ROWS", 1)
    tensors = random_qkv(1, 8 * size, 6, 3, 8)
    options = {
        "optimize_bwd_comm": optimize,
        "group_bytes": blocks * 2560,
    }  # a block of a kv head has 1024 bytes, its two query heads 2304
    got = ring_attention(size, inner, layout, True, backward, tensors, **options)
    for mine, expected in zip(got, dense(True, tensors), strict=True):
        assert relative_error(mine, expected) < 1e-10


@pytest.mark.parametrize(("size", "inner"), [(3, 3), (4, 2), (2, 1)])
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("flash", CPU_KERNELS)
def test_strides_do_not_matter(size, inner, backward, flash):
    tensors = random_qkv(2, 19, 4, 2, 8)
    got = ring_attention(size, inner, "zigzag", True, backward, tensors, strided=True, flash=flash)
    for mine, expected in zip(got, dense(True, tensors), strict=True):
        assert relative_error(mine, expected) < 1e-10


@pytest.mark.parametrize("wanted", [(), ("q",), ("k",), ("v", "q")])
def test_only_the_gradients_that_are_wanted(wanted):
    tensors = dict(zip("qkvd", random_qkv(1, 12, 2, 2, 8), strict=True))
    whole = Layout.zigzag(12, 3)
    expected = dict(zip("qkv", dense(True, list(tensors.values()))[2:], strict=True))

    def work(ring):
        shards = {
            name: whole.shard(x, ring.rank).requires_grad_(name in wanted)
            for name, x in tensors.items()
        }
        out = burst_attn_func(
            shards["q"], shards["k"], shards["v"], SCALE, causal=True, process_group=ring
        )
        if wanted:
            out.backward(shards["d"])
        return {name: shards[name].grad for name in "qkv"}

    results = simulate(3, work)
    for name in "qkv":
        grads = [r[name] for r in results]
        if name in wanted:
            assert relative_error(whole.unshard(grads), expected[name]) < 1e-10
        else:
            assert grads == [None] * 3


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)]
)
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("flash", CPU_KERNELS)
def test_narrow_dtypes_keep_their_precision(dtype, bound, backward, flash):
    """Bounds: a few units in the last place of the dtype (1e-7, 4e-3, 5e-4), to which results are
    rounded.
    """
    tensors = random_qkv(1, 61, 4, 2, 24, dtype)
    got = ring_attention(4, 2, "zigzag", True, backward, tensors, flash=flash)
    for i, (mine, expected) in enumerate(zip(got, dense(True, tensors), strict=True)):
        assert mine.dtype == (torch.float32 if i == 1 else dtype)
        assert relative_error(mine, expected) < bound


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backward", ["q", "kv"])
def test_the_future_does_not_leak(layout, backward):
    """Changing token t and all after it leaves every output before t as it was, bit for bit."""
    tokens, changed = 37, 21
    tensors = random_qkv(1, tokens, 2, 1, 8, torch.float32)
    before = ring_attention(4, 2, layout, True, backward, tensors)[:2]
    for x in tensors[:3]:
        x[:, changed:] += 1.0
    after = ring_attention(4, 2, layout, True, backward, tensors)[:2]
    assert before[0][:, :changed].equal(after[0][:, :changed])
    assert before[1][:, :, :changed].equal(after[1][:, :, :changed])
    assert not before[0][:, changed:].equal(after[0][:, changed:])


@pytest.mark.parametrize("backward", ["q", "kv"])
def test_runs_repeat_bit_for_bit(backward):
    tensors = random_qkv(2, 61, 4, 2, 8, torch.float32)
    first, second = (
        ring_attention(6, 3, "zigzag", True, backward, tensors, deterministic=True)
        for _ in range(2)
    )
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
