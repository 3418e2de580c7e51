"""Trainers, TRL's trainers and accelerate loops: groups of ranks count as one process."""

from __future__ import annotations

import functools
import math
import pathlib
import re
import tempfile
import warnings
from typing import Any

import pytest
import torch
import transformers as hf

pytest.importorskip("trl")  # a machine with GPUs may lack it

import trl
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from peft import AdaptionPromptConfig, PrefixTuningConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from bmt_burst import init_sequence_parallel
from bmt_burst.adapters.transformers import enable, requests, sequence_parallel
from bmt_burst.adapters.transformers import plain as as_plain
from bmt_burst.errors import RanksDisagree
from tests.launcher import GPUS, run_in_turn, run_ranks
from tests.trainers import (
    PAGE,
    PassOn,
    Rows,
    Stream,
    arguments,
    begin,
    changed,
    collate,
    history,
    lora,
    model,
    run_cases,
    save_for_dpo,
    train_with_sft,
    train_with_trainer,
)

BOUND = 2e-5  # rounding of fp32 through some steps; losses, norms and rates are far from 0


def compare(found: Any, expected: Any, at: str = "", bound: float = BOUND) -> None:
    """Compare numbers: counts exactly, others within the bound of the largest."""
    assert type(found) is type(expected), at
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        # The signs of differences that are 0 but for rounding: DPO starts at its reference.
        tied = {"rewards/accuracies"} if abs(expected.get("rewards/margins", 1)) < 1e-4 else set()
        for name in expected.keys() - tied:
            compare(found[name], expected[name], f"{at}/{name}", bound)
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for i, (x, y) in enumerate(zip(found, expected, strict=True)):
            compare(x, y, f"{at}/{i}", bound)
    elif isinstance(expected, torch.Tensor) and expected.is_floating_point():
        assert found.shape == expected.shape, at
        error = (found - expected).abs().max() / expected.abs().max()
        assert error <= bound, (at, error)
    elif isinstance(expected, float):
        # These are small differences of terms of this size.
        around = 10 if any(name in at for name in ("reward", "logits", "margin")) else 0
        # sums of advantages, and log-ratios of either sign
        around = 1 if any(name in at for name in ("advantages", "kl")) else around
        same = math.isclose(found, expected, rel_tol=bound, abs_tol=bound * around)
        assert same, (at, found, expected)
    else:
        same = found.equal(expected) if isinstance(expected, torch.Tensor) else found == expected
        assert same, (at, found, expected)


