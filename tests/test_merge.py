"""Merging against the softmax over all keys, and at its edges."""

import math

import pytest
import torch

from bmt_burst.base.dtypes import accumulator_dtype
from bmt_burst.merging.merge import Outputs, Sum


def merged(parts, dtype=torch.float32):
    total = Outputs((1, 1, 1, 2), dtype, torch.device("cpu"))
    for value, lse in parts:
        out = torch.full((1, 1, 1, 2), value, dtype=dtype)
        total.add([(0, 1)], out, torch.full((1, 1, 1), lse, dtype=accumulator_dtype(dtype)))
    out, lse = total.result()
    return out[0, 0, 0, 0].item(), lse.item()


@pytest.mark.parametrize("difference", [0.0, 1.0, 88.0, 89.0, 104.0, 1e4])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_two_parts(difference, order, dtype, bound):
    """e^88.7 is the end of fp32, e^-104 its beginning."""
    parts = [(2.0, 3.0), (5.0, 3.0 + difference)][::order]
    out, lse = merged(parts, dtype)
    share = 1 / (1 + math.exp(-difference))
    assert out == pytest.approx(2.0 * (1 - share) + 5.0 * share, rel=bound)
    assert lse == pytest.approx(3.0 + difference + math.log1p(math.exp(-difference)), rel=bound)


@pytest.mark.parametrize("order", [1, -1])
def test_where_nothing_but_minus_infinity_was_seen_nan_remains_until_something_is(order):
    """As a block says whose scores are all -inf."""
    out, lse = merged([(math.nan, -math.inf), (0.0, -math.inf)][::order])
    assert math.isnan(out)
    assert lse == -math.inf
    assert merged([(math.nan, -math.inf), (1.25, 0.5)][::order]) == (1.25, 0.5)
    assert all(map(math.isnan, merged([(1.25, 0.5), (1.25, math.nan)][::order])))


def test_sums_without_parts_are_0_before_and_after_a_fold():
    q = torch.randn(2, 5, 3, 4)
    sums = [kind(q.shape, q.dtype, q.device) for kind in (Outputs, Sum)]
    for outputs, gradients in (sums, [total.like(7, torch.bfloat16, 0) for total in sums]):
        for fold in (False, True):
            if fold:
                outputs.fold()
                gradients.fold()
            (out, lse), [grad] = outputs.result(), gradients.result()
            assert out.eq(0).all() and lse.eq(-torch.inf).all() and grad.eq(0).all()
            assert out.shape == grad.shape and out.dtype == grad.dtype
