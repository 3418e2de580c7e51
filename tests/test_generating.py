"""Trainers of TRL that generate: completions, rewards and errors in groups of ranks.

test_trainers.py compares whole runs.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

pytest.importorskip("trl")  # a machine with GPUs may lack it

import datasets
import trl
from torch.distributed.fsdp import FSDPModule, fully_shard

from bmt_burst import init_sequence_parallel
from bmt_burst.adapters.transformers import enable, plain
from bmt_burst.errors import RanksDisagree
from tests.launcher import run_ranks
from tests.trainers import (
    Change,
    Rows,
    arguments,
    begin,
    changed,
    count_odd,
    model,
    text,
    tokenizer,
)
from tests.trainers import plain as unchanged

PROMPTS = [Rows(5).rows[i][: 4 + 3 * i].tolist() for i in range(5)]


def make(change: Change, folder: str, rewards: Any = count_odd, **changes: Any) -> Any:
    """Return a GRPOTrainer that has not begun."""
    own = {name: changes.pop(name) for name in ("tools", "rollout_func") if name in changes}
    options = arguments(folder, num_generations=4, max_completion_length=9, bf16=False)
    options |= {"per_device_train_batch_size": 4, "include_num_input_tokens_seen": False}
    rows = [{"prompt": text(row[:5])} for row in Rows(13).rows]
    return change(trl.GRPOTrainer)(
        model=model(),
        reward_funcs=rewards,
        args=trl.GRPOConfig(**options | changes),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        **own,
    )


def generate(rank: int, sp_size: int | None) -> tuple[list, list]:
    """Return sampled and most likely completions of this rank's group.

    Sampled ones are those of all rows on each rank, with the seed of its group.
    """
    begin(rank)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(unchanged if sp_size is None else changed(sp_size=sp_size), folder)
    trainer.accelerator.prepare(trainer.model)
    with plain(trainer.model):
        sampled, _ = trl.GRPOTrainer._generate_single_turn(trainer, PROMPTS, None, {}, 4)
    trainer.generation_config.do_sample = False
    likely = [trainer._generate_single_turn(PROMPTS[:n], None, {}, 4)[0] for n in (5, 1)]
    return sampled, likely


@pytest.mark.parametrize("groups", [1, 2])
def test_completions_are_those_of_a_process_for_each_group(groups):
    expected = run_ranks(groups, generate, None)
    found = run_ranks(2 * groups, generate, 2)
    for rank, (sampled, likely) in enumerate(found):
        assert sampled == expected[rank // 2][0]
        assert likely == expected[rank // 2][1]
    lengths = {len(ids) for ids in expected[0][0]}
    assert len(lengths) > 1 and max(lengths) == 9  # some end early


def sample(rank: int) -> None:
    """Sample one prompt on both ranks of a group, and then of a model that FSDP2 shards."""
    begin(rank)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(changed(sp_size=2), folder)
    trainer.accelerator.prepare(trainer.model)
    completions, _ = trainer._generate_single_turn(PROMPTS[:1] * 4, None, {}, 4)
    assert len({tuple(ids) for ids in completions}) == 4  # the ranks draw different numbers
    signs = 1 - 2 * rank
    assert not trainer.sp.sum(signs * torch.rand(8)).any()  # and then the same again

    sp = init_sequence_parallel(2)
    whole = model(attn_implementation="eager")
    sharded = enable(model(attn_implementation="eager"), sp)
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    assert isinstance(sharded, FSDPModule)
    ids = torch.tensor([PROMPTS[2 * rank]])  # of different lengths, and with different ends
    ends = {"max_new_tokens": 3 + 5 * rank, "do_sample": False, "eos_token_id": None}
    with plain(sharded):
        assert sharded.config._attn_implementation == "eager"
        found = sharded.generate(ids, **ends)
        loss = sharded(ids, labels=ids).loss
    assert found.equal(whole.generate(ids, **ends))
    torch.testing.assert_close(loss, whole(ids, labels=ids).loss)
    with pytest.raises(ValueError, match=r"does not generate, .*: call it in `with plain"):
        sharded.generate(ids)
    ids = torch.tensor([PROMPTS[3]])
    torch.testing.assert_close(sharded(ids, labels=ids).loss, whole(ids, labels=ids).loss)
    with plain(whole):
        assert whole.generate(ids, **ends).shape == (1, ids.shape[1] + 3 + 5 * rank)


def test_shares_draw_other_numbers_and_plain_models_generate():
    run_ranks(2, sample)


def reward_on(rank: int) -> None:
    """Check that one rank computes rewards, and that no rank goes on alone after an error."""
    calls = []

    def reward(completion_ids: list, **_others: Any) -> list[float]:
        calls.append(len(completion_ids))
        if len(calls) == 2:
            raise ArithmeticError("no reward")
        return [1.0 * len(ids) for ids in completion_ids]

    begin(rank)
    error = RanksDisagree if rank else ArithmeticError
    with tempfile.TemporaryDirectory() as folder, pytest.raises(error, match="no reward"):
        make(changed(sp_size=2), folder, reward).train()
    assert calls == ([] if rank else [4, 4])


def refuse_on(rank: int) -> None:
    """Check what is refused when a trainer is made."""
    for changes, message in (
        ({"per_device_train_batch_size": 2}, "with all 4 completions of each prompt, got 2 rows: "),
        (
            {"per_device_eval_batch_size": 6, "eval_strategy": "steps"},
            "got 6 rows: a group of 2 ranks counts as one process, and has per_device_eval_batch",
        ),
        ({"use_vllm": True, "vllm_mode": "colocate"}, "expected vllm_mode='server', got "),
        (
            {"use_transformers_continuous_batching": True},
            "expected use_transformers_continuous_batching=False, got True",
        ),
    ):
        begin(rank)
        with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError, match=message):
            make(changed(sp_size=2), folder, **changes)
    begin(rank)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(changed(sp_size=2), folder)
    for name, value, message in (
        ("tools", [abs], "tools would be called on every rank of a group: leave it out, and call"),
        ("environment_factories", {None: object}, "environment_factory would be called on every"),
        ("_is_vlm", True, "expected a tokenizer, got a processor: images cannot be cut over ranks"),
    ):
        before = getattr(trainer, name)
        setattr(trainer, name, value)
        with pytest.raises(ValueError, match=message):
            trainer.create_accelerator_and_postprocess()
        setattr(trainer, name, before)


def reward_and_refuse(rank: int) -> None:
    reward_on(rank)
    refuse_on(rank)


def test_rewards_run_once_and_what_does_not_work_is_refused():
    run_ranks(2, reward_and_refuse)
