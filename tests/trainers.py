"""Short runs of trainers and of an accelerate loop, on ranks: one function for each kind.

Each takes a function that changes the class, and returns numbers that must not depend on it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
import re
import sys
import tempfile
import types
import unittest.mock
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as hf
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset

from bmt_burst.adapters.transformers import sequence_parallel
from tests import test_transformers
from tests.launcher import GPUS

# accelerate asks for it hundreds of times in a run, and each time Python reads the file again.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)

PAGE = Path(__file__).parents[1] / "docs/trainers.md"
SIZES = test_transformers.SIZES | {"num_hidden_layers": 1, "bos_token_id": 1, "eos_token_id": 2}


def begin(rank: int) -> None:
    """Give this rank the environment that a launcher gives it, which accelerate reads, and let
    accelerate forget its earlier states.
    """
    from accelerate.state import AcceleratorState, GradientState

    size = dist.get_world_size()
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TQDM_DISABLE": 1}
    if size > 1 or GPUS:
        os.environ.update({name: str(value) for name, value in places.items()})
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(0)


def run_cases(
    rank: int, sp_size: int | None, cases: Sequence[tuple[str, dict]], folder: str
) -> list[dict]:
    """Run cases on this rank: functions of this module by name, with their arguments. Without an
    sp_size with plain classes. `folder` is shared by all ranks, and has what `save_for_dpo` saves.
    """
    found = []
    for name, options in cases:
        begin(rank)
        change = plain if sp_size is None else changed(sp_size=sp_size)
        function = globals()[name]
        shared = {"path", "folder"} & inspect.signature(function).parameters.keys()
        found.append(function(change, **dict.fromkeys(shared, folder), **options))
        # Each of gloo's groups has a thread that wakes up a hundred times a second.
        for group in [x for x in dist.distributed_c10d._world.pg_map if x != dist.group.WORLD]:
            dist.destroy_process_group(group)
    return found


def model(kind: str = "LlamaForCausalLM", **changes: Any) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(hf, f"{kind.partition('For')[0]}Config")
    return getattr(hf, kind)(config(**SIZES | changes))


class Rows(Dataset):
    """Rows of 21 to 40 tokens, with labels."""

    def __init__(self, count: int):
        draw = torch.Generator().manual_seed(1)
        self.rows = [
            torch.randint(3, 64, (int(torch.randint(21, 41, (), generator=draw)),), generator=draw)
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index].tolist()}


class Stream(IterableDataset):
    def __init__(self, count: int):
        self.rows = Rows(count)

    def __iter__(self):
        return (self.rows[i] | {"padded": 40} for i in range(len(self.rows)))


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Pad on the right to the longest row."""
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row["input_ids"]) for row in rows], batch_first=True
    )
    if "padded" in rows[0]:
        ids = F.pad(ids, (0, rows[0]["padded"] - ids.shape[1]))
    return {
        "input_ids": ids,
        "attention_mask": ids.ne(0).long(),
        "labels": ids.masked_fill(ids.eq(0), -100),
    }


def arguments(folder: str, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        # so that the rounding of tiny gradients does not move weights
        "adam_epsilon": 1e-2,
        "max_grad_norm": 0.5,
        "report_to": [],
        "use_cpu": not GPUS,
        "save_strategy": "no",
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "all",
        "dataloader_pin_memory": False,
        **changes,
    }


def history(trainer: Any) -> list[dict[str, float]]:
    """Return the logs of a trainer without times."""
    times = ("runtime", "per_second", "preparation", "step_time")
    return [
        {k: v for k, v in row.items() if not any(time in k for time in times)}
        for row in trainer.state.log_history
    ]


def weights(trained: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return whole weights on the CPU by name."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu().clone()
        for name, p in trained.named_parameters()
    }


def run(trainer: Any) -> dict[str, Any]:
    """Train and evaluate. Return logs, the loss of the evaluation and weights."""
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    return {"history": history(trainer), "evaluated": evaluated, "weights": weights(trainer.model)}


Change = Callable[..., type]


def plain(cls: type, **_options: Any) -> type:
    return cls


