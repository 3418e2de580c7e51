"""The tests' own measures of errors: rounding is a small error, and a wrong entry is a large
one.
"""

import math

import pytest
import torch

from bmt_burst import Mask, Slice
from tests.cases import random_qkv
from tests.reference import attention_errors, dense_results

SCALE = 0.3
# each query sees one key or none, so dq and dk are 0 in exact arithmetic
MASK = Mask(6, (Slice((0, 3), (0, 1)),))


def results() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return out, lse, dq, dk, dv of MASK, and the gradient of out."""
    tensors = random_qkv(1, 6, 2, 2, 8)
    return dense_results(MASK, tensors, SCALE), tensors[3]


def test_rounding_where_all_cancels_is_a_small_error():
    """CPUs round differently, so a 0 of one CPU may be 1e-15 on another."""
    expected, dout = results()
    assert max(x.abs().max() for x in expected[2:4]) < 1e-14
    got = [x + 1e-15 for x in expected]
    assert max(attention_errors(got, expected, dout, SCALE).values()) < 1e-14
    got = [*expected[:2], torch.full_like(dout, 1e-15), torch.zeros_like(dout), expected[4]]
    assert max(attention_errors(got, expected, dout, SCALE).values()) < 1e-14


@pytest.mark.parametrize("i", range(5))
@pytest.mark.parametrize("wrong", [1e-6, math.nan])
def test_one_wrong_entry_is_a_large_error(i, wrong):
    expected, dout = results()
    got = [x.clone() for x in expected]
    got[i][0, 0, 0] += wrong
    assert max(attention_errors(got, expected, dout, SCALE).values()) > 1e-8


@pytest.mark.parametrize("wrong", [0.0, math.inf, math.nan])
def test_an_lse_of_who_sees_nothing_is_minus_infinity(wrong):
    expected, dout = results()
    assert expected[1][0, 0, 5] == -math.inf
    got = [x.clone() for x in expected]
    got[1][0, 0, 5] = wrong
    assert attention_errors(got, expected, dout, SCALE)["lse"] == math.inf