FOLDED = {"fold": True, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "trainer": ("train_with_trainer", {}),
    "accumulation": ("train_with_trainer", {"gradient_accumulation_steps": 2}),
    "tokens of one group": ("train_with_trainer", {"average_tokens_across_devices": False}),
    "label smoothing": ("train_with_trainer", {"label_smoothing_factor": 0.1, "of_metrics": True}),
    "own loss": ("train_with_trainer", {"loss": True, "of_metrics": True}),
    "seq2seq, metrics of batches": (
        "train_with_trainer",
        {"seq2seq": True, "of_metrics": True, "batch_eval_metrics": True},
    ),
    "stream": ("train_with_trainer", {"stream": True, "of_metrics": True}),
    "loss of a subclass": ("train_with_trainer", {"subclass": True, "label_smoothing_factor": 0.1}),
    "steps of an untested trainer": ("train_with_trainer", {"own_steps": True}),
    "module around a model": ("train_with_trainer", {"around": True}),
    "module around a model, label smoothing": (
        "train_with_trainer",
        {"around": True, "label_smoothing_factor": 0.1},
    ),
    "resumed": ("resume_with_trainer", {}),
    "sft, packed": ("train_with_sft", {"packing": True, "checking": True}),
    "sft, padded to a multiple": (
        "train_with_sft",
        {"packing": True, "pad_to_multiple_of": 16, "adapter": True},
    ),
    "sft, dft": ("train_with_sft", {"loss_type": "dft", "gradient_accumulation_steps": 2}),
    "sft, label smoothing": (
        "train_with_sft",
        {"label_smoothing_factor": 0.1, "per_device_train_batch_size": 3},
    ),
    "sft, stream": ("train_with_sft", {"stream": True}),
    "sft, own loss": ("train_with_sft", {"loss": True}),
    "dpo": ("train_with_dpo", {}),
    "dpo, lora": ("train_with_dpo", {"adapter": True, "loss_type": "ipo"}),
    "dpo, lora, precomputed": ("train_with_dpo", {"adapter": True, "before": True}),
    "rewards": ("train_with_rewards", {"center_rewards_coefficient": 0.1}),
    "kto": ("train_on_preferences", {"name": "KTO", "adapter": True, "desirable_weight": 1.3}),
    "orpo": ("train_on_preferences", {"name": "ORPO"}),
    "cpo": ("train_on_preferences", {"name": "CPO"}),
    "tpo": ("train_on_preferences", {"name": "TPO"}),
    "grpo, stream": (
        "train_with_reinforcement",
        {"name": "GRPO", "loss_type": "grpo", "beta": 0.0, "stream": True},
    ),
    "grpo, dr_grpo, two steps a generation": (
        "train_with_reinforcement",
        {"name": "GRPO", "loss_type": "dr_grpo", "steps_per_generation": 4, "max_steps": 3},
    ),
    # Micro-batches of whole batches, since other rows are together than in the plain class
    "grpo, folded": ("train_with_reinforcement", {"name": "GRPO", **FOLDED}),
    "rloo, folded": ("train_with_reinforcement", {"name": "RLOO", **FOLDED}),
    "dpo, folded": ("train_with_dpo", {"fold": True}),
    "grpo, completions of a server": ("train_with_server", {}),
    "rloo": ("train_with_reinforcement", {"name": "RLOO"}),
    "sft, then dpo": ("train_twice", {}),
    "comparison of the page": ("compare_as_on_the_page", {}),
    "loop": ("train_with_loop", {}),
    "loop, split batches": ("train_with_loop", {"split_batches": True}),
}
# Only transformers, accelerate and TRL ask if there is one process: each of their loops is here.
OF_ONE_GROUP: dict[str, tuple[str, dict[str, Any]]] = {
    # transformers alone trains several processes without DDP then
    "evaluated first": ("train_with_trainer", {"evaluated_first": True, "of_metrics": True}),
    **{
        name: CASES[name]
        for name in (
            *("trainer", "stream", "resumed", "sft, packed", "dpo", "rewards", "kto"),
            *("grpo, folded", "grpo, completions of a server", "rloo"),
            *("comparison of the page", "loop", "loop, split batches"),
        )
    },
}
BY_GROUPS = {1: OF_ONE_GROUP, 2: CASES}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, list[dict[str, dict]]]:
    """By the number of groups: results of a plain process, and of each rank of two to a group."""
    found = {}
    for groups, cases in BY_GROUPS.items():
        runs = []
        for size, sp_size in ((groups, None), (2 * groups, 2)):
            folder = tmp_path_factory.mktemp(f"ranks-{size}")
            save_for_dpo(str(folder))
            runs.append(run_ranks(size, run_cases, sp_size, list(cases.values()), str(folder)))
        [expected, *_], ranks = runs
        found[groups] = [dict(zip(cases, x, strict=True)) for x in (expected, *ranks)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "name"), [(groups, name) for groups, cases in BY_GROUPS.items() for name in cases]
)
def test_two_ranks_count_as_one_process(groups, name, results):
    expected, *ranks = results[groups]
    for found in ranks:
        compare(found[name], expected[name])