def changed(**options: Any) -> Change:
    return lambda cls, **more: sequence_parallel(cls, **options, **more)


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Compute a loss of whole logits, with a term that no token has alone."""
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    last = logits[:, 5].logsumexp(-1).sum()
    return (total + last) / (100 if num_items_in_batch is None else num_items_in_batch)


def metrics(found: Any, compute_result: bool = True) -> dict[str, float]:
    """Compute metrics of whole rows, in order."""
    logits, labels = (torch.as_tensor(x) for x in (found.predictions, found.label_ids))
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:]).sum(1).tolist()
    return {"rows": len(logits), **{f"right_{i}": x for i, x in enumerate(right)}}


class OwnLoss(hf.Trainer):
    """A Trainer with a loss of the model's loss and of its logits, also those of padding."""

    def compute_loss(self, model, inputs, return_outputs=False, **_others):
        out = model(**inputs)
        loss = out.loss + 0.1 * out.logits.logsumexp(-1).pow(2).mean()
        return (loss, out) if return_outputs else loss


class OwnSteps(hf.Trainer):
    """A Trainer as TRL may add one, with steps of its own that read the loss and the logits."""

    __module__ = "trl.experimental.own"

    def _compute(self, model, inputs):
        out = model(**self._prepare_inputs(inputs))
        return out.loss + 0.1 * out.logits.logsumexp(-1).pow(2).mean(), out.logits

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss, _ = self._compute(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            return *self._compute(model, inputs), inputs["labels"]


class PassOn(hf.Trainer):
    """A Trainer with a loss that it does not change. Keeps the logits that the model returned."""

    def compute_loss(self, model, inputs, *args, return_outputs=False, **named):
        loss, out = super().compute_loss(model, inputs, *args, return_outputs=True, **named)
        self.logits = out.get("logits")
        return (loss, out) if return_outputs else loss


class Around(torch.nn.Module):
    """A module with a model, and a loss of its logits. Its forward takes no other arguments.

    checking  whether a backward computes the model's forward again
    """

    def __init__(self, inner: hf.PreTrainedModel, checking: bool = False):
        super().__init__()
        self.inner, self.config, self.checking = inner, inner.config, checking

    def forward(self, input_ids, attention_mask=None, labels=None):
        def call(ids):
            out = self.inner(input_ids=ids, attention_mask=attention_mask, labels=labels)
            return out.loss, out.logits

        if self.checking:
            loss, logits = checkpoint(call, input_ids, use_reentrant=False)
        else:
            loss, logits = call(input_ids)
        last = logits.logsumexp(-1).pow(2).mean()
        return {"loss": last if loss is None else loss + 0.1 * last, "logits": logits}


def train_with_trainer(
    change: Change,
    stream: bool = False,
    loss: bool = False,
    of_metrics: bool = False,
    evaluated_first: bool = False,
    subclass: bool = False,
    own_steps: bool = False,
    seq2seq: bool = False,
    around: bool = False,
    trained: hf.PreTrainedModel | None = None,
    **changes: Any,
) -> dict[str, Any]:
    kinds = {OwnLoss: subclass, OwnSteps: own_steps, hf.Seq2SeqTrainer: seq2seq}
    cls = next((kind for kind, chosen in kinds.items() if chosen), hf.Trainer)
    of_arguments = hf.Seq2SeqTrainingArguments if seq2seq else hf.TrainingArguments
    trained = trained or (Around(model(), checking=True) if around else model())
    with tempfile.TemporaryDirectory() as folder:
        trainer = change(cls, **{"untested": True} if own_steps else {})(
            model=trained,
            args=of_arguments(**arguments(folder, **changes), remove_unused_columns=not stream),
            train_dataset=Stream(13) if stream else Rows(13),
            eval_dataset=Stream(7) if stream and of_metrics else Rows(7),
            data_collator=collate,
            compute_loss_func=own_loss if loss else None,
            compute_metrics=metrics if of_metrics else None,
        )
        found: dict[str, Any] = {}
        if evaluated_first:
            found["before"] = trainer.evaluate()["eval_loss"]
        trainer.train()
        found["evaluated"] = trainer.evaluate()["eval_loss"]
        predicted = trainer.predict(Rows(7))
        found["labels"] = torch.from_numpy(predicted.label_ids)
        found["predictions"] = torch.from_numpy(predicted.predictions)
        found["batch"] = trainer.get_total_train_batch_size(trainer.args)
        return found | {"history": history(trainer), "weights": weights(trainer.model)}


def tokenizer() -> Any:
    """Return a tokenizer of the 64 words t0 to t63."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t3"
    )


def text(ids: torch.Tensor) -> str:
    return " ".join(f"t{i}" for i in ids.tolist())


def lora() -> Any:
    from peft import LoraConfig

    torch.manual_seed(5)
    # with weights that are not 0, so that all of them have gradients in the first step
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def resume_with_trainer(change: Change, folder: str, **changes: Any) -> dict[str, Any]:
    """Train two steps of an epoch, then three more in a new trainer, and load the best model."""
    args = arguments(folder, save_strategy="steps", save_steps=2, eval_strategy="steps")
    args |= {"load_best_model_at_end": True, "eval_steps": 2, "max_steps": 4} | changes

    def make() -> Any:
        return change(hf.Trainer)(
            model=model(),
            args=hf.TrainingArguments(**args),
            train_dataset=Rows(13),
            eval_dataset=Rows(7),
            data_collator=collate,
        )

    make().train()
    dist.barrier()
    trainer = make()
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    trainer.save_model(f"{folder}/saved")
    dist.barrier()
    saved = hf.AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
    assert type(saved) is hf.LlamaForCausalLM
    return {"history": history(trainer), "weights": weights(saved)}


def train_with_trl(
    change: Change, cls: type, config: type, train: Any, evaluated: Any, options: dict, **more: Any
) -> dict[str, Any]:
    """Run a trainer of TRL's on two datasets, with options of its `config`."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = change(cls)(
            args=config(**arguments(folder, max_length=64, bf16=False) | options),
            train_dataset=train,
            eval_dataset=evaluated,
            processing_class=tokenizer(),
            **more,
        )
        return run(trainer)


