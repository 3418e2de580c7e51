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
from trl.trainer.utils import add_fused_lm_head

from bmt_burst import Mask, fold_prefixes, init_sequence_parallel
from bmt_burst.adapters.transformers import enable, plain
from bmt_burst.adapters.transformers.documents import find_masks
from bmt_burst.adapters.transformers.folded import FoldedRows
from bmt_burst.errors import RanksDisagree
from bmt_burst.sequence.layout import IGNORE_INDEX
from tests.launcher import run_in_turn, run_ranks
from tests.test_trainers import CASES, compare
from tests.trainers import (
    Change,
    Rows,
    arguments,
    begin,
    changed,
    count_odd,
    lora,
    model,
    run_cases,
    save_for_dpo,
    text,
    tokenizer,
)
from tests.trainers import plain as unchanged

PROMPTS = [Rows(5).rows[i][: 4 + 3 * i].tolist() for i in range(5)]


def make(change: Change, folder: str, rewards: Any = count_odd, **changes: Any) -> Any:
    """Return a GRPOTrainer with LoRA that has not begun."""
    options = arguments(folder, num_generations=4, max_completion_length=15, bf16=False)
    options |= {"per_device_train_batch_size": 4, "include_num_input_tokens_seen": False}
    rows = [{"prompt": text(row[:5])} for row in Rows(13).rows]
    return change(trl.GRPOTrainer)(
        model=model(num_hidden_layers=2),  # with one, all completions have the same length
        reward_funcs=rewards,
        args=trl.GRPOConfig(**options | changes),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=lora(),
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


def test_completions_are_those_of_a_process_for_each_group():
    expected = run_ranks(2, generate, None)
    found = run_ranks(4, generate, 2)
    for rank, (sampled, likely) in enumerate(found):
        assert sampled == expected[rank // 2][0]
        assert likely == expected[rank // 2][1]
    lengths = {len(ids) for ids in expected[0][0]}
    assert len(lengths) > 1 and max(lengths) == 15  # some end early


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
        with plain(sharded):
            pass
        assert sharded.config._attn_implementation == "eager"
        found = sharded.generate(ids, **ends)
        loss = sharded(ids, labels=ids).loss
        masks = Mask.causal(ids.shape[1]), torch.ones(ids.shape[1], ids.shape[1])
        for wrong in (*({"mask": mask} for mask in masks), {"label_smoothing": 0.1}):
            with pytest.raises(ValueError, match=r"within plain a .*, which has no"):
                sharded(ids, labels=ids, **wrong)
    assert found.equal(whole.generate(ids, **ends))
    torch.testing.assert_close(loss, whole(ids, labels=ids).loss)
    trainer.model = trainer.model_wrapped = sharded
    trainer.accelerator._hook_calls(sharded)  # as `prepare` does, where there are GPUs
    trainer.generation_config.do_sample = False
    completions, _ = trainer._generate_single_turn(PROMPTS[:3], None, {}, 3)
    for prompt, completion in zip(PROMPTS, completions, strict=False):
        expected = whole.generate(torch.tensor([prompt]), max_new_tokens=15, do_sample=False)
        assert completion == expected[0, len(prompt) :].tolist()
    with pytest.raises(ValueError, match=r"does not generate, .*: call it in `with plain"):
        sharded.generate(ids)
    ids = torch.tensor([PROMPTS[3]])
    torch.testing.assert_close(sharded(ids, labels=ids).loss, whole(ids, labels=ids).loss)
    with plain(whole):
        assert whole.generate(ids, **ends).shape == (1, ids.shape[1] + 3 + 5 * rank)


def test_shares_draw_other_numbers_and_plain_models_generate():
    run_ranks(2, sample)


def test_rows_that_share_tokens_are_folded():
    """Rows with padding on both sides, and two documents in one row."""
    tokens = torch.tensor([[0, 5, 6, 7, 8], [5, 6, 9, 0, 0], [5, 6, 7, 4, 4]])
    numbers = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 2, 2]])
    targets = torch.full((3, 5), IGNORE_INDEX)
    targets[0, 2:4], targets[1, 1], targets[2, 3] = torch.tensor([7, 8]), 9, 4
    masks = find_masks({"attention_mask": numbers}, 3, 5, False)
    rows = FoldedRows(tokens, targets, masks)
    # 5, 6 7, 8 | 6 9 | 4 4: the last shared token stands in each branch, and row 3 is the first's
    assert rows.tokens.tolist() == [[5, 6, 7, 8, 6, 9, 4, 4]]
    assert rows.targets.tolist() == [[-100, 7, 8, -100, 9, -100, 4, -100]]
    values = torch.arange(1.0, 9).reshape(1, 8, 1).requires_grad_()
    whole = rows.unfold(values)
    expected = torch.zeros(3, 5, 1)
    expected[0, 2:4, 0], expected[1, 1], expected[2, 3] = torch.tensor([2.0, 3.0]), 5, 7
    assert whole.equal(expected)
    whole.sum().backward()
    assert values.grad.flatten().tolist() == [0, 1, 1, 0, 1, 0, 1, 0]
    positions = torch.tensor([[0, 0, 1, 2, 3], [0, 1, 2, 0, 0], [3, 4, 5, 0, 1]])
    assert FoldedRows(tokens, targets, masks, positions).targets.equal(rows.targets)
    positions[0, 4] += 1
    with pytest.raises(ValueError, match="fold counts positions in each document: expected posit"):
        FoldedRows(tokens, targets, masks, positions)
    for row, place, message in (
        (2, 1, "fold: rows that share tokens have different labels"),  # the first row has 7
        (0, 0, "fold: row 0 has a label behind padding, which no token predicts: expected -100"),
    ):
        wrong = targets.index_put((torch.tensor(row), torch.tensor(place)), torch.tensor(8))
        with pytest.raises(ValueError, match=message):
            FoldedRows(tokens, wrong, masks)