def trainers_of_trl() -> dict[str, type]:
    """Return stand-ins for all of TRL's trainers, by module and name: only their names, modules and
    bases are read, and importing all of them takes long.
    """
    folder = pathlib.Path(trl.__file__).parent
    found, lines = {}, {}
    for file in sorted((*folder.glob("trainer/*.py"), *folder.glob("experimental/**/*.py"))):
        module = ".".join(file.relative_to(folder.parent).with_suffix("").parts)
        module = module.removesuffix(".__init__")
        for name, base in re.findall(r"(?m)^class ([A-Z]\w+Trainer)\(_?(\w+)\)", file.read_text()):
            lines[f"{module}.{name}"] = module, name, base
    ours = {"Trainer": hf.Trainer, "BaseTrainer": hf.Trainer}
    for place, (module, name, base) in sorted(lines.items(), reverse=True):  # trl.trainer first
        found[place] = type(name, (ours.get(base, hf.Trainer),), {"__module__": module})
        ours.setdefault(name, found[place])
    return found


def test_trainers_of_trl_are_tested_or_generate_or_need_untested():
    """Also those of a new release: a trainer that is not known needs untested=True."""
    accepted, generating, others = set(), set(), set()
    for place, cls in trainers_of_trl().items():
        try:
            sequence_parallel(cls, sp_size=2)
            accepted.add(cls.__name__)
        except ValueError as error:
            if "generates while it trains, and gathers completions from ranks" in str(error):
                generating.add(cls.__name__)
                with pytest.raises(ValueError, match="generates while it trains"):
                    sequence_parallel(cls, untested=True)
            else:
                assert f"{cls.__name__} of {cls.__module__} was not tested over ranks" in str(error)
                assert "untested=True accepts it: first compare its losses" in str(error)
                with pytest.warns(UserWarning, match="was not tested over ranks: compare its loss"):
                    sequence_parallel(cls, untested=True)
                others.add(place)
    names = ("SFT", "DPO", "GRPO", "RLOO", "Reward", "KTO", "ORPO", "CPO", "TPO")
    assert accepted == {f"{name}Trainer" for name in names}
    assert {"OnlineDPOTrainer", "A2POTrainer", "GKDTrainer", "GMPOTrainer"} <= generating
    assert others == {"trl.experimental.bema_for_ref_model.dpo_trainer.DPOTrainer"}


def test_classes_that_cannot_be_are_refused():
    for wrong, message in (
        (dict, "expected transformers' Trainer, .*, got dict"),
        (hf.TrainingArguments, "or a subclass, got TrainingArguments"),
        (3, "expected a class, such as Trainer, got a int"),
    ):
        with pytest.raises(TypeError, match=message):
            sequence_parallel(wrong)
    once = sequence_parallel(hf.Trainer)
    with pytest.raises(ValueError, match="this Trainer is already sequence parallel"):
        sequence_parallel(once)
    with pytest.raises(ValueError, match="expected sp_size or mesh, got both"):
        sequence_parallel(hf.Trainer, sp_size=2, mesh=object())
    for name in ("balanced", "loss_only"):
        with pytest.raises(TypeError, match=f"{name} must be True or False"):
            sequence_parallel(hf.Trainer, **{name: "yes"})
    of_yours = type("GRPOTrainer", (hf.Trainer,), {})  # not TRL's
    assert not hasattr(sequence_parallel(of_yours), "_generate_single_turn")
    assert issubclass(once, hf.Trainer) and once.__name__ == "Trainer"
    assert issubclass(sequence_parallel(hf.Seq2SeqTrainer), hf.Seq2SeqTrainer)


