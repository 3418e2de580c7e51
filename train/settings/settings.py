"""The settings of a run: five components, whose fields have all facts about them (facts.py).

`TrainConfig` (config.py) joins the components.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bmt_burst import strategies
from bmt_burst.extensions import read_extension
from bmt_burst.offload import Offload
from models.blocks import CHECKPOINTING, Saving
from models.huggingface import CONFIG
from models.rope import RopeScaling
from models.tensor_files import is_file
from train.base.wording import flag
from train.data.shares import parse_shares, validation_folders
from train.data.skips import parse_range
from train.evaluation.tasks import parse_tasks
from train.settings.facts import (
    ALL_STAGES,
    HOST,
    NOWHERE,
    ONE_STAGE,
    PATH,
    REPLACES,
    TECHNICAL,
    Facts,
    check_project,
    check_time_limit,
    option,
)
from train.settings.kinds import DEFAULT_MODEL, PRESETS

SCHEDULES = ("wsd", "cosine", "linear")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NO_PATHS = (None, "auto", "never", *PRESETS)  # values of settings that are paths otherwise
_parse_eval_tasks = partial(parse_tasks, option="--eval-tasks")


@dataclass(frozen=True)
class ModelSettings:
    """The model and the weights that it starts from."""

    model: str | None = option(
        None,
        f"a preset ({', '.join(PRESETS)}), or a JSON file with the fields of CPMConfig or of "
        "CPM-Live's configurations; by default the model of the checkpoint to resume from, or "
        f"{DEFAULT_MODEL}",
        ALL_STAGES | PATH | TECHNICAL,
    )
    init_from: str | None = option(
        None,
        "starting weights: a folder with a config.json, which then replaces --model; or a file for "
        "--model (.pt, .bin, .pth or .safetensors); docs/weights.md lists them",
        ALL_STAGES | PATH | TECHNICAL,
    )
    accept_field: str | None = option(
        None,
        "unknown fields of the model's config.json that change nothing it computes, with commas "
        "between them; an export has them again",
        ALL_STAGES | TECHNICAL,
    )
    untie: bool = option(
        False,
        "train a head of its own, which starts as that of --init-from or as the embeddings",
        ALL_STAGES | TECHNICAL,
        instances="its head is its embeddings",
    )
    grow_vocabulary: bool = option(
        False,
        "with --init-from: add rows for the data's new tokens, after those of the weights",
        ALL_STAGES | TECHNICAL,
    )
    allow_other_tokenizer: bool = option(
        False,
        "with --init-from: start even if the tokenizer of the weights differs from the data's",
        ALL_STAGES | TECHNICAL,
    )
    rope_theta: float | None = option(
        None,
        "base of the rotary positions; a larger one suits longer sequences",
        REPLACES,
        instances="it has no rotary positions",
        positive=True,
    )
    rope_scaling: Mapping[str, Any] | None = option(
        None,
        "scaling of the rotary positions, instead of the model's: "
        """'{"kind": "yarn", "factor": 4, "original_length": 32768}'; """
        "models/rope.py lists kinds and numbers",
        REPLACES,
        instances="it has no rotary positions",
        check=RopeScaling.from_dict,
    )
    sparse: Mapping[str, Any] | None = option(
        None,
        "sparse attention in all layers with softmax attention: '{}' for InfLLM-V2 as MiniCPM4 "
        """has it, or with other constants of bmt_burst.InfLLMV2, '{"dense_len": 4096}'""",
        REPLACES,
        instances="its attention has a bias",
        check=read_extension,
    )
    window: int | None = option(
        None,
        "tokens that a token sees, itself included, in layers with a window, else in all",
        REPLACES,
        is_length=True,
        least=1,
        instances="its layers have no windows",
    )
    dtype: str = option(
        "fp32",
        "weights and activations in forward and backward; master weights and AdamW are always fp32",
        choices=tuple(DTYPES),
    )
    fp8: bool = option(
        False,
        "multiply in float8 in the blocks' large linear layers; needs --dtype bf16, the torch "
        "engine, GPUs such as H100, and the package torchao",
        instances="its blocks are not converted",
    )

    @property
    def model_file(self) -> Path | None:
        """The JSON file of the model, or None if a preset or a checkpoint has it."""
        if self.init_from and not is_file(self.init_from):
            return Path(self.init_from, CONFIG)
        return None if self.model is None or self.model in PRESETS else Path(self.model)

    @property
    def accepted_names(self) -> tuple[str, ...]:
        names = (self.accept_field or "").split(",")
        return tuple(name.strip() for name in names if name.strip())

    @property
    def given_model(self) -> str | None:
        """The option that names the model, with its value, or None if none does."""
        if self.init_from and not is_file(self.init_from):
            return f"--init-from {self.init_from}"
        return f"--model {self.model}" if self.model is not None else None


@dataclass(frozen=True)
class DataSettings:
    """The data, and how it is cut into sequences."""

    data: str | Mapping[str, str] = option(
        "data/stdlib/train",
        "folder of training tokens, from prepare_data.py; or several, each as NAME=PATH:WEIGHT",
        PATH,
        check=lambda data: isinstance(data, str) or parse_shares(data),
    )
    val_data: str | Mapping[str, str] | None = option(
        None,
        "folder of validation tokens; or several, each as NAME=PATH, with a loss for each name",
        PATH,
        check=validation_folders,
    )
    documents: str = option(
        "auto",
        "mask: tokens attend to their own document only; ignore: a sequence is one text; auto: "
        "mask, but a resumed run keeps its choice",
        choices=("auto", "mask", "ignore"),
        instances="its instances say which tokens see each other",
    )
    bos: str = option(
        "auto",
        "the token in front of each document, or none; auto: the tokenizer's begin token, else its "
        "end-of-text token, and none with --documents ignore; a resumed run keeps its choice; "
        "generate.py and evaluate.py: as in training, or as the folder of --init-from says",
        instances="its instances say themselves how they begin",
    )
    seq_len: int = option(
        512,
        "tokens in one sequence, as in 32768 or 32K, over all ranks that share it",
        is_length=True,
        least=1,
    )
    batch_size: int = option(8, "sequences in one optimizer step, over all ranks", least=1)
    micro_batch_size: int | None = option(
        None,
        "sequences that a rank computes at once; by default the largest divisor up to 8",
        least=1,
    )


@dataclass(frozen=True)
class ParallelSettings:
    """The ranks, how they share a sequence, and what they keep for the backward."""

    processes: int = option(
        1,
        "processes to start on this machine; leave at 1 under torchrun",
        ALL_STAGES | HOST | TECHNICAL,
        least=1,
    )
    restarts: int = option(
        0,
        "times that a failed run starts again from its last checkpoint, except after exit code 2",
        ALL_STAGES | HOST | TECHNICAL,
        least=0,
    )
    sp_size: int = option(1, "ranks that share a sequence; the others are data parallel", least=1)
    strategy: str = option(
        "auto",
        "how the ranks of a sequence share attention, see docs/strategies.md; auto: usp if "
        "--ulysses-size is given, otherwise one-call for short calls, else ring",
        choices=("auto", *strategies.names()),
    )
    inner_size: int | None = option(None, "ranks of a host, for the double ring", least=1)
    ulysses_size: int | None = option(
        None, "consecutive ranks that share heads, for usp; by default those of a host", least=1
    )
    layout: str = option(
        "auto",
        "how a sequence is cut over its ranks; auto: equal work for documents and windows",
        choices=("auto", "zigzag", "striped", "contiguous"),
    )
    engine: str = option(
        "auto",
        "what shards the model: bmtrain on GPUs, torch (FSDP2) anywhere; auto: bmtrain if possible",
        HOST,
        choices=("auto", "torch", "bmtrain"),
    )
    device: str = option(
        "auto",
        "where to train; auto: on GPUs if there is one for each process of this machine",
        HOST,
        choices=("auto", "cpu", "cuda"),
    )
    flash: str = option(
        "auto",
        "the attention kernel, see bmt_burst.burst_attn_func; lightning layers take triton and "
        "reference, and auto for other names",
        HOST,
    )
    deterministic: bool = option(
        False, "use kernels that give identical bits in every run (CPU kernels always do)"
    )
    checkpointing: str = option(
        "none",
        "what the backward recomputes; selective: all except the attention; full: all",
        TECHNICAL,
        choices=CHECKPOINTING,
    )
    checkpointing_blocks: int | None = option(
        None,
        "apply --checkpointing to this many blocks, the first ones. By default to all; on GPUs, "
        "selective applies to as many as memory needs",
        TECHNICAL,
        least=0,
    )
    checkpointing_every: int | None = option(
        None,
        "keep only the input of every so many blocks, which the backward computes again",
        TECHNICAL,
        least=2,
    )
    mlp_tile: int | None = option(
        None,
        "tokens that the part of a block after its attention computes at once; by default all",
        is_length=True,
        least=1,
    )
    chunk: int | None = option(
        None,
        "train in chunks of this many tokens, over all ranks of a sequence: memory grows by keys, "
        "values and sums of their gradients only, and the forward of all chunks but the last runs "
        "twice; by default a sequence is one chunk",
        TECHNICAL,
        is_length=True,
        least=1,
        instances="its attention has a bias",
    )
    offload: bool = option(
        False,
        "keep saved activations in host memory; needs --checkpointing, and has no effect on CPUs",
        TECHNICAL,
    )
    offload_optimizer: bool = option(
        False,
        "keep master weights and AdamW's state in host memory; engine bmtrain only",
        TECHNICAL,
    )

    @property
    def attention(self) -> dict[str, Any]:
        """The options of burst_attn_func for every attention of the model."""
        has_groups = self.strategy == "auto" and self.ulysses_size is not None
        strategy = "usp" if has_groups else self.strategy
        return {"flash": self.flash, "deterministic": self.deterministic, "strategy": strategy}

    def saving(self) -> Saving:
        return Saving(
            self.checkpointing,
            Offload() if self.offload else None,
            blocks=self.checkpointing_blocks,
            every=self.checkpointing_every,
            tile=self.mlp_tile,
        )


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer's steps and their learning rates."""

    steps: int = option(1000, "optimizer steps of the whole run", least=1)
    stop_after: int | None = option(
        None,
        "save and stop after this step; the schedule is that of --steps",
        ONE_STAGE | TECHNICAL,
        least=1,
    )
    lr: float = option(1e-3, "peak learning rate", positive=True)
    schedule: str = option("wsd", "learning rate after warm-up", choices=SCHEDULES)
    warmup_steps: int | None = option(
        None, "steps of linear warm-up; by default 5% of steps", least=0
    )
    decay_steps: int | None = option(
        None, "last steps, in which wsd decays; by default 20%", least=0
    )
    min_lr_ratio: float = option(0.05, "learning rate at the end, as a share of the peak")
    weight_decay: float = option(0.1, "decoupled weight decay of matrices", least=0)
    beta1: float = option(0.9, "AdamW's beta 1", least=0, below=1)
    beta2: float = option(0.95, "AdamW's beta 2", least=0, below=1)
    clip: float = option(1.0, "largest global gradient norm", positive=True, infinite=True)
    max_skips: int = option(
        10,
        "end the run after so many steps in a row whose loss or gradient norm was not finite",
        TECHNICAL,
        least=1,
    )

    @property
    def last_step(self) -> int:
        """The step after which the command ends: the last one, or --stop-after."""
        return self.steps if self.stop_after is None else self.stop_after

    @property
    def warmup(self) -> int:
        return self.steps // 20 if self.warmup_steps is None else self.warmup_steps

    @property
    def decay(self) -> int:
        return self.steps // 5 if self.decay_steps is None else self.decay_steps


