"""Blocks that compute their feed-forward on some tokens at a time, and groups of blocks that are
computed again together.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from bmt_burst import SequenceParallel, shift_labels, simulate
from bmt_burst import offload as offload_module
from bmt_burst.base import norm
from bmt_burst.offload import Offload
from models import cpm
from models.blocks import Saving
from models.tiled import run_tiled
from tests.test_model import SMALL, initialized
from train.run.config import TrainConfig

TOKENS = torch.randint(0, 300, (2, 23), generator=torch.Generator().manual_seed(3))
BIASED = dataclasses.replace(SMALL, mlp_bias=True, o_bias=True, qk_norm=True)


def gradients(ring, saving, dtype=torch.float32, config=SMALL):
    """The loss of a rank, and the gradients."""
    sp = SequenceParallel(ring.rank, ring.size, process_group=ring)
    model = initialized(config, sp=sp, saving=saving).to(dtype)
    loss, _ = model(sp.shard(TOKENS), sp.positions(23), sp.shard(shift_labels(TOKENS)))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("tile", [1, 5, 100])
def test_a_tile_changes_nothing_but_the_order_of_sums(size, tile):
    """In fp64, at 46 or 23 tokens a rank, in two rows. Losses differ by matrix multiplications of
    other numbers of rows.
    """
    plain = simulate(size, lambda ring: gradients(ring, Saving(), torch.float64, BIASED))
    for checkpointing in ("none", "selective", "full"):
        saving = Saving(checkpointing, tile=tile)
        mine = simulate(size, lambda ring, s=saving: gradients(ring, s, torch.float64, BIASED))
        for (loss, grads), (expected_loss, expected) in zip(mine, plain, strict=True):
            assert torch.allclose(loss, expected_loss, rtol=1e-14, atol=0)
            for name, grad in grads.items():
                assert (grad - expected[name]).norm() <= 1e-13 * expected[name].norm(), name


def test_checkpointing_changes_no_bit_of_tiles():
    plain = simulate(2, lambda ring: gradients(ring, Saving(tile=5)))
    for saving in (
        Saving("selective", tile=5),
        Saving("full", tile=5),
        Saving("full", blocks=1, tile=5),
        Saving("selective", every=2, tile=5),
        Saving("full", every=2, tile=5),
    ):
        mine = simulate(2, lambda ring, s=saving: gradients(ring, s))
        for (loss, grads), (same, expected) in zip(mine, plain, strict=True):
            assert loss.equal(same)
            assert all(grad.equal(expected[name]) for name, grad in grads.items()), saving


def test_gradients_of_weights_are_summed_in_fp32():
    """A sum of 512 equal gradients in bf16 would stop to grow at 256 of them."""
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(512, 1, dtype=torch.bfloat16)
    run_tiled(lambda rows: rows * weight, [weight], 1, x).sum().backward()
    assert weight.grad.item() == 512


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_of_a_tile_is_that_of_the_dtype(dtype):
    """Errors against fp64 are at most a quarter larger than those without tiles."""

    def part(x, w, v):
        return torch.add(x, torch.nn.functional.silu(x @ w) @ v, alpha=0.5)

    generator = torch.Generator().manual_seed(0)
    shapes = (300, 24), (24, 40), (40, 24), (300, 24)
    x, w, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    exact = [t.double().requires_grad_() for t in (x, w, v)]
    part(*exact).backward(dout.double())
    errors = {}
    for tile in (7, 300):
        leaves = [t.clone().requires_grad_() for t in (x, w, v)]
        _, w_, v_ = leaves
        out = run_tiled(lambda rows, w=w_, v=v_: part(rows, w, v), [w_, v_], tile, leaves[0])
        out.backward(dout)
        errors[tile] = [
            float((mine.grad.double() - e.grad).norm() / e.grad.norm())
            for mine, e in zip(leaves, exact, strict=True)
        ]
    for tiled, whole in zip(errors[7], errors[300], strict=True):
        assert tiled <= 1.25 * whole


def test_parameters_and_inputs_without_gradient_get_none():
    weight, bias = torch.ones(3, 3, requires_grad=True), torch.ones(3)
    x, y = torch.ones(5, 3), torch.ones(5, 3, requires_grad=True)
    run_tiled(lambda a, b: a @ weight + b + bias, [weight, bias], 2, x, y).sum().backward()
    assert x.grad is None
    assert bias.grad is None
    assert y.grad.equal(torch.ones(5, 3))
    assert weight.grad.equal(torch.full((3, 3), 5.0))


def test_a_tiled_part_is_differentiable_once():
    x = torch.ones(5, 3, requires_grad=True)
    out = run_tiled(lambda rows: rows.square(), [], 2, x)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("checkpointing", "every", "forwards"),
    [("none", None, 2), ("selective", None, 2), ("full", None, 2), ("full", 3, 3)],
)
def test_what_is_computed_again(checkpointing, every, forwards, monkeypatch):
    """The backward computes each tile once more, and a group's blocks once more but for the last,
    whose result nobody needs.
    """
    calls = []
    forward = cpm.SwiGLU.forward
    monkeypatch.setattr(cpm.SwiGLU, "forward", lambda *x: calls.append(x) or forward(*x))
    simulate(1, lambda ring: gradients(ring, Saving(checkpointing, every=every, tile=12)))
    assert len(calls) == 4 * (SMALL.num_layers * forwards - (every is not None))


def most_saved(saving, tokens):
    """Bytes that the graph keeps after a forward, but for weights."""
    model = initialized(SMALL, saving=saving)
    weights = {p.data_ptr() for p in model.parameters()}
    saved = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in weights:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    ids = torch.zeros(1, tokens, dtype=torch.int64)
    with saved_tensors_hooks(pack, lambda x: x):
        loss, _ = model(ids, torch.arange(tokens), ids)
    return sum(saved.values()), loss


def test_every_keeps_the_input_of_groups():
    (each, _), (some, _) = (
        most_saved(Saving("full", every=every), 512) for every in (None, SMALL.num_layers)
    )
    bytes_of_an_input = 512 * SMALL.hidden_size * 4
    assert each - some >= (SMALL.num_layers - 1) * bytes_of_an_input


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mlp_tile": 0}, "--mlp-tile must be at least 1, got 0"),
        ({"checkpointing_every": 2}, "--checkpointing-every needs --checkpointing selective or"),
        ({"checkpointing_every": 1, "checkpointing": "full"}, "must be at least 2, got 1"),
        (
            {"checkpointing_every": 2, "checkpointing_blocks": 1, "checkpointing": "full"},
            "--checkpointing-every excludes --checkpointing-blocks",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        TrainConfig(**options)


def test_options_reach_the_model():
    config = TrainConfig(mlp_tile=512, checkpointing="full", checkpointing_every=4)
    assert config.saving() == Saving("full", every=4, tile=512)


class CountingOffload(Offload):
    """Counts the bytes of tensors that are saved inside its blocks."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def _park(self, block, x):
        self.bytes += 0 if x.data_ptr() in block.kept else x.nbytes
        return super()._park(block, x)