def refuse_arguments_on(rank: int) -> None:
    """Check what is refused at the start of an object, or before the first step."""
    for changes, message in (
        ({"neftune_noise_alpha": 5.0}, "expected neftune_noise_alpha=None"),
        ({"use_liger_kernel": True}, "expected use_liger_kernel=False"),
        ({"train_sampling_strategy": "batch_rebalance"}, "'batch_rebalance' gives each rank other"),
        ({"accelerator_config": {"dispatch_batches": True}}, "expected dispatch_batches=False or"),
    ):
        begin(rank)
        with pytest.raises(ValueError, match=message):
            train_with_trainer(changed(sp_size=2), **changes)
    if not GPUS:
        begin(rank)
        with pytest.raises(ValueError, match="accelerate sees one process, but there are several"):
            changed(sp_size=2)(Accelerator)()
    begin(rank)
    with pytest.raises(
        RanksDisagree, match=r"differ in max_steps of .*: rank 0 has '2', rank 1 has '3'"
    ):
        train_with_trainer(changed(sp_size=2), max_steps=2 + rank)  # one would wait for the other
    begin(rank)
    with pytest.raises(ValueError, match=r"expected neftune_noise_alpha=None|rank 1 of "):
        train_with_trainer(changed(sp_size=2), neftune_noise_alpha=5.0 if rank else None)
    for options, message in (
        ({"sp_size": 3}, "sp_size=3 does not divide the world of 2 ranks"),
        ({"layout": "diagonal"}, "unknown layout 'diagonal'"),
    ):
        begin(rank)
        with pytest.raises(ValueError, match=message):
            changed(**options)(Accelerator)(cpu=True)
    begin(rank)
    accelerator = changed(sp_size=2)(Accelerator)(cpu=True)
    for name in ("tp_size", "cp_size"):
        # accelerate makes one on GPUs only
        accelerator.state.parallelism_config = ParallelismConfig(**{name: 2})
        with pytest.raises(ValueError, match=f"expected {name}=1 in the ParallelismConfig, got 2"):
            accelerator._make_groups()
    accelerator.state.parallelism_config = None
    own = accelerator.state.distributed_type
    for kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        accelerator.state.distributed_type = kind  # packages that are not installed here
        with pytest.raises(ValueError, match=f"expected DDP or FSDP2, got {kind.value}, which is"):
            accelerator._make_groups()
    accelerator.state.distributed_type = own
    generating = hf.Seq2SeqTrainingArguments(
        use_cpu=not GPUS, report_to=[], predict_with_generate=True
    )
    with pytest.raises(ValueError, match="expected predict_with_generate=False, got True: over ra"):
        changed(sp_size=2)(hf.Seq2SeqTrainer)(model=model(), args=generating)
    two = hf.TrainingArguments(use_cpu=not GPUS, report_to=[])
    two._n_gpu = 2
    with pytest.raises(ValueError, match="expected a process for each GPU, got one with 2 GPUs"):
        changed(sp_size=2)(hf.Trainer)(model=model(), args=two)
    assert accelerator.num_processes == 1 and accelerator.sp.size == 2
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    adaption = AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1)
    by_hand = enable(model(), init_sequence_parallel())
    other = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9))
    for wrong, error, message in (
        (get_peft_model(model(), prefix), ValueError, "is PREFIX_TUNING, which puts tokens before"),
        (
            get_peft_model(model(), adaption),
            TypeError,
            "an? AdaptedAttention, has .*: use LoRA inst",
        ),
        (by_hand, ValueError, "is already enabled, for other groups: pass a model that is not"),
        (other, TypeError, "got a GPT2LMHeadModel: untested=True compares a small copy"),
    ):
        with pytest.raises(error, match=message):
            accelerator.prepare(wrong)
    begin(rank)
    with pytest.raises(ValueError, match="router_aux_loss_coef=0, which SFTConfig and DPOConfig"):
        train_with_sft(changed(sp_size=2), kind="Qwen3MoeForCausalLM", router_aux_loss_coef=0.1)
    refuse_steps_with_own_gradients(rank)
    # the ranks still understand each other
    assert float(accelerator.sp.sum(torch.ones(()))) == 2


