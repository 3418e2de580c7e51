"""The settings of a pretraining run, as fields: options.py, checks.py and config.py use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bmt_burst import strategies
from bmt_burst.offload import Offload
from bmt_burst.sequence.layout import LAYOUTS
from models.blocks import CHECKPOINTING, Saving
from models.huggingface import CONFIG
from models.tensor_files import is_file
from train.evaluation.tasks import parse_tasks
from train.settings.kinds import DEFAULT_MODEL, PRESETS
from train.settings.values import parse_steps

SCHEDULES = ("wsd", "cosine", "linear")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# groups of options, each with its first one, in the order of --help
_GROUPS = {
    "model": "model",
    "data": "data",
    "processes": "parallelism",
    "steps": "optimization",
    "output": "the run",
}


def option(default: Any, help: str, **extra: Any) -> Any:
    """Return a field with its text in --help, and its `choices` or the `least` number."""
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    model: str | None = option(
        None,
        f"a preset ({', '.join(PRESETS)}), or a JSON file with the fields of CPMConfig or of "
        "CPM-Live's configurations; by default the model of the checkpoint to resume from, or "
        f"{DEFAULT_MODEL}",
    )
    init_from: str | None = option(
        None,
        "starting weights: a folder with a config.json, which then replaces --model; or a file for "
        "--model (.pt, .bin, .pth or .safetensors); docs/pretraining.md lists them",
    )
    accept_field: str | None = option(
        None,
        "unknown fields of the model's config.json that change nothing it computes, with commas "
        "between them; an export has them again",
    )
    untie: bool = option(
        False, "train a head of its own, which starts as that of --init-from or as the embeddings"
    )
    grow_vocabulary: bool = option(
        False, "with --init-from: add rows for the data's new tokens, after those of the weights"
    )
    allow_other_tokenizer: bool = option(
        False,
        "with --init-from: start even if the tokenizer of the weights differs from the data's",
    )
    rope_theta: float | None = option(
        None, "base of the rotary positions; a larger one suits longer sequences"
    )
    rope_scaling: Mapping[str, Any] | None = option(
        None,
        "scaling of the rotary positions, instead of the model's: "
        """'{"kind": "yarn", "factor": 4, "original_length": 32768}'; """
        "models/rope.py lists kinds and numbers",
    )
    sparse: Mapping[str, Any] | None = option(
        None,
        "sparse attention in all layers with softmax attention: '{}' for InfLLM-V2 as MiniCPM4 "
        """has it, or with other constants of bmt_burst.InfLLMV2, '{"dense_len": 4096}'""",
    )
    window: int | None = option(
        None,
        "tokens that a token sees, itself included, in layers with a window, else in all",
        least=1,
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
    )

    data: str | Mapping[str, str] = option(
        "data/stdlib/train",
        "folder of training tokens, from prepare_data.py; or several, each as NAME=PATH:WEIGHT",
    )
    val_data: str | Mapping[str, str] | None = option(
        None,
        "folder of validation tokens; or several, each as NAME=PATH, with a loss for each name",
    )
    documents: str = option(
        "auto",
        "mask: tokens attend to their own document only; ignore: a sequence is one text; auto: "
        "mask if the data says where documents start; a resumed run keeps its choice",
        choices=("auto", "mask", "ignore"),
    )
    bos: str = option(
        "auto",
        "the token in front of each document, or none; auto: the tokenizer's begin token, else its "
        "end-of-text token, and none with --documents ignore; a resumed run keeps its choice; "
        "generate.py and evaluate.py: as in training, or as the folder of --init-from says",
    )
    seq_len: int = option(512, "tokens in one sequence, over all ranks that share it", least=1)
    batch_size: int = option(8, "sequences in one optimizer step, over all ranks", least=1)
    micro_batch_size: int | None = option(
        None,
        "sequences that a rank computes at once; by default the largest divisor up to 8",
        least=1,
    )

    processes: int = option(
        1, "processes to start on this machine; leave at 1 under torchrun", least=1
    )
    restarts: int = option(
        0,
        "times that a failed run starts again from its last checkpoint, except after exit code 2",
        least=0,
    )
    sp_size: int = option(1, "ranks that share a sequence; the others are data parallel", least=1)
    strategy: str = option(
        "auto",
        "how the ranks of a sequence share attention, see docs/attention.md; auto: usp if "
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
        choices=("auto", *LAYOUTS),
    )
    engine: str = option(
        "auto",
        "what shards the model: bmtrain on GPUs, torch (FSDP2) anywhere; auto: bmtrain if possible",
        choices=("auto", "torch", "bmtrain"),
    )
    device: str = option(
        "auto",
        "where to train; auto: on GPUs if there is one for each process of this machine",
        choices=("auto", "cpu", "cuda"),
    )
    flash: str = option(
        "auto",
        "the attention kernel, see bmt_burst.burst_attn_func; lightning layers take triton and "
        "reference, and auto for other names",
    )
    deterministic: bool = option(
        False, "use kernels that give identical bits in every run (CPU kernels always do)"
    )

    checkpointing: str = option(
        "none",
        "what the backward recomputes; selective: all except the attention; full: all",
        choices=CHECKPOINTING,
    )
    checkpointing_blocks: int | None = option(
        None,
        "apply --checkpointing to this many blocks, the first ones. By default to all; on GPUs, "
        "selective applies to as many as memory needs",
        least=0,
    )
    checkpointing_every: int | None = option(
        None,
        "keep only the input of every so many blocks, which the backward computes again",
        least=2,
    )
    mlp_tile: int | None = option(
        None,
        "tokens that the part of a block after its attention computes at once; by default all",
        least=1,
    )
    chunk: int | None = option(
        None,
        "train in chunks of this many tokens, over all ranks of a sequence: memory grows by keys, "
        "values and sums of their gradients only, and the forward of all chunks but the last runs "
        "twice; by default a sequence is one chunk",
        least=1,
    )
    offload: bool = option(
        False,
        "keep saved activations in host memory; needs --checkpointing, and has no effect on CPUs",
    )
    offload_optimizer: bool = option(
        False, "keep master weights and AdamW's state in host memory; engine bmtrain only"
    )

    steps: int = option(1000, "optimizer steps of the whole run", least=1)
    stop_after: int | None = option(
        None, "save and stop after this step; the schedule is that of --steps", least=1
    )
    lr: float = option(1e-3, "peak learning rate")
    schedule: str = option("wsd", "learning rate after warm-up", choices=SCHEDULES)
    warmup_steps: int | None = option(
        None, "steps of linear warm-up; by default 5% of steps", least=0
    )
    decay_steps: int | None = option(
        None, "last steps, in which wsd decays; by default 20%", least=0
    )
    min_lr_ratio: float = option(0.05, "learning rate at the end, as a share of the peak")
    weight_decay: float = option(0.1, "decoupled weight decay of matrices", least=0)
    beta1: float = option(0.9, "AdamW's beta 1")
    beta2: float = option(0.95, "AdamW's beta 2")
    clip: float = option(1.0, "largest global gradient norm")
    max_skips: int = option(
        10,
        "end the run after so many steps in a row whose loss or gradient norm was not finite",
        least=1,
    )

    output: str = option("runs/cpm", "folder for checkpoints, logs and curves")
    resume: str = option(
        "never",
        "auto: resume from the newest whole checkpoint in --output, or start if there is none; "
        "never: refuse an --output that has checkpoints; or the folder of a checkpoint",
    )
    new_stage: bool = option(
        False,
        "with --resume CHECKPOINT: start another stage from its weights and optimizer, with other "
        "data or length, for example. --resume auto continues a stage",
    )
    seed: int = option(0, "seed of starting weights and data order", least=0)
    skip_data: str | None = option(
        None, "FROM:TO, with --resume: leave out sequences FROM to TO - 1 of the data order, from 0"
    )
    save: bool = option(True, "write checkpoints; otherwise a run leaves only its curves")
    save_every: int = option(
        200, "steps between checkpoints; the last step is always saved; 0: only the last", least=0
    )
    save_in_background: bool = option(
        True, "write checkpoints while training continues, from a copy in host memory"
    )
    keep_last: int = option(2, "checkpoints to keep", least=1)
    log_every: int = option(
        10,
        "steps between the lines of a log, where a terminal shows a bar with every step",
        least=1,
    )
    eval_every: int = option(
        100, "steps between evaluations on --val-data; 0: only after the last", least=0
    )
    eval_sequences: int = option(32, "sequences of each source in one evaluation", least=1)
    eval_tasks: str | None = option(
        None, "tasks of evaluate.py in each evaluation, at --seq-len, for example needle,positions"
    )
    wandb: str | None = option(None, "project of Weights & Biases that also gets the records")
    profile: str | None = option(None, "steps to profile, FIRST:LAST; traces go to --output")
    timeout: float = option(
        1800.0, "seconds without a sign of life after which a rank prints its stacks and ends"
    )
    time_limit: str | None = option(
        None, "HH:MM, HH:MM:SS or D-HH:MM since the start of the command: save and stop before"
    )

    def pick_engine(self, has_bmtrain: bool) -> str:
        """Return the engine. "auto" is torch for --fp8, else bmtrain if there is one."""
        if self.engine != "auto":
            return self.engine
        return "bmtrain" if has_bmtrain and not self.fp8 else "torch"

    @property
    def attention(self) -> dict[str, Any]:
        """The options of burst_attn_func for every attention of the model."""
        has_groups = self.strategy == "auto" and self.ulysses_size is not None
        strategy = "usp" if has_groups else self.strategy
        return {"flash": self.flash, "deterministic": self.deterministic, "strategy": strategy}

    @property
    def tokens_of_chunk(self) -> int | None:
        """--chunk, or None if a sequence is no longer: a single chunk would keep keys for
        nothing.
        """
        is_one = self.chunk is None or self.chunk >= self.seq_len
        return None if is_one else self.chunk

    @property
    def model_file(self) -> Path | None:
        """The JSON file of the model, or None if a preset or a checkpoint has it."""
        if self.init_from and not is_file(self.init_from):
            return Path(self.init_from, CONFIG)
        return None if self.model is None or self.model in PRESETS else Path(self.model)

    @property
    def accepted_names(self) -> tuple[str, ...]:
        """The names of --accept-field."""
        names = (self.accept_field or "").split(",")
        return tuple(name.strip() for name in names if name.strip())

    @property
    def evaluation_tasks(self) -> tuple[str, ...]:
        """The tasks of --eval-tasks."""
        return () if self.eval_tasks is None else parse_tasks(self.eval_tasks, "--eval-tasks")

    @property
    def saves_while_training(self) -> bool:
        """Whether checkpoints are due between steps, and may be written in the background."""
        return self.save and self.save_in_background and 0 < self.save_every < self.last_step

    @property
    def needs_shared_output(self) -> bool:
        """Whether all ranks write to --output or read from it."""
        return self.save or self.resume != "never"

    @property
    def profiled_steps(self) -> range:
        """The steps of --profile."""
        return parse_steps(self.profile, self.steps) if self.profile else range(0)

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

    def saving(self) -> Saving:
        """Return the choice of what blocks save for the backward."""
        return Saving(
            self.checkpointing,
            Offload() if self.offload else None,
            blocks=self.checkpointing_blocks,
            every=self.checkpointing_every,
            tile=self.mlp_tile,
        )

    @property
    def given_model(self) -> str | None:
        """The option that names the model, with its value, or None if none does."""
        if self.init_from and not is_file(self.init_from):
            return f"--init-from {self.init_from}"
        return f"--model {self.model}" if self.model is not None else None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def fields_by_group() -> dict[str, list[dataclasses.Field]]:
    """Return the fields of each group of options."""
    found: dict[str, list[dataclasses.Field]] = {}
    name = ""
    for each in dataclasses.fields(Settings):
        name = _GROUPS.get(each.name, name)
        found.setdefault(name, []).append(each)
    return found