@dataclass(frozen=True)
class RunSettings:
    """The output of a run: its checkpoints, evaluations and log."""

    output: str = option(
        "runs/cpm", "folder for checkpoints, logs and curves", ALL_STAGES | PATH | TECHNICAL
    )
    resume: str = option(
        "never",
        "auto: resume from the newest whole checkpoint in --output, or start if there is none; "
        "never: refuse an --output that has checkpoints; or the folder of a checkpoint",
        PATH | TECHNICAL,
        no_stages="stages always resume where they stopped; to repeat steps, remove checkpoints",
    )
    new_stage: bool = option(
        False,
        "with --resume CHECKPOINT: start another stage from its weights and optimizer, with other "
        "data or length, for example. --resume auto continues a stage",
        TECHNICAL,
        no_stages="each table of the file is a stage",
    )
    seed: int = option(0, "seed of starting weights and data order", least=0)
    skip_data: str | None = option(
        None,
        "FROM:TO, with --resume: leave out sequences FROM to TO - 1 of the data order, from 0",
        ONE_STAGE,
        check=parse_range,
    )
    save: bool = option(
        True,
        "write checkpoints; otherwise a run leaves only its curves",
        TECHNICAL,
        no_stages="a stage begins at a checkpoint of the one before",
    )
    save_every: int = option(
        200,
        "steps between checkpoints; the last step is always saved; 0: only the last",
        TECHNICAL,
        least=0,
    )
    save_in_background: bool = option(
        True, "write checkpoints while training continues, from a copy in host memory", TECHNICAL
    )
    keep_last: int = option(2, "checkpoints to keep", TECHNICAL, least=1)
    log_every: int = option(
        10,
        "steps between the lines of a log, where a terminal shows a bar with every step",
        HOST | TECHNICAL,
        least=1,
    )
    eval_every: int = option(
        100, "steps between evaluations on --val-data; 0: only after the last", TECHNICAL, least=0
    )
    eval_sequences: int = option(
        32, "sequences of each source in one evaluation", TECHNICAL, least=1
    )
    eval_tasks: str | None = option(
        None,
        "tasks of evaluate.py in each evaluation, at --seq-len, for example needle,positions",
        TECHNICAL,
        instances="the tasks are texts to continue",
        check=_parse_eval_tasks,
    )
    wandb: str | None = option(
        None,
        "project of Weights & Biases that also gets the records",
        HOST | TECHNICAL,
        check=check_project,
    )
    profile: str | None = option(
        None, "steps to profile, FIRST:LAST; traces go to --output", HOST | TECHNICAL
    )
    timeout: float = option(
        1800.0,
        "seconds without a sign of life after which a rank prints its stacks and ends",
        TECHNICAL,
        positive=True,
    )
    time_limit: str | None = option(
        None,
        "HH:MM, HH:MM:SS or D-HH:MM since the start of the command: save and stop before",
        ALL_STAGES | HOST | TECHNICAL,
        check=check_time_limit,
    )

    @property
    def evaluation_tasks(self) -> tuple[str, ...]:
        return () if self.eval_tasks is None else _parse_eval_tasks(self.eval_tasks)


# by the titles of --help
COMPONENTS: dict[str, Any] = {
    "model": ModelSettings,
    "data": DataSettings,
    "parallelism": ParallelSettings,
    "optimization": OptimizerSettings,
    "the run": RunSettings,
}
FACTS: dict[str, Facts] = {
    each.name: each.metadata["facts"]
    for component in COMPONENTS.values()
    for each in dataclasses.fields(component)
}


def shared_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, and a script's own options, that must be equal on all ranks, by option.
    Of a path, only that it is given: hosts may have paths of their own.
    """
    shared = {}
    for name, value in settings.items():
        scope = FACTS[name].scope if name in FACTS else NOWHERE
        if HOST not in scope:
            is_path = PATH in scope or isinstance(value, Path)
            shared[flag(name)] = "PATH" if is_path and value not in _NO_PATHS else value
    return shared
