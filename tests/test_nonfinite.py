"""Inputs that are not finite: NaN is where dense attention has it, and is never hidden."""

import itertools

import pytest
import torch

from bmt_burst import Layout, Mask
from tests.cases import random_qkv
from tests.reference import dense_results
from tests.rings import CPU_KERNELS, ring_output, ring_results

VALUES = [float("nan"), float("inf"), -float("inf")]


def spoilt(tokens, name, at, value, dtype):
    """q, k, v, dout, of which the one called `name` has a value in one entry of some tokens."""
    tensors = random_qkv(1, tokens, 4, 2, 16, dtype, seed=tokens)
    tensors["qkv".index(name)][0, at, 0, 3] = value
    return tensors


@pytest.mark.parametrize("flash", CPU_KERNELS)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["q", "k"])
def test_a_ring_is_nan_where_dense_attention_is(flash, size, name, value):
    for (tokens, dtype), make_mask in itertools.product(
        ((4, torch.float32), (37, torch.bfloat16)), (Mask.full, Mask.causal)
    ):
        for at in (0, tokens // 2):
            tensors, mask = spoilt(tokens, name, at, value, dtype)[:3], make_mask(tokens)
            expected, _ = dense_results(mask, tensors, 16**-0.5)
            out = ring_output(Layout.zigzag(tokens, size), tensors, mask=mask, flash=flash)
            assert out.isnan().equal(expected.isnan()), (tokens, mask, dtype, at)


@pytest.mark.parametrize("flash", CPU_KERNELS)
@pytest.mark.parametrize(("backward", "causal"), [("q", True), ("kv", False)])
@pytest.mark.parametrize("value", VALUES[1:])
def test_gradients_of_a_query_that_is_not_finite_are_nan(flash, backward, causal, value):
    tokens, size = 12, 3
    tensors = spoilt(tokens, "q", 5, value, torch.float32)
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
    expected, _ = dense_results(Mask.causal(6), [q, k, v], 8**-0.5)  # fp64 holds all scores
    assert torch.allclose(out[0, 4:].double(), expected[0, 4:])