def refuse_steps_with_own_gradients(rank: int) -> None:
    """Check that no rank takes a step with gradients that were not averaged over ranks."""
    begin(rank)
    accelerator = changed(sp_size=2)(Accelerator)(cpu=not GPUS, gradient_accumulation_steps=2)
    own, plain_other = model(), model()
    trained, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), 0.1))
    other, of_other = accelerator.prepare(
        plain_other, torch.optim.SGD(plain_other.parameters(), 0.1)
    )
    with LocalSGD(accelerator, trained, 2, enabled=False) as local:
        local.step()
    batch = {name: x.to(accelerator.device) for name, x in collate([*Rows(2)]).items()}
    before = own.lm_head.weight.detach().clone()
    refused = "an optimizer takes a step after a call within no_sync, and with sequence parallel"
    of_ddp = torch.nn.parallel.DistributedDataParallel.no_sync
    local_sgd = functools.partial(LocalSGD, accelerator, local_sgd_steps=2)
    for no_sync in (accelerator.no_sync, of_ddp, local_sgd):
        with no_sync(trained):
            trained(**batch).loss.backward()
            with pytest.raises(ValueError, match=refused):
                optimizer.step()
            loss = trained(**batch).loss
        accelerator.backward(loss)  # DDP does not average it, since the forward was within no_sync
        accelerator.backward(other(**batch).loss)
        with pytest.raises(ValueError, match=refused):
            optimizer.step()
        of_other.step()
    assert own.lm_head.weight.equal(before)
    with accelerator.no_sync(trained):
        losses = [trained(**batch).loss for _ in range(2)]
        accelerator.backward(losses[0])
        with accelerator.trigger_sync_in_backward(trained):
            accelerator.backward(losses[1])  # averages what was accumulated
    with torch.no_grad(), accelerator.no_sync(trained):
        trained(**batch)
    optimizer.step()
    before = own.lm_head.weight.detach().clone()
    assert accelerator.sp.sum(before).equal(2 * before)
    for _ in range(2):
        with accelerator.accumulate(trained):
            accelerator.backward(trained(**batch).loss)
            optimizer.step()
    after = own.lm_head.weight.detach()
    assert not after.equal(before)
    assert accelerator.sp.sum(after).equal(2 * after)


def test_arguments_that_do_not_work_over_ranks_are_refused_on_all_ranks():
    run_ranks(2, refuse_arguments_on)
    with pytest.raises(ValueError, match="sp_size=2 needs as many processes or more, got one"):
        changed(sp_size=2)(Accelerator)(cpu=True)


def test_the_file_for_accelerate_launch_means_fsdp2(tmp_path, monkeypatch):
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "fsdp2.yaml").write_text(text)
    line = ["--config_file", str(tmp_path / "fsdp2.yaml"), "script.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(line))
    for name, value in prepare_multi_gpu_env(args).items():
        if name.startswith("FSDP_"):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert args.use_fsdp and args.num_processes == 8
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True


def read_with_a_mesh(rank: int) -> tuple[list, list, int]:
    """Return the batches of shuffled rows and of a stream, under an imagined mesh of HSDP."""
    begin(rank)
    accelerator = changed(sp_size=2)(Accelerator)(cpu=True)
    accelerator.state.device_mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    found = []
    for rows in (Rows(7), Stream(7)):
        shuffle = {} if isinstance(rows, Stream) else {"shuffle": True}
        loader = DataLoader(rows, batch_size=2, collate_fn=collate, **shuffle)
        loader, rest = accelerator.prepare(loader), []
        for batch in loader:
            gathered = accelerator.gather_for_metrics([*batch["input_ids"].tolist()], True)
            rest.append((batch["input_ids"].tolist(), gathered))
        found.append(rest)
    total = accelerator.reduce(torch.tensor(1.0))
    return found, accelerator.gather(torch.tensor([accelerator.process_index])).tolist(), total


def test_loaders_and_counts_under_a_mesh_of_all_ranks():
    ranks = run_ranks(4, read_with_a_mesh)
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3]
    (of_first, indices, total), (of_second, *_) = ranks[0], ranks[2]
    assert indices == [0, 1] and float(total) == 2
    for first, second in zip(of_first, of_second, strict=True):
        assert len(first) == len(second) == 2
        gathered = [row for _, rows in first for row in rows]
        trimmed = sorted([x for x in row if x] for row in gathered)
        assert trimmed == sorted(Rows(7)[i]["input_ids"] for i in range(7))  # each once
        assert [x for x, _ in first] != [x for x, _ in second]


