"""The ring: gradients that are not wanted, narrow dtypes, and tokens that nobody may see.

tests/conformance compares every strategy with dense attention.
"""

import pytest
import torch

from bmt_burst import Layout, Mask, burst_attn_func, simulate
from bmt_burst.sequence.layout import LAYOUTS
from tests.cases import random_qkv
from tests.reference import dense_results, relative_error
from tests.rings import CPU_KERNELS, ring_results

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


@pytest.mark.parametrize(("layout", "backward"), [*zip(LAYOUTS, ("q", "kv", "kv"), strict=True)])
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
