"""Models of transformers on GPUs: two ranks that share sequences equal one GPU."""

import copy

import pytest
import torch
import torch.distributed as dist

from bmt_burst import init_sequence_parallel
from bmt_burst.adapters.transformers import enable
from tests.launcher import needs_ranks, run_ranks
from tests.reference import relative_error
from tests.test_transformers import CONFIGS, calls_of, plain

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, needs_ranks(2)]


def models(dtype: torch.dtype) -> list[str]:
    """Return the models to compare: in bf16 those whose attention differs.

    GptOss is compared in fp32 alone: where rounding decides, its routers take other experts.
    """
    if dtype == torch.float32:
        return list(CONFIGS)
    return ["Llama", "Qwen2, windows above", "Phi3, long", "MiniCPM3", "Gemma2"]


def errors(rank: int, dtype: torch.dtype) -> dict[tuple[str, str], tuple[float, float]]:
    """Of the loss and of all gradients together, of each model in each call."""
    sp, found = init_sequence_parallel(), {}
    for name in models(dtype):
        before = copy.deepcopy(plain(name)).to("cuda", dtype)
        after = enable(copy.deepcopy(before), sp)
        for which, call in calls_of(name).items():
            call = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in call.items()}
            before.zero_grad(), after.zero_grad()
            losses = [model(**call, use_cache=False).loss for model in (before, after)]
            for loss in losses:
                loss.backward()
            expected, got = (
                torch.cat([p.grad.float().flatten() for p in x.parameters()])
                for x in (before, after)
            )
            dist.all_reduce(got, dist.ReduceOp.AVG)
            found[name, which] = relative_error(losses[1], losses[0]), relative_error(got, expected)
    return found


@pytest.mark.parametrize(
    ("dtype", "loss_bound", "bound"),
    [
        (torch.float32, 1e-5, 1e-4),  # rounding, of sums in another order
        (torch.bfloat16, 1e-2, 1e-1),  # each of two layers rounds to 2^-8, and both models do
    ],
)
def test_enabled_models_equal_those_of_one_gpu(dtype, loss_bound, bound):
    for found in run_ranks(2, errors, dtype, backend="nccl"):
        assert len(found) == sum(len(calls_of(name)) for name in models(dtype))
        for key, (of_loss, of_gradients) in found.items():
            assert of_loss < loss_bound, key
            assert of_gradients < bound, key