def test_one_rank_a_group_is_the_plain_class(tmp_path):
    """It computes the same bits."""
    cases = [("train_with_trainer", {}), ("train_with_sft", {"packing": True})]
    plain, found = (run_ranks(1, run_cases, size, cases, str(tmp_path)) for size in (None, 1))
    compare(found, plain, bound=0)


def use_again(rank: int) -> None:
    """Train a model with two trainers, and let one rank ask all to stop."""
    begin(rank)
    accelerator = changed(sp_size=2)(Accelerator)(cpu=not GPUS)
    if rank == 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()
    assert accelerator.reduce(torch.tensor(3), "mean") == 3
    assert accelerator.is_last_process == (rank == 1)
    trained = model()
    first = train_with_trainer(changed(sp_size=2), trained=trained)
    assert trained._sp is not accelerator.sp
    again = train_with_trainer(changed(sp_size=2, strategy="ulysses"), trained=trained)
    assert again["history"][0]["loss"] < first["history"][0]["loss"]
    wrapped = torch.nn.ModuleDict({"lm": trained, "value": torch.nn.Linear(64, 1)})
    accelerator.prepare(wrapped)
    assert trained._sp is accelerator.sp


class Sampling(hf.TrainerCallback):
    """Generate on each rank, as docs/trainers.md shows."""

    found: torch.Tensor | None = None

    def on_step_end(self, args, state, control, model, **_) -> None:
        with as_plain(model):
            self.found = model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)


class CallingAlone(hf.TrainerCallback):
    """Call the model on one rank, as callbacks that print a sample do."""

    def on_step_end(self, args, state, control, model, **_) -> None:
        if state.is_world_process_zero:
            model(Rows(1).rows[0][None])


def call_beside(rank: int) -> None:
    """Train with a loss that passes on the model's, and let one rank call alone."""
    requests._warned.clear()
    begin(rank)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*GiB on each rank")  # LoRA reads no logits
        adapted = get_peft_model(model(), lora())
        train_with_trainer(changed(sp_size=2), trained=adapted, max_steps=1, of_metrics=True)
    logged = []
    sampling = Sampling()
    for options in ({}, {}, {"loss_only": True}):
        begin(rank)
        with (
            tempfile.TemporaryDirectory() as folder,
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            trainer = changed(sp_size=2, **options)(PassOn)(
                model=model(),
                args=hf.TrainingArguments(**arguments(folder, max_steps=2)),
                train_dataset=Rows(4),  # batches of two lengths
                data_collator=collate,
                callbacks=[sampling],
            )
            trainer.train()
        by_hand = model()
        by_hand.load_state_dict(trainer.accelerator.get_state_dict(trainer.model_wrapped))
        by_hand = by_hand.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)
        assert by_hand.equal(sampling.found)
        costs = [x for x in warned if "GiB on each rank in fp32" in str(x.message)]
        assert len(costs) == (rank == 0 and not logged)
        assert (trainer.logits is None) == bool(options)
        logged.append(history(trainer))
    compare(logged, [logged[0]] * 3)
    predicted = trainer.predict(Rows(2)).predictions
    assert predicted.shape[0] == 2 and predicted.shape[2] == 64  # whole all the same
    wrapped, sp = trainer.model_wrapped, trainer.sp
    assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    with pytest.raises(RanksDisagree, match="rank 1 begins a call of the prepared LlamaForCausal"):
        # DDP alone would wait for the buffers of rank 0
        wrapped(Rows(1).rows[0][None]) if rank else sp.sum(torch.ones(()))
    assert trainer.args.logging_steps == 1  # torch's gather of the logs would wait, too
    trainer.add_callback(CallingAlone())
    with pytest.raises(RanksDisagree, match="rank 1 begins the end of a step"):
        trainer.train()
    assert float(sp.sum(torch.ones(()))) == 2


def test_a_model_may_have_several_trainers_and_losses_that_pass_on():
    run_in_turn(2, use_again, call_beside)