def test_offloading_moves_the_inputs_of_groups_alone():
    """And not what the blocks of a group save while they are computed again."""
    offload = CountingOffload()
    saving = Saving("selective", offload, every=2, tile=5)
    plain, expected = simulate(1, lambda ring: gradients(ring, Saving(tile=5)))[0]
    loss, grads = simulate(1, lambda ring: gradients(ring, saving))[0]
    assert loss.equal(plain)
    assert all(grad.equal(expected[name]) for name, grad in grads.items())
    groups, input_bytes = -(-SMALL.num_layers // 2), TOKENS.numel() * SMALL.hidden_size * 4
    assert groups * input_bytes <= offload.bytes < (groups + 0.1) * input_bytes


def test_tensors_wait_in_host_memory_in_pieces(monkeypatch):
    monkeypatch.setattr(offload_module, "PIECE_BYTES", 64)
    x = torch.randn(5, 7, dtype=torch.float64)
    for case, pieces in ((x, 5), (x[:, :4], 1), (x.T, 1), (x[:, :1].expand(5, 3), 1)):
        copy = offload_module._HostCopy(case)
        again = copy.allocate()
        copy.copy_to(again)
        assert again.equal(case)
        assert len(copy._pieces) == pieces


@pytest.mark.parametrize("shape", [(2, 23, 8), (1, 46, 2, 4), (4, 8)])
def test_norms_of_large_tensors_are_computed_in_parts(shape, monkeypatch):
    """torch counts entries in 32 bits."""
    layer, x = norm.RMSNorm(shape[-1], 1e-6).double(), torch.randn(shape, dtype=torch.float64)
    expected = (
        layer(x),
        *torch.autograd.grad(layer(x.requires_grad_()).cos().sum(), [x, layer.weight]),
    )
    sizes = []
    kernel = F.rms_norm
    monkeypatch.setattr(F, "rms_norm", lambda x, *args: sizes.append(x.numel()) or kernel(x, *args))
    monkeypatch.setattr(norm, "_MOST_ENTRIES", 32)
    found = layer(x), *torch.autograd.grad(layer(x).cos().sum(), [x, layer.weight])
    assert max(sizes) < 32
    for mine, other in zip(found, expected, strict=True):
        assert torch.allclose(mine, other, rtol=1e-12, atol=1e-12)