def fold_on(rank: int) -> None:
    """Compare folded rows with separate ones, and with a mask of the caller's."""
    sp = init_sequence_parallel(2)
    for kind, changes in (("LlamaForCausalLM", {}), ("MistralForCausalLM", {"sliding_window": 7})):
        models = [model(kind, **changes) for _ in range(2)]
        for x in models:
            add_fused_lm_head(x, outputs=("log_probs", "entropy"))
        separate, enabled = models[0], enable(models[1], sp)
        rows = [PROMPTS[3], PROMPTS[3] + [9, 8, 7, 6], PROMPTS[3] + [9, 8, 3], PROMPTS[1]]
        ids = torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, rows)], True)
        given = {"input_ids": ids, "attention_mask": ids.ne(0).long(), "fused_lm_head": True}
        given["labels"] = ids.masked_fill(ids.eq(0), IGNORE_INDEX)
        given["labels"][:, :3] = IGNORE_INDEX
        weights = torch.rand(
            len(rows), ids.shape[1] - 1, generator=torch.Generator().manual_seed(1)
        )
        found = []
        for folds, x in ((False, separate), (True, enabled)):
            x._folds = folds
            out = x(**given)
            (out.log_probs * weights + out.entropy * weights.flip(0)).sum().backward()
            grad = x.model.embed_tokens.weight.grad
            grad = grad if x is separate else sp.sum(grad) / sp.size
            results = out.log_probs, out.entropy, out.label_mask, out.loss, grad
            found.append([each.detach() for each in results])
        compare(found[1], found[0])
        padding = torch.zeros_like(ids)
        out = enabled(**given | {"attention_mask": padding, "labels": padding + IGNORE_INDEX})
        assert not out.log_probs.any() and not out.label_mask.any()
        folded = fold_prefixes(rows)
        by_hand = enabled(
            folded.tokens, mask=folded.mask, shift_labels=folded.targets, fused_lm_head=True
        )
        logprobs = folded.unfold(by_hand.log_probs)
        for row, expected in zip(logprobs, found[0][0], strict=True):
            torch.testing.assert_close(row[2:-1], expected[2 : len(row) - 1], rtol=0, atol=1e-4)
        by_model = enabled(folded.tokens, mask=folded.mask, shift_labels=folded.targets)
        torch.testing.assert_close(by_model.loss, by_hand.loss)
        logits = enabled(folded.tokens, mask=folded.mask, whole_outputs=True).logits
        own = enabled(torch.tensor([rows[1]]), whole_outputs=True).logits[0]
        torch.testing.assert_close(folded.unfold(logits)[1], own, rtol=0, atol=1e-4)
    mask, tokens = folded.mask, folded.tokens
    for wrong, message in (
        ({"mask": "tree"}, "mask must be a Mask of bmt_burst or None, got str"),
        ({"mask": Mask.causal(4)}, f"mask must be of {mask.seq_len} tokens as the rows, got 4"),
        ({"mask": mask, "attention_mask": tokens.ne(-1)}, "expected mask or attention_mask"),
        ({"mask": mask, "labels": tokens}, "expected shift_labels, such as the targets of"),
        ({"mask": mask if rank else Mask.causal(mask.seq_len)}, "ranks differ in mask: rank 0 has"),
    ):
        with pytest.raises((TypeError, ValueError, RanksDisagree), match=message):
            enabled(tokens, **wrong)
    embedded = {"inputs_embeds": torch.zeros(1, 4, 32), "labels": torch.ones(1, 4).long()}
    with pytest.raises(ValueError, match="fold compares the tokens of rows: expected input_ids"):
        enabled(**embedded, fused_lm_head=True)


def test_folded_rows_equal_separate_rows():
    run_ranks(2, fold_on)


def test_one_rank_folds(tmp_path):
    """It computes what the plain class does."""
    folder, cases = str(tmp_path), [CASES["grpo, folded"], CASES["dpo, folded"]]
    save_for_dpo(folder)
    compare(*(run_ranks(1, run_cases, size, cases, folder) for size in (1, None)))
    with pytest.raises(ValueError, match="fold=True is for TRL's GRPOTrainer, RLOOT"):
        changed(fold=True)(trl.SFTTrainer)


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


def test_rewards_run_once_and_what_does_not_work_is_refused():
    run_in_turn(2, reward_on, refuse_on)