def datasets_of(rows: Callable[[int], list[dict]]) -> list[Any]:
    """Return datasets of 13 rows to train with, and of 7 to evaluate."""
    from datasets import Dataset

    return [Dataset.from_list(rows(count)) for count in (13, 7)]


def train_with_sft(
    change: Change,
    adapter: bool = False,
    loss: bool = False,
    checking: bool = False,
    kind: str = "LlamaForCausalLM",
    stream: bool = False,
    trained: hf.PreTrainedModel | None = None,
    **changes: Any,
) -> dict[str, Any]:
    from trl import SFTConfig, SFTTrainer

    train, evaluated = datasets_of(lambda count: [*Rows(count)])
    return train_with_trl(
        change,
        SFTTrainer,
        SFTConfig,
        train.to_iterable_dataset(num_shards=2) if stream else train,
        evaluated,
        {"gradient_checkpointing": checking, **changes},
        model=trained or model(kind),
        peft_config=lora() if adapter else None,
        compute_loss_func=own_loss if loss else None,
    )


def train_twice(change: Change, path: str) -> dict[str, Any]:
    """Train one model with SFT and then with DPO."""
    trained = model()
    found = {"sft": train_with_sft(change, trained=trained)}
    return found | {"dpo": train_with_dpo(change, path, trained=trained)}


def pairs(count: int) -> list[dict[str, Any]]:
    """Return prompts with two completions, and by how much one is better."""
    rows, others = Rows(count), Rows(2 * count)
    return [
        {
            "prompt": text(rows.rows[i][:9]) + " ",
            "chosen": text(rows.rows[i][9:]),
            "rejected": text(others.rows[count + i]),
            "margin": 0.1 * i,
        }
        for i in range(count)
    ]


def save_for_dpo(path: str) -> None:
    """Save a model and pairs. Ranks share what TRL keeps beside a dataset on the disk."""
    import datasets

    model().save_pretrained(path)
    for count in (13, 7):
        datasets.Dataset.from_list(pairs(count)).save_to_disk(f"{path}/pairs-{count}")


def train_with_dpo(
    change: Change,
    path: str,
    adapter: bool = False,
    before: bool = False,
    fold: bool = False,
    trained: hf.PreTrainedModel | None = None,
    **changes: Any,
) -> dict[str, Any]:
    from datasets import load_from_disk
    from trl import DPOConfig, DPOTrainer

    return train_with_trl(
        functools.partial(change, fold=fold),
        DPOTrainer,
        DPOConfig,
        *(load_from_disk(f"{path}/pairs-{count}") for count in (13, 7)),
        {"precompute_ref_log_probs": before, **changes},
        model=trained or path,
        ref_model=trained and model(),
        peft_config=lora() if adapter else None,
    )


