"""Blocks that compute their feed-forward in tiles, and groups that are computed again."""

import dataclasses

import pytest
import torch

from bmt_burst import Chunks, Mask, SequenceParallel, shift_labels, simulate
from bmt_burst.fused import torch_passes
from bmt_burst.offload import Offload, Parked
from models.blocks import Saving
from models.tiled import run_tiled
from tests.test_chunks import DENSE, NOPE, build, in_chunks, make_data, on_ranks, two_layers
from tests.test_model import SMALL, initialized
from train.settings.config import TrainConfig

TOKENS = torch.randint(0, 300, (2, 23), generator=torch.Generator().manual_seed(3))
SHORT, SHORT_NOPE = map(two_layers, (DENSE, NOPE))
LIGHTNING = dataclasses.replace(SHORT, mixers=("lightning", "attention"))
BIASED = dataclasses.replace(SMALL, mlp_bias=True, o_bias=True, qk_norm=True)


def gradients(ring, saving, dtype=torch.float32, config=SMALL):
    """Return the loss of a rank, and the gradients."""
    sp = SequenceParallel(ring.rank, ring.size, process_group=ring)
    model = initialized(config, sp=sp, saving=saving).to(dtype)
    loss, _ = model(sp.shard(TOKENS), sp.positions(23), sp.shard(shift_labels(TOKENS)))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(("size", "tile"), [(1, 5), (2, 1), (2, 100)])
def test_a_tile_changes_nothing_but_the_order_of_sums(size, tile):
    """In fp64, in two rows. Matrix multiplications have other numbers of rows: losses differ."""
    plain = simulate(size, lambda ring: gradients(ring, Saving(), torch.float64, BIASED))
    for checkpointing in ("none", "selective", "full"):
        saving = Saving(checkpointing, tile=tile)
        mine = simulate(size, lambda ring, s=saving: gradients(ring, s, torch.float64, BIASED))
        for (loss, grads), (expected_loss, expected) in zip(mine, plain, strict=True):
            assert torch.allclose(loss, expected_loss, rtol=1e-14, atol=0)
            for name, grad in grads.items():
                assert (grad - expected[name]).norm() <= 1e-13 * expected[name].norm(), name


def test_gradients_of_weights_are_summed_in_fp32():
    """A sum of 512 equal gradients in bf16 would stop growing at 256."""
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(512, 1, dtype=torch.bfloat16)
    run_tiled(lambda rows: rows * weight, [weight], 1, x).sum().backward()
    assert weight.grad.item() == 512


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
    """Each tile is computed once more, and a group's blocks but for the last, which none needs."""
    calls = []
    gate = torch_passes.gate
    monkeypatch.setattr(torch_passes, "gate", lambda *x: calls.append(x) or gate(*x))
    simulate(1, lambda ring: gradients(ring, Saving(checkpointing, every=every, tile=12)))
    assert len(calls) == 4 * (SMALL.num_layers * forwards - (every is not None))


def test_options_reach_the_model_and_those_that_do_not_fit_are_refused():
    config = TrainConfig(mlp_tile=512, checkpointing="full", checkpointing_every=4)
    assert config.saving() == Saving("full", every=4, tile=512)
    full = {"checkpointing": "full"}
    for options, error in (
        ({"mlp_tile": 0}, "--mlp-tile must be at least 1, got 0"),
        ({"checkpointing_every": 2}, "--checkpointing-every needs --checkpointing selective or"),
        (full | {"checkpointing_every": 1}, "must be at least 2, got 1"),
        (full | {"checkpointing_every": 2, "checkpointing_blocks": 1}, "excludes --checkpointing-"),
    ):
        with pytest.raises(ValueError, match=error):
            TrainConfig(**options)


class CopyingOffload(Offload):
    """Copies all tensors that are saved inside its blocks, and counts their bytes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def _leaves(self, x):
        return True

    def _move(self, x):
        self.bytes += x.nbytes
        return _Copied(x)


class _Copied(Parked):
    def __init__(self, x):
        self.copy = x.clone()

    def fetch(self):
        pass

    def take(self):
        return self.copy


@pytest.mark.parametrize(
    "config", [SHORT, LIGHTNING, SHORT_NOPE], ids=["dense", "lightning", "use_nope"]
)
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_offloading_in_chunks_moves_no_kept_keys(config, checkpointing):
    """It moves as many bytes of four chunks as of one: with "full" the inputs of blocks."""
    mask = Mask.documents((0, 61, 68, 176))

    def work(sp, tokens, offloads=None):
        model = build(config, sp)
        saving = Saving(checkpointing, offloads and offloads[sp.rank])
        model.saving = dataclasses.replace(saving, keep_results=config.keeps_results)
        for block in model.layers:
            block.saving = model.saving
        loss = in_chunks(Chunks(mask, tokens, config.num_layers, sp), model, make_data(mask))
        return loss, [p.grad for p in model.parameters()]

    moved = []
    for tokens in (44, 176):
        offloads = CopyingOffload(), CopyingOffload()
        pairs = [on_ranks(2, lambda sp, at=tokens, o=o: work(sp, at, o)) for o in (None, offloads)]
        for plain, found in zip(*pairs, strict=True):
            assert plain[0] == found[0]
            assert all(x.equal(y) for x, y in zip(plain[1], found[1], strict=True))
        moved.append([offload.bytes for offload in offloads])
    if checkpointing == "full":
        assert moved == [[config.num_layers * 2 * 88 * config.hidden_size * 8] * 2] * 2
    if config is SHORT:
        assert moved[0] == moved[1]


def test_offloading_moves_the_inputs_of_groups_alone():
    """It does not move what the blocks of a group save while they are computed again."""
    offload = CopyingOffload()
    saving = Saving("selective", offload, every=2, tile=5)
    plain, expected = simulate(1, lambda ring: gradients(ring, Saving(tile=5)))[0]
    loss, grads = simulate(1, lambda ring: gradients(ring, saving))[0]
    assert loss.equal(plain)
    assert all(grad.equal(expected[name]) for name, grad in grads.items())
    groups, input_bytes = -(-SMALL.num_layers // 2), TOKENS.numel() * SMALL.hidden_size * 4
    assert groups * input_bytes <= offload.bytes < (groups + 0.1) * input_bytes
