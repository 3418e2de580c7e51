"""Lightning attention on GPUs: one process and several ranks equal the recurrence.

The reference computes in float64, the Triton kernel in the other dtypes.
"""

from __future__ import annotations

import pytest
import torch

from bmt_burst import Layout, lightning_attn_func
from bmt_burst.lightning import rates
from tests.launcher import needs_ranks, run_ranks
from tests.lightning import SLOPES, worst_rank_error
from tests.test_gpu import rings

pytestmark = [pytest.mark.gpu, needs_ranks(1)]

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", BOUNDS)


@dtypes
@pytest.mark.parametrize("tokens_choose", [False, True], ids=["slopes", "log_decay"])
def test_one_gpu_equals_the_recurrence(dtype, tokens_choose):
    options = {"device": "cuda", "dtype": dtype, "tokens_choose": tokens_choose}
    assert worst_rank_error({}, 0, 1, **options) < BOUNDS[dtype]


def test_a_positive_log_decay_is_nan_and_the_host_waits_for_no_value():
    x, log_decay = torch.randn(1, 70, 4, 16, device="cuda"), -torch.rand(1, 70, 4, device="cuda")
    clean = lightning_attn_func(x, x, x, log_decay=log_decay)
    torch.cuda.set_sync_debug_mode("error")
    try:
        log_decay[:, 30] += 2
        found = lightning_attn_func(x, x, x, log_decay=log_decay)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found[:, :30].equal(clean[:, :30]) and found[:, 30:].isnan().all()


def test_slopes_of_a_gpu_are_read_once_for_each_change():
    x, slopes = torch.randn(1, 70, 4, 16, device="cuda"), torch.tensor(SLOPES, device="cuda")
    first = lightning_attn_func(x, x, x, slopes)
    assert rates._known[slopes][1] == tuple(torch.tensor(SLOPES).tolist())
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = lightning_attn_func(x, x, x, slopes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again.equal(first)
    slopes.fill_(1e30)
    own = (x * x).sum(-1, keepdim=True) * x / 4  # only the own token is left
    assert (lightning_attn_func(x, x, x, slopes) - own).abs().max() < 1e-4


def errors_of_rank(rank: int, size: int, dtype: torch.dtype) -> dict[str, float]:
    layouts = {
        "zigzag": Layout.zigzag(60, size),
        "runs": Layout.chunks(60, size, 2 * size, "contiguous"),
    }
    return {
        f"{name} {layout}": worst_rank_error(groups, rank, size, whole, "cuda", dtype)
        for name, groups in rings(size).items()
        for layout, whole in layouts.items()
    }


@pytest.mark.ranks
@dtypes
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_equal_the_recurrence(size, dtype):
    for errors in run_ranks(size, errors_of_rank, size, dtype, backend="nccl"):
        name, worst = max(errors.items(), key=lambda entry: entry[1])
        assert worst < BOUNDS[dtype], (name, worst)
