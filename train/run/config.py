"""The configuration of a pretraining run. options.py makes the command line and the config file of
its fields.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bmt_burst import InfLLMV2, Scores, strategies
from bmt_burst.sequence.layout import LAYOUTS
from models.blocks import CHECKPOINTING, Saving
from models.config import CPMConfig
from models.rope import RopeScaling
from models.tensor_files import is_file
from models.weights import Expected
from train.base.wording import flag
from train.data.shares import check_sources
from train.data.skips import parse_range
from train.evaluation.tasks import parse_tasks
from train.registry import KINDS, Kind
from train.run.kinds import PRESETS, ModelConfig, config_of, kind_of
from train.run.profiling import parse_steps
from train.run.saving import check_saving, make_saving
from train.run.schedule import SCHEDULES, check_schedule
from train.run.starting import expected_weights, read_model
from train.run.strategy import check_groups, check_strategy
from train.run.time_limit import check_time_limit
from train.run.wandb_run import check_project


def option(default: Any, group: str, help: str, **extra) -> Any:
    """Return a field with its group and text in --help. `extra` may have `choices`, and `kind`
    where the default is None.
    """
    return field(default=default, metadata={"group": group, "help": help, **extra})


SOURCES = str | dict  # a path, or texts by name
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LARGEST = 2**63 - 1
_LONGEST_TIMEOUT = 1e8  # seconds; longer ones overflow timers
_AT_LEAST_ONE = (
    "window",
    "seq_len",
    "batch_size",
    "micro_batch_size",
    "processes",
    "sp_size",
    "steps",
    "stop_after",
    "keep_last",
    "inner_size",
    "ulysses_size",
    "eval_sequences",
    "max_skips",
    "log_every",
    "mlp_tile",
)
_NOT_NEGATIVE = (
    "warmup_steps",
    "decay_steps",
    "checkpointing_blocks",
    "restarts",
    "save_every",
    "eval_every",
    "weight_decay",
    "seed",
)
MODEL, DATA, PARALLEL, OPTIMIZER, RUN = "model", "data", "parallelism", "optimization", "the run"


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run. Raises ValueError for settings that do not fit together."""

    model: str = option(
        "cpm-tiny",
        MODEL,
        f"a preset ({', '.join(PRESETS)}), or a JSON file with the fields of CPMConfig or of "
        "CPM-Live's configurations",
    )
    init_from: str | None = option(
        None,
        MODEL,
        "starting weights: a folder with a config.json, which then replaces --model, of a Llama, "
        "Mistral, Qwen2, Qwen3, MiniCPM or CPM-Bee; or a file for --model (.pt, .bin, .pth or "
        ".safetensors), under the names of Hugging Face, ModelCenter's Llama or CPM-Live",
        kind=str,
    )
    untie: bool = option(
        False,
        MODEL,
        "train a head of its own, where the model ties it to the embeddings; it starts as the head "
        "in the files of --init-from or, if they have none, as a copy of the embeddings",
    )
    grow_vocabulary: bool = option(
        False,
        MODEL,
        "with --init-from: add rows for the new tokens of the data's tokenizer, which must extend "
        "the tokenizer of the weights; a new row is the mean of the others with small noise",
    )
    allow_other_tokenizer: bool = option(
        False,
        MODEL,
        "with --init-from: start even if the tokenizer of the weights differs from the data's",
    )
    rope_theta: float | None = option(
        None,
        MODEL,
        "base of the rotary positions, instead of the model's; a larger base suits longer "
        "sequences",
        kind=float,
    )
    rope_scaling: Mapping[str, Any] | None = option(
        None,
        MODEL,
        "scaling of the rotary positions, instead of the model's: "
        """'{"kind": "yarn", "factor": 4, "original_length": 32768}'; """
        "models/rope.py lists kinds and numbers",
        kind=dict,
    )
    sparse: Mapping[str, Any] | None = option(
        None,
        MODEL,
        "sparse attention in all layers, instead of the model's: '{}' for InfLLM-V2 as MiniCPM4 "
        """has it, or with other constants, '{"dense_len": 4096}'; """
        "bmt_burst.InfLLMV2 lists them",
        kind=dict,
    )
    window: int | None = option(
        None,
        MODEL,
        "number of tokens that a token attends to, itself included, in the layers that have a "
        "window; in all layers if the model has none",
        kind=int,
    )
    dtype: str = option(
        "fp32",
        MODEL,
        "weights and activations in forward and backward; master weights and AdamW are always fp32",
        choices=tuple(DTYPES),
    )

    data: str | Mapping[str, str] = option(
        "data/stdlib/train",
        DATA,
        "folder of training tokens, from prepare_data.py; or several, each as NAME=PATH:WEIGHT. "
        "Weights are shares of tokens, and are normalised",
        kind=SOURCES,
    )
    val_data: str | Mapping[str, str] | None = option(
        None,
        DATA,
        "folder of validation tokens; or several, each as NAME=PATH, with a loss for each name",
        kind=SOURCES,
    )
    documents: str = option(
        "auto",
        DATA,
        "mask: tokens attend to their own document only, positions restart in each document, and "
        "its last token has no target; ignore: a sequence is one text; auto: mask if the data says "
        "where documents start, else ignore; a resumed run keeps its choice",
        choices=("auto", "mask", "ignore"),
    )
    bos: str = option(
        "auto",
        DATA,
        "the token in front of each document, unless the data has it there: a token of the "
        "tokenizer, or none; auto: the tokenizer's begin token, else its end-of-text token, and "
        "none for older data folders and with --documents ignore; a resumed run keeps its choice",
    )
    seq_len: int = option(512, DATA, "tokens in one sequence, over all ranks that share it")
    batch_size: int = option(8, DATA, "sequences in one optimizer step, over all ranks")
    micro_batch_size: int | None = option(
        None,
        DATA,
        "sequences that a rank computes at once; the rest is gradient accumulation. By default "
        "the largest number up to 8 that divides a data parallel group's sequences",
        kind=int,
    )

    processes: int = option(
        1, PARALLEL, "processes to start on this machine; leave at 1 under torchrun"
    )
    restarts: int = option(
        0,
        PARALLEL,
        "times that a failed run starts again from its last checkpoint, on this machine; not after "
        "an error with exit code 2, such as a wrong option",
    )
    sp_size: int = option(1, PARALLEL, "ranks that share a sequence; the others are data parallel")
    strategy: str = option(
        "auto",
        PARALLEL,
        "how the ranks of a sequence share attention. ring: each rank sends keys and values to "
        "the next; all-gather: a ring that sends all keys and values of a host at once; "
        "one-call: gathers all of a short sequence first, then computes; ulysses: "
        "each rank computes whole heads; usp: ulysses in groups of --ulysses-size ranks, a ring "
        "between the groups; auto: usp if --ulysses-size is given, else ring",
        choices=("auto", *strategies.names()),
    )
    inner_size: int | None = option(
        None, PARALLEL, "ranks of a host, for the double ring", kind=int
    )
    ulysses_size: int | None = option(
        None,
        PARALLEL,
        "consecutive ranks that share heads, for usp; excludes --inner-size. By default the ranks "
        "of a host",
        kind=int,
    )
    layout: str = option(
        "auto",
        PARALLEL,
        "how a sequence is cut over its ranks; auto: equal work for its documents and windows "
        "(in full layers, if there are any), else zigzag",
        choices=("auto", *LAYOUTS),
    )
    engine: str = option(
        "auto",
        PARALLEL,
        "the engine that shards and updates the model: bmtrain on GPUs, torch (FSDP2) anywhere; "
        "auto: bmtrain if it is installed and there are GPUs",
        choices=("auto", "torch", "bmtrain"),
    )
    device: str = option(
        "auto",
        PARALLEL,
        "where to train; auto: on GPUs if there is one for each process of this machine",
        choices=("auto", "cpu", "cuda"),
    )
    flash: str = option("auto", PARALLEL, "the attention kernel, see bmt_burst.burst_attn_func")
    deterministic: bool = option(
        False,
        PARALLEL,
        "use kernels that give identical bits in every run (CPU kernels always do)",
    )

    checkpointing: str = option(
        "none",
        PARALLEL,
        "what the backward recomputes; selective: everything except the attention; full: "
        "everything",
        choices=CHECKPOINTING,
    )
    checkpointing_blocks: int | None = option(
        None,
        PARALLEL,
        "apply --checkpointing to this many blocks, the first ones. By default to all",
        kind=int,
    )
    checkpointing_every: int | None = option(
        None,
        PARALLEL,
        "keep only the input of every so many blocks; the backward computes these blocks again, "
        "which meanwhile save what --checkpointing says. By default that of each block",
        kind=int,
    )
    mlp_tile: int | None = option(
        None,
        PARALLEL,
        "tokens that a block's output projection, norm and feed-forward compute at once; the "
        "backward computes them again. By default all tokens of a rank",
        kind=int,
    )
    offload: bool = option(
        False,
        PARALLEL,
        "keep saved activations in host memory; needs --checkpointing, and has no effect on CPUs",
    )
    offload_optimizer: bool = option(
        False,
        PARALLEL,
        "keep master weights and AdamW's state in host memory; engine bmtrain only",
    )

    steps: int = option(1000, OPTIMIZER, "optimizer steps of the whole run")
    stop_after: int | None = option(
        None,
        OPTIMIZER,
        "save and stop after this step. The schedule is that of --steps, and --resume auto "
        "continues it",
        kind=int,
    )
    lr: float = option(1e-3, OPTIMIZER, "peak learning rate")
    schedule: str = option(
        "wsd", OPTIMIZER, "learning rate after warm-up", choices=tuple(SCHEDULES)
    )
    warmup_steps: int | None = option(
        None, OPTIMIZER, "steps of linear warm-up; by default 5% of steps", kind=int
    )
    decay_steps: int | None = option(
        None, OPTIMIZER, "last steps, in which wsd decays; by default 20%", kind=int
    )
    min_lr_ratio: float = option(
        0.05, OPTIMIZER, "learning rate at the end, as a share of the peak"
    )
    weight_decay: float = option(0.1, OPTIMIZER, "decoupled weight decay of matrices")
    beta1: float = option(0.9, OPTIMIZER, "AdamW's beta 1")
    beta2: float = option(0.95, OPTIMIZER, "AdamW's beta 2")
    clip: float = option(1.0, OPTIMIZER, "largest global gradient norm")
    max_skips: int = option(
        10,
        OPTIMIZER,
        "end the run after this many skipped steps in a row; a step is skipped if its loss or "
        "gradient norm is not finite",
    )

    output: str = option("runs/cpm", RUN, "folder for checkpoints, logs and curves")
    resume: str = option(
        "never",
        RUN,
        "auto: resume from the newest whole checkpoint in --output, or start if there is none; "
        "never: refuse an --output that has checkpoints; or the folder of a checkpoint",
    )
    new_stage: bool = option(
        False,
        RUN,
        "with --resume CHECKPOINT: start another stage, which may have other data, length, rope "
        "base or windows. It keeps weights and optimizer, and restarts steps, samples and "
        "schedule. --resume auto continues a stage",
    )
    seed: int = option(0, RUN, "seed of starting weights and data order")
    skip_data: str | None = option(
        None,
        RUN,
        "FROM:TO, with --resume: leave out sequences FROM to TO - 1 of the data order, counted "
        "from 0 as --batch-size counts them. Steps and schedule stay. Checkpoints remember it",
        kind=str,
    )
    save: bool = option(True, RUN, "write checkpoints; otherwise a run leaves only its curves")
    save_every: int = option(
        200, RUN, "steps between checkpoints; the last step is always saved; 0: only the last"
    )
    save_in_background: bool = option(
        True,
        RUN,
        "write checkpoints while training continues, from a copy in host memory (on Linux, if half "
        "of the free host memory is enough)",
    )
    keep_last: int = option(2, RUN, "checkpoints to keep")
    log_every: int = option(
        10,
        RUN,
        "steps between the lines of a log; the first and the last step also get one. A terminal "
        "shows a bar with every step instead, and metrics.jsonl has every step",
    )
    eval_every: int = option(
        100, RUN, "steps between evaluations on --val-data; 0: only after the last"
    )
    eval_sequences: int = option(32, RUN, "sequences of each source in one evaluation")
    eval_tasks: str | None = option(
        None,
        RUN,
        "tasks of evaluate.py in each evaluation, at --seq-len, with one number each in the log: "
        "needle and variables have the share of answers that were found, positions has the loss at "
        "the last positions of --val-data; for example needle,positions",
        kind=str,
    )
    wandb: str | None = option(
        None, RUN, "project of Weights & Biases that gets the records, too", kind=str
    )
    profile: str | None = option(
        None, RUN, "steps to profile, FIRST:LAST; traces go to --output", kind=str
    )
    timeout: float = option(
        1800.0, RUN, "seconds without a sign of life after which a rank prints its stacks and ends"
    )
    time_limit: str | None = option(
        None,
        RUN,
        "HH:MM, HH:MM:SS or D-HH:MM since the start of the command: save and stop before this time "
        "is over. It includes restarts and stages",
        kind=str,
    )

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_values()
        check_sources(self.data, self.val_data)
        self._check_needs()
        check_saving(self)
        self._check_rope_scaling()
        self._check_sparse()
        self._check_choices()
        self.check_strategy(check_groups(self))
        check_schedule(self)
        self._check_ends()
        self._check_records()

    def _check_ranges(self) -> None:
        """Raise ValueError for a number that is too small."""
        for name in _AT_LEAST_ONE:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{flag(name)} must be at least 1, got {value}")
        for name in _NOT_NEGATIVE:
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{flag(name)} must not be negative, got {value}")

    def _check_values(self) -> None:
        """Raise ValueError for empty text, and for numbers that are too large or out of range."""
        for name, value in vars(self).items():
            if value == "":
                raise ValueError(f"{flag(name)} must not be empty")
            if isinstance(value, int) and abs(value) > _LARGEST:
                raise ValueError(f"{flag(name)} must be below 2^63, got {value}")
            unbounded = (name, value) == ("clip", math.inf)
            if isinstance(value, float) and not math.isfinite(value) and not unbounded:
                raise ValueError(f"{flag(name)} must be finite, got {value}")
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{flag(name)} must be at least 0 and below 1, got {value}")
        if self.timeout > _LONGEST_TIMEOUT:
            raise ValueError(
                f"--timeout must be at most {_LONGEST_TIMEOUT:.0e} seconds, got {self.timeout}"
            )
        for name in ("lr", "clip", "timeout", "rope_theta"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{flag(name)} must be positive, got {value}")

    def _check_needs(self) -> None:
        """Raise ValueError for an option without another one that it needs."""
        for name in ("allow_other_tokenizer", "grow_vocabulary"):
            if getattr(self, name) and not self.init_from:
                raise ValueError(f"{flag(name)} needs --init-from, which is not given")
        if self.new_stage and self.resume == "never":
            raise ValueError(
                "--new-stage needs the checkpoint to start from: give --resume CHECKPOINT"
            )
        if self.skip_data and self.resume == "never":
            raise ValueError(
                "--skip-data needs a checkpoint to resume from: give --resume auto or --resume "
                "CHECKPOINT"
            )
        if "positions" in self.evaluation_tasks and not self.val_data:
            raise ValueError("--eval-tasks positions needs --val-data, which is not given")
        if self.documents == "ignore" and self.bos not in ("auto", "none"):
            raise ValueError(
                f"--bos {self.bos} does not go with --documents ignore, which makes rows one text"
            )

    def _check_ends(self) -> None:
        if self.stop_after is not None and self.stop_after > self.steps:
            raise ValueError(
                f"--stop-after {self.stop_after} is beyond --steps {self.steps}, the last step"
            )
        if self.skip_data:
            parse_range(self.skip_data)
        if self.time_limit:
            check_time_limit(self.time_limit)

    def _check_records(self) -> None:
        if self.profile:
            parse_steps(self.profile, self.steps)
        if self.wandb:
            check_project(self.wandb)

    def _check_choices(self) -> None:
        for f in dataclasses.fields(self):
            choices = f.metadata.get("choices")
            if choices and getattr(self, f.name) not in choices:
                raise ValueError(
                    f"{flag(f.name)} must be one of {', '.join(choices)}, "
                    f"got {getattr(self, f.name)!r}"
                )

    def check_strategy(self, group_size: int, scores: Scores | None = None) -> None:
        """Raise ValueError if --strategy cannot run. A host has `group_size` ranks."""
        strategy, layout = self.attention["strategy"], self.layout
        check_strategy(strategy, layout, self.seq_len, self.sp_size, group_size, scores)

    def _check_sparse(self) -> None:
        if self.sparse is None:
            return
        try:
            InfLLMV2.from_dict(self.sparse)
        except (TypeError, ValueError) as error:
            raise ValueError(f"--sparse: {error}") from error

    def _check_rope_scaling(self) -> None:
        if self.rope_scaling is None:
            return
        try:
            RopeScaling.from_dict(dict(self.rope_scaling))
        except ValueError as error:
            raise ValueError(f"--rope-scaling: {error}") from error

    def saving(self) -> Saving:
        """Return what blocks save for the backward."""
        return make_saving(self)

    @property
    def attention(self) -> dict[str, Any]:
        """The options of burst_attn_func for every attention of the model."""
        strategy = (
            "usp" if self.strategy == "auto" and self.ulysses_size is not None else self.strategy
        )
        return {"flash": self.flash, "deterministic": self.deterministic, "strategy": strategy}

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
        """The step after which the command ends: the last one, or that of --stop-after."""
        return self.steps if self.stop_after is None else self.stop_after

    @property
    def warmup(self) -> int:
        return self.steps // 20 if self.warmup_steps is None else self.warmup_steps

    @property
    def decay(self) -> int:
        return self.steps // 5 if self.decay_steps is None else self.decay_steps

    def model_config(self) -> ModelConfig:
        """Return the model's shape. Raises ValueError if there is none, or for options that do not
        go with such a model.
        """
        named = self.named_model()
        instead = {
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "sparse": self.sparse,
            "window": self.window,
        }
        given: dict[str, Any] = {
            name: value for name, value in instead.items() if value is not None
        }
        try:
            return dataclasses.replace(named, **given)
        except ValueError as error:
            options = ", ".join(map(flag, given))
            raise ValueError(f"{options} with {self.model_name}: {error}") from error

    def _check_kind(self, kind: Kind) -> None:
        """Raise ValueError for options that do not go with such a model."""
        for name, reason in kind.refused.items():
            value = getattr(self, name)
            if value is not False and value not in (None, "auto"):
                raise ValueError(
                    f"{flag(name)} does not go with {self.model_name}, a {kind.name}: {reason}"
                )

    @property
    def model_name(self) -> str:
        """The model as its user named it, for messages."""
        if self.init_from and not is_file(self.init_from):
            return f"--init-from {self.init_from}"
        if self.model == TrainConfig.model:
            return f"the default model, {self.model}"
        return f"--model {self.model}"

    def named_model(self) -> ModelConfig:
        """Return the shape that the starting weights have, with the head of --untie. Raises
        ValueError as `model_config`.
        """
        named = self._read_model()
        self._check_kind(kind_of(named))
        if not self.untie:
            return named
        assert isinstance(named, CPMConfig), "_check_kind refuses the others"
        try:
            return named.untied()
        except ValueError as error:
            raise ValueError(f"--untie with {self.model_name}: {error}") from error

    def expected_weights(self) -> Expected:
        """Return how to check the weights of --init-from. Raises ValueError as `model_config`."""
        source = Path(self.init_from or "")
        return expected_weights(source, self.named_model(), self.model_name, self.untie)

    def _read_model(self) -> ModelConfig:
        if self.init_from and not is_file(self.init_from):
            found = read_model(Path(self.init_from))
            self._check_folder_of_weights(kind_of(found))
            return found
        if self.model in PRESETS:
            return PRESETS[self.model]
        path = Path(self.model)
        if path.suffix != ".json" or not path.is_file():
            raise ValueError(
                f"--model {self.model} is neither a preset ({', '.join(PRESETS)}) nor a JSON file"
            )
        try:
            return config_of(json.loads(path.read_text()))
        # missing, unknown or wrong fields, text that is not JSON, or JSON that is nested too deeply
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error

    def _check_folder_of_weights(self, found: Kind) -> None:
        """Raise ValueError for a folder with another kind of model than the preset of --model."""
        named = kind_of(PRESETS[self.model]) if self.model in PRESETS else KINDS[0]
        if named not in (KINDS[0], found):
            raise ValueError(
                f"--init-from {self.init_from}, a {found.name}, does not go with --model "
                f"{self.model}, a {named.name}: give a folder or a file of its weights"
            )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
