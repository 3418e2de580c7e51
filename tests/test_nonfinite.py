"""Inputs that are not finite: NaN is where dense attention has it, whatever the blocks, and never
hidden.
"""

import itertools

import pytest
import torch

from bmt_burst import Layout
from tests.cases import random_qkv
from tests.reference import dense_attention
from tests.rings import CPU_KERNELS, ring_output, ring_results

VALUES = [float("nan"), float("inf"), -float("inf")]


def spoilt(tokens, name, at, value, dtype):
    """q, k, v, dout, of which the one called `name` has a value in one entry of some tokens; and
    their doubles.
    """
    tensors = random_qkv(1, tokens, 4, 2, 16, dtype, seed=tokens)
    tensors["qkv".index(name)][0, at, 0, 3] = value
    return tensors, [x.double() for x in tensors[:3]]


@pytest.mark.parametrize("flash", CPU_KERNELS)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["q", "k"])
def test_a_ring_is_nan_where_dense_attention_is(flash, size, name, value):
    for (tokens, dtype), causal in itertools.product(
        ((4, torch.float32), (37, torch.bfloat16)), (False, True)
    ):
        for at in (0, tokens // 2):
            (q, k, v, _), doubles = spoilt(tokens, name, at, value, dtype)
            expected, _ = dense_attention(*doubles, causal, 16**-0.5)
            layout, options = Layout.zigzag(tokens, size), {"causal": causal, "flash": flash}
            out = ring_output(layout, (q, k, v), **options)
            assert out.isnan().equal(expected.isnan()), (tokens, causal, dtype, at)


@pytest.mark.parametrize("flash", CPU_KERNELS)
@pytest.mark.parametrize(("backward", "causal"), [("q", True), ("kv", False)])
@pytest.mark.parametrize("value", VALUES[1:])
def test_gradients_of_a_query_that_is_not_finite_are_nan(flash, backward, causal, value):
    tokens, size = 12, 3
    tensors, _ = spoilt(tokens, "q", 5, value, torch.float32)
    options = {"causal": causal, "backward": backward, "flash": flash}
    *_, dq, dk, dv = ring_results(Layout.zigzag(tokens, size), tensors, 16**-0.5, **options)
    lost = torch.zeros_like(dq, dtype=torch.bool)
    lost[0, 5, 0] = True
    assert dq.isnan().equal(lost)
    seen = slice(0, 6 if causal else tokens)
    assert dk[0, seen, 0].isnan().any(-1).all()
    assert dv[0, seen, 0].isnan().all()
    assert dk[:, :, 1].isfinite().all()


def test_scores_that_overflow_are_as_in_dense_attention():
    """Keys whose score is -inf count for nothing, and a query that sees no others gets NaN."""
    q, k, v, _ = random_qkv(1, 6, 1, 1, 8, torch.float32)
    q[...], k[0, :4] = 1e20, -1e20
    out = ring_output(Layout.contiguous(6, 3), (q, k, v), causal=True)
    assert out[0, :4].isnan().all()
    expected, _ = dense_attention(q, k, v, True, 8**-0.5)
    assert out.isnan().equal(expected.isnan())
    assert torch.allclose(out[0, 4:], expected[0, 4:])
