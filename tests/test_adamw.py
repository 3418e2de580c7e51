"""AdamW over shards against torch's in fp64: on CPUs, and its Triton kernel for GPUs."""

import math

import pytest
import torch

from tests.test_passes import DEVICE
from train.engine import common, triton_adamw
from train.engine.common import AdamW, Shard, ShardedAdamW

if DEVICE == "cuda":
    pytestmark = [pytest.mark.gpu]
SHAPES = {"matrix": (40, 65), "vector": (1023,), "single": (1,), "elsewhere": (3, 5)}
SCALE = 8.0


def make(update) -> ShardedAdamW:
    device = "cpu" if update is common.update else DEVICE
    shards = {}
    for name, shape in SHAPES.items():
        size = 0 if name == "elsewhere" else math.prod(shape)
        aligned = torch.randn(size + 1, device=device)
        shards[name] = Shard(aligned[1:], 0, shape)
    optimizer = ShardedAdamW(shards, AdamW((0.8, 0.9), 1e-3, 0.3))
    optimizer._update = update
    return optimizer


@pytest.mark.parametrize("update", [common.update, triton_adamw.update], ids=["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_steps_equal_those_of_torch(update, dtype):
    """With clipping in the second step, and with weights that lie elsewhere."""
    optimizer, names = make(update), list(SHAPES)[:3]
    exact = {name: optimizer.shards[name].flat.double().cpu() for name in names}
    groups = [
        {"params": [exact["matrix"]], "weight_decay": 0.3},
        {"params": [exact["vector"], exact["single"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-3, foreach=False)
    half = {name: torch.zeros_like(s.flat, dtype=dtype) for name, s in optimizer.shards.items()}
    for step, max_norm in enumerate((1e9, 0.5, 1e9)):
        grads = {name: (SCALE * torch.randn(x.shape)).to(half[name]) for name, x in half.items()}
        for name in names:
            exact[name].grad = grads[name].double().cpu() / SCALE
        norm = torch.nn.utils.clip_grad_norm_(list(exact.values()), max_norm)
        for group in reference.param_groups:
            group["lr"] = 0.1 * (step + 1)
        reference.step()
        got = optimizer.step(grads, 0.1 * (step + 1), max_norm, list, SCALE, half)
        assert got == pytest.approx(float(norm), rel=1e-9)
    for name in names:
        expected = {"weight": exact[name], **reference.state[exact[name]]}
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            mine = optimizer.state()[f"{kind}/{name}"].flat.double().cpu()
            # rounding of three steps, relative to numbers of about 1
            assert torch.allclose(mine, expected[kind], rtol=1e-6, atol=1e-6), (kind, name)
        rounded = optimizer.shards[name].flat.to(dtype)
        if dtype == torch.bfloat16 and DEVICE == "cpu" and update is triton_adamw.update:
            # the interpreter truncates, which is at most one step of bf16: 1 / 128
            assert torch.allclose(half[name].float(), rounded.float(), rtol=1 / 128, atol=0)
        else:
            assert half[name].equal(rounded)


def test_nothing_changes_if_the_norm_is_not_finite():
    optimizer = make(common.update)
    before = {key: shard.flat.clone() for key, shard in optimizer.state().items()}
    grads = {name: torch.full_like(s.flat, torch.inf) for name, s in optimizer.shards.items()}
    with pytest.raises(FloatingPointError, match="the gradient norm is inf"):
        optimizer.step(grads, 0.1, 1.0, list)
    assert optimizer.steps == 0
    assert all(shard.flat.equal(before[key]) for key, shard in optimizer.state().items())
