"""One of BMTrain's ranks on CPUs, see fake_cuda.py: torchrun tests/bmtrain_rank.py RESULTS WHAT

What it finds goes to RESULTS/RANK.json.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bmt_burst import Chunks, InfLLMV2, Mask, init_sequence_parallel, shift_labels
from bmt_burst import nn as burst_nn
from bmt_burst.nn import rope_tables
from bmt_burst.sparse import Choices
from bmt_burst.sparse.plan import SparsePlan
from models.blocks import Saving
from models.cpm import CPM
from tests import fake_cuda
from tests.sparse import record_choices
from tests.test_model import SMALL
from train.data.batches import MicroBatch

# It has what Qwen2 and Qwen3 have, and positions that go by the length of the 41 tokens that ranks
# share.
SHAPE = dataclasses.replace(
    SMALL,
    qkv_bias=True,
    qk_norm=True,
    rope_scaling={"kind": "dynamic", "factor": 2.0, "original_length": 16},
)
HYBRID = dataclasses.replace(
    SHAPE,
    mixers=("lightning", "attention", "lightning"),
    attention_rotary=False,
    attention_gate=True,
    qkv_bias=False,
)
SHAPES = {  # of the engines
    "tied": SHAPE,
    "untied": dataclasses.replace(SHAPE, tie_embeddings=False),
    "hybrid": HYBRID,
}
STEPS = 2


def curve(engine, sp, chunk: int | None = None) -> list[float]:
    """Losses and gradient norms of steps of two micro-batches, and a loss without gradient.

    chunk  tokens of a chunk of which a sequence is computed at a time
    """
    found = []
    for step in range(STEPS):
        tokens = torch.randint(0, 300, (2, 41), generator=torch.Generator().manual_seed(step))
        labels = shift_labels(tokens)
        labels[:, :30] = -100  # most ranks have few targets
        losses = []
        for row in range(2):
            chunks = Chunks(Mask.causal(41), chunk or 41, SHAPE.num_layers, sp)
            at = chunks.layout
            batch = MicroBatch(
                tokens=at.shard(tokens[row : row + 1], sp.rank),
                positions=at.positions(sp.rank),
                labels=at.shard(labels[row : row + 1], sp.rank),
                work=(),
                masks=None,
                layouts=at,
                documents=0,
                chunks=chunks if chunk else None,
            )
            for loss, _ in filter(None, batch.losses_by_part(engine.model)):
                engine.backward(loss / 20)
                losses.append(float(loss.detach()))
        found += [engine.sum([sum(losses)])[0] / 20, engine.step(1e-2, 0.5)]
    with torch.no_grad():
        loss, _ = batch.losses(engine.model)
    return [*found, *engine.sum([float(loss)])]


def engines(folder: Path) -> dict[str, list[float]]:
    """Return the curves of engines by their names, and check what else the last of them does."""
    from train.engine.bmtrain import BMTrainEngine

    curves, sp = {}, init_sequence_parallel()
    for name, saving, shape, offload in (
        ("selective", Saving("selective"), "tied", False),
        ("none in chunks", Saving(), "untied", True),
        ("tiled full pairs", Saving("full", every=2, tile=5), "hybrid", False),
        ("tiled selective pairs", Saving("selective", every=2, tile=5), "tied", False),
        ("tiled full pairs in chunks", Saving("full", every=2, tile=5), "untied", False),
        ("full", Saving("full"), "tied", False),
    ):
        config = SHAPES[shape]
        build = lambda config=config, saving=saving: CPM(config, sp, saving)  # noqa: E731
        engine = BMTrainEngine(build, dtype=torch.float32, seed=3, offload=offload)
        curves[f"{name} {shape}"] = curve(engine, sp, 15 if "chunks" in name else None)
    check_loading(engine, BMTrainEngine(build, dtype=torch.float32, seed=4), folder / "model.pt")
    engine = BMTrainEngine(build, dtype=torch.bfloat16, seed=3)
    norm = engine.model.norm._parameters["weight"]
    for value in (1.0, 2**-9, 2**-9):  # in bf16 the sum would stay 1
        norm.grad = torch.full_like(norm, value)
        engine._collect_gradients()
    assert set(engine._grads["norm.weight"].tolist()) == {1 + 2**-8}
    return curves


def check_loading(engine, other, file: Path) -> None:
    """Check that another model takes the weights of one, and that a step stops at a NaN."""
    import bmtrain

    bmtrain.save(engine.model, str(file))
    before = {key: shard.flat.clone() for key, shard in engine.state().items()}
    assert "layers.2.self_attn.q_proj.weight" in torch.load(file)
    bmtrain.load(other.model, str(file))
    for name, p in other._parameters.items():
        assert p.data.float().view(-1).equal(before[f"weight/{name}"])
    norm = other.model.norm._parameters["weight"]
    norm.grad = torch.full_like(norm, torch.nan)
    with pytest.raises(FloatingPointError, match="the gradient norm is nan"):
        other.step(1e-2, 1.0)


def check_other_parallelism() -> None:
    import bmtrain

    size, bmtrain.config["tp_size"] = bmtrain.config["tp_size"], 2
    refused = "expected BMTrain without tensor and pipeline parallelism, got tp_size=2"
    with pytest.raises(ValueError, match=refused):
        init_sequence_parallel()
    bmtrain.config["tp_size"] = size


def check_layer(kind: str, **options) -> None:
    """Check a layer in BMTrain's classes against the same in torch's, over all ranks."""
    import bmtrain

    import bmt_burst.bmtrain as burst_bmtrain

    sp = init_sequence_parallel()
    mine = getattr(burst_bmtrain, kind)(16, 4, sp=sp, dtype=torch.float32, **options)
    assert isinstance(mine.q_proj, bmtrain.DistributedModule)
    bmtrain.init_parameters(mine)
    plain = getattr(burst_nn, kind)(16, 4, **options)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            path, _, leaf = name.rpartition(".")
            parameter.copy_(getattr(mine.get_submodule(path), leaf))
            if parameter.dim() == 1:  # biases and sinks start as zeros, norms as ones
                assert parameter.eq(float("norm" in name)).all(), name
    x = torch.randn(1, 21, 16, generator=torch.Generator().manual_seed(0))
    positions = rope_tables(torch.arange(21), 4)
    whole = plain(x, *positions)
    got = mine(sp.shard(x), *rope_tables(sp.positions(21), 4))
    assert (got - sp.shard(whole)).abs().max() < 1e-6
    weight = mine.q_proj._parameters["weight"]
    [piece] = torch.autograd.grad(got.sum(), weight)  # of the sum over ranks
    [grad] = torch.autograd.grad(whole.sum(), plain.q_proj.weight)
    expected = grad.flatten()[weight._start_partition : weight._end_partition]
    assert (piece - expected).abs().max() < 1e-5


def check_block() -> None:
    """Check that sparse layers choose once. A Block runs its two layers again, and they take the
    choices of the first run.
    """
    import bmtrain

    from bmt_burst.bmtrain import BurstAttention

    sparse = InfLLMV2(4, 4, 2, 1, 4, 2, -1)
    sp, asked, choose = init_sequence_parallel(), [], SparsePlan.choose
    chosen = record_choices(pytest.MonkeyPatch())

    class Layer(bmtrain.DistributedModule):
        def __init__(self):
            super().__init__()
            self.attention = BurstAttention(16, 4, sp=sp, dtype=torch.float32, sparse=sparse)

        def forward(self, x, cos, sin, choices):
            with choices.of(self):
                return x + self.attention(x, cos, sin)

    SparsePlan.choose = lambda *args: asked.append(None) or choose(*args)
    layers = bmtrain.TransformerBlockList([bmtrain.Block(Layer()) for _ in range(2)])
    bmtrain.init_parameters(layers)
    x = torch.randn(1, 30, 16, generator=torch.Generator().manual_seed(0))
    part = sp.shard(x).requires_grad_()
    layers(part, *rope_tables(sp.positions(30), 4), Choices()).sum().backward()
    assert (len(asked), len(chosen)) == (4, 2)


def library(folder: Path) -> dict:
    """Check the layer, and return the curves of engines."""
    check_other_parallelism()
    check_layer("BurstAttention", num_kv_heads=2, qkv_bias=True, qk_norm_eps=1e-6, sinks=True)
    check_layer("LightningAttention")
    check_block()
    return engines(folder)


def pretrain(folder: Path, *arguments: str) -> dict:
    """train/pretrain.py, but for how it finds the ranks, which are here already."""
    from train import pretrain

    pretrain.init_distributed = lambda *_: torch.device("cpu")
    return {"code": pretrain.main(arguments)}


def example(folder: Path, name: str) -> dict:
    """Runs an example in fp32, which needs none of BMTrain's CUDA kernels."""
    changes = {
        "torch.bfloat16": "torch.float32",
        "512, 256, 4, 2, 1024, 20": "512, 64, 4, 2, 128, 5",
        "bmt.init_distributed(seed=0)": "",
        '"cuda"': '"cpu"',
    }
    fake_cuda.run_example(folder, f"bmtrain_{name}", changes)
    return {}


if __name__ == "__main__":
    results, what, *arguments = sys.argv[1:]
    dist.init_process_group("gloo")
    fake_cuda.install()
    works = {"library": library, "pretrain": pretrain, "example": example}
    rank, work = dist.get_rank(), works[what]
    found = work(Path(results), *arguments)
    (Path(results) / f"{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():  # pretrain.py leaves it
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)