def draw_completions(prompts: list[str], process: int) -> list[list[int]]:
    """Return a completion of 3 to 12 tokens for each prompt, the same in every run."""
    found = []
    for number, prompt in enumerate(prompts):
        draw = torch.Generator().manual_seed(zlib.crc32(f"{prompt} {process} {number}".encode()))
        length = int(torch.randint(3, 13, (), generator=draw))
        found.append(torch.randint(3, 64, (length,), generator=draw).tolist())
    return found


def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Return completions as TRL's rollout_func does. Only the first rank of a group knows them."""
    completions = draw_completions(prompts, trainer.accelerator.process_index)
    if trainer.accelerator.num_processes < dist.get_world_size() and trainer.sp.rank:
        completions = []
    return {
        "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
        "completion_ids": completions,
        "logprobs": None,
        "drawn": [float(sum(x) % 7) for x in completions],
    }


class PretendedServer:
    """A client of a vLLM server that draws completions, and keeps what it was asked for."""

    def __init__(self, **_others: Any):
        self.asked: list[list] = []
        self.pushed = 0

    def init_communicator(self, device: Any) -> None:
        pass

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list, params: Any) -> None:
        assert [name for name, *_ in metadata] == [name for name, _ in params]
        self.pushed += 1

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: list, n: int, **_others: Any) -> dict[str, list]:
        self.asked.append(prompts)
        texts = [str(prompt) for prompt in prompts for _ in range(n)]
        completions = draw_completions(texts, 0)
        logprobs = [[[-4.0 + 0.01 * x] for x in ids] for ids in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


def train_with_server(change: Change, path: str) -> dict[str, Any]:
    """Train with GRPO on completions of a vLLM server, which only pretends to be one."""
    from trl.generation import vllm_generation

    names = {"VLLMClient": PretendedServer, "is_vllm_available": lambda: True}
    with unittest.mock.patch.multiple(vllm_generation, **names):
        found = train_with_reinforcement(change, path, "GRPO", use_vllm=True, vllm_mode="server")
    server = found.pop("server")
    told = [server and (server.asked, server.pushed)]  # TRL's main process has the client
    dist.broadcast_object_list(told, 0)
    return found | {"asked and pushed": told}


def count_odd(completion_ids: list, log_extra: Any, log_metric: Any, **_others: Any) -> list:
    """Reward odd tokens. Every seventh completion has no reward."""
    rewards = [sum(x % 2 for x in ids) / len(ids) for ids in completion_ids]
    log_extra("odd", rewards)
    log_metric("most", max(rewards))
    return [x if sum(ids) % 7 else None for ids, x in zip(completion_ids, rewards, strict=True)]


async def prefer_short(completion_ids: list, **_others: Any) -> list[float]:
    return [-0.1 * len(ids) for ids in completion_ids]


def train_with_reinforcement(
    change: Change, path: str, name: str, fold: bool = False, stream: bool = False, **changes: Any
) -> dict:
    """Train with GRPO or RLOO on completions that do not depend on the model. The prompts of a
    batch have different lengths.
    """
    import datasets
    import trl

    is_grpo = name == "GRPO"
    rows = [{"prompt": text(row[: 5 + i])} for i, row in enumerate(Rows(13).rows)]
    dataset = datasets.Dataset.from_list(rows)
    options = arguments("", num_generations=4, max_completion_length=12, bf16=False, beta=0.1)
    options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2} | changes
    options |= {"per_device_eval_batch_size": 4, "include_num_input_tokens_seen": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = change(getattr(trl, f"{name}Trainer"), fold=fold)(
            model=path,
            reward_funcs=[
                count_odd,
                prefer_short,
                model("LlamaForSequenceClassification", num_labels=1),
            ],
            reward_processing_classes=[None, None, tokenizer()],
            args=getattr(trl, f"{name}Config")(**options | {"output_dir": folder}),
            train_dataset=dataset.to_iterable_dataset() if stream else dataset,
            eval_dataset=datasets.Dataset.from_list(rows[:4]),
            processing_class=tokenizer(),
            **({"rollout_func": roll_out} if is_grpo and not options.get("use_vllm") else {}),
        )
        if not is_grpo:  # which takes no rollout_func
            trainer._generate_single_turn = lambda prompt_ids, *_: draw_completions(
                trainer.processing_class.batch_decode(prompt_ids), trainer.accelerator.process_index
            )
        found = run(trainer)
    names = {f"{x}loss": f"{x}sum of advantages" for x in ("", "train_", "eval_")}
    found["history"] = [
        {names.get(name, name): x for name, x in row.items()} for row in found["history"]
    ]
    found["evaluated sum of advantages"] = found.pop("evaluated")
    logged = {name: [*trainer._logs[name]] for name in ("prompt", "completion", "advantages")}
    if trainer.use_vllm:
        logged["server"] = getattr(trainer.vllm_generation, "vllm_client", None)
    return found | logged | {"extra": {x: [*y] for x, y in trainer._logs["extra"].items()}}


def train_with_rewards(change: Change, **changes: Any) -> dict[str, Any]:
    from trl import RewardConfig, RewardTrainer

    trained = model("LlamaForSequenceClassification", num_labels=1)
    kind = RewardTrainer, RewardConfig
    return train_with_trl(change, *kind, *datasets_of(pairs), changes, model=trained)


def preferences(name: str, count: int) -> list[dict[str, Any]]:
    """Return pairs as TRL's trainer for KTO, ORPO, CPO or TPO has them."""
    if name != "KTO":
        return [row | {"reference": row["chosen"]} for row in pairs(count)]
    return [
        {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
        for row in pairs(count)
        for kind in ("chosen", "rejected")
    ]


def train_on_preferences(
    change: Change, name: str, adapter: bool = False, **changes: Any
) -> dict[str, Any]:
    """Train with TRL's trainer for KTO, ORPO, CPO or TPO."""
    package = importlib.import_module(
        "trl" if name == "KTO" else f"trl.experimental.{name.lower()}"
    )
    kind = [getattr(package, f"{name}{part}") for part in ("Trainer", "Config")]
    more = {"ref_model": None if adapter else model()} if name == "KTO" else {}
    more |= {"model": model(), "peft_config": lora() if adapter else None}
    rows = datasets_of(functools.partial(preferences, name))
    return train_with_trl(change, *kind, *rows, changes, **more)


def compare_as_on_the_page(change: Change, folder: str) -> dict[str, Any]:
    """Run the comparison of docs/trainers.md: one rank a group writes steps, two compare theirs."""
    size = 1 if change is plain else 2
    [code] = re.findall(r"```\n(import json.*?)```", PAGE.read_text(), re.DOTALL)
    kept = f"{os.path.dirname(folder)}/steps-{dist.get_world_size() // size}.json"
    script = types.ModuleType("my_script")
    options = arguments(folder, max_steps=5)
    script.__dict__["Trainer"] = hf.Trainer
    script.__dict__["arguments"] = {
        "model": model(),
        "args": hf.TrainingArguments(**options),
        "train_dataset": Rows(13),
        "data_collator": collate,
    }
    found: dict[str, Any] = {}
    with (
        unittest.mock.patch.dict(sys.modules, my_script=script),
        unittest.mock.patch.object(sys, "argv", ["compare.py", str(size)]),
    ):
        exec(code.replace("steps.json", kept), found)
    assert found["size"] == size and len(found["steps"]) == 5
    return {"steps": found["steps"]}


def train_with_loop(change: Change, **options: Any) -> dict[str, Any]:
    """A loop of accelerate's with accumulation, clipping, a scheduler and metrics."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = change(Accelerator)(cpu=not GPUS, gradient_accumulation_steps=2, **options)
    torch.manual_seed(3)
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, eps=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(Rows(13), batch_size=2, shuffle=True, collate_fn=collate)
    trained, optimizer, loader, scheduler = accelerator.prepare(
        trained, optimizer, loader, scheduler
    )
    losses, norms, counts = [], [], []
    for batch in loader:
        with accelerator.accumulate(trained):
            loss = trained(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(trained.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        counts.append(len(accelerator.gather_for_metrics([*batch["input_ids"]], True)))
    index = torch.tensor([accelerator.process_index], device=accelerator.device)
    return {
        "losses": losses,
        "norms": norms,
        "counts": counts,
        "rate": scheduler.get_last_lr()[0],
        "gathered": accelerator.gather(index).cpu(),
        "weights": weights(accelerator.unwrap_model(trained)),
    }
