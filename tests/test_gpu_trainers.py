"""Trainers over ranks on GPUs: DDP and FSDP2 over two ranks that share sequences equal one GPU, and
two plain ranks equal plain ones. On four GPUs two groups of two ranks equal two plain ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

from accelerate import ParallelismConfig

from tests.launcher import needs_ranks, run_ranks
from tests.test_trainers import FOLDED, compare
from tests.trainers import run_cases, save_for_dpo

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, needs_ranks(2)]

LAYERS = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
SHARDED = {"fsdp": True, "fsdp_config": LAYERS}
BOUND = 1e-3  # of fp32 with kernels that add up in another order
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "trainer": ("train_with_trainer", {"label_smoothing_factor": 0.1, "of_metrics": True}),
    "sft": ("train_with_sft", {"packing": True, "checking": True}),
    "sft, lora": ("train_with_sft", {"adapter": True}),
    "dpo": ("train_with_dpo", {}),
    "dpo, lora, precomputed": ("train_with_dpo", {"adapter": True, "before": True}),
    "rewards": ("train_with_rewards", {}),
    "loop": ("train_with_loop", {}),
}
# one GPU has no shards, so its plain run is the reference
OF_FSDP = {
    "trainer, fsdp": ("train_with_trainer", {"of_metrics": True}),
    "sft, fsdp": ("train_with_sft", {"packing": True, "checking": True}),
    "dpo, fsdp": ("train_with_dpo", {}),
    "grpo, fsdp": ("train_with_reinforcement", {"name": "GRPO", **FOLDED}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[dict[str, dict], list[dict[str, dict]]]:
    """Results of one GPU, and of each of two ranks that share sequences."""
    folders = [str(tmp_path_factory.mktemp(f"ranks-{size}")) for size in (1, 2)]
    for folder in folders:
        save_for_dpo(folder)
    names, plain = [*CASES, *OF_FSDP], [*CASES.values(), *OF_FSDP.values()]
    sharded = [(name, {**options, **SHARDED}) for name, options in OF_FSDP.values()]
    ours = [*CASES.values(), *sharded]
    [expected] = run_ranks(1, run_cases, None, plain, folders[0], backend="nccl")
    ranks = run_ranks(2, run_cases, 2, ours, folders[1], backend="nccl")
    return dict(zip(names, expected, strict=True)), [
        dict(zip(names, x, strict=True)) for x in ranks
    ]


@pytest.mark.parametrize("name", [*CASES, *OF_FSDP])
def test_two_ranks_equal_one_gpu(name, results):
    expected, ranks = results
    for found in ranks:
        compare(found[name], expected[name], bound=BOUND)


def test_two_groups_of_one_rank_are_plain_ranks(tmp_path):
    """Data parallel, with the same bits."""
    cases = [("train_with_trainer", {}), ("train_with_sft", {"packing": True})]
    expected, found = (
        run_ranks(2, run_cases, size, cases, str(tmp_path), backend="nccl") for size in (None, 1)
    )
    for theirs, ours in zip(expected, found, strict=True):
        compare(ours, theirs, bound=0)


# How two groups of two ranks average gradients. Only one case may have a mesh of two dimensions:
# DTensor keeps its groups, which `run_cases` destroys.
BY_FOUR: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP2": SHARDED,
    "hybrid FSDP2": {
        **SHARDED,
        "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    },
}


@needs_ranks(4)
@pytest.mark.parametrize("kind", ["trainer, fsdp", "sft, fsdp"])
def test_two_groups_of_two_ranks_equal_two_plain_ranks(kind, tmp_path):
    name, options = OF_FSDP[kind]
    plain, folder = [(name, options)], str(tmp_path)
    ours = [(name, options | way) for way in BY_FOUR.values()]
    [expected], _ = run_ranks(2, run_cases, None, plain, folder, backend="nccl")
    for rank in run_ranks(4, run_cases, 2, ours, folder, backend="nccl"):
        for way, found in zip(BY_FOUR, rank, strict=True):
            compare(found, expected, way, bound=BOUND)
