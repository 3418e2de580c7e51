"""The configuration of a run: its settings, checked together, and the model that they name."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmt_burst import Layout, Mask, Scores
from models.config import CPMConfig
from models.json_files import read_json
from models.rope import Llama3
from models.tensor_files import is_file
from models.weights import Expected
from train.base.wording import counted, flag, naming
from train.checkpoints import checkpoint
from train.engine.fp8 import MULTIPLE, check_model
from train.registry import KINDS, Kind
from train.settings.facts import REPLACES, parse_steps
from train.settings.kinds import (
    DEFAULT_MODEL,
    PRESETS,
    ModelConfig,
    config_of,
    expected_weights,
    kind_of,
    read_model,
    saved_model,
)
from train.settings.settings import (
    FACTS,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RunSettings,
)

_LONGEST_TIMEOUT = 1e8  # seconds; longer ones overflow timers


# A dataclass has the fields of its last base first.
@dataclass(frozen=True)
class TrainConfig(RunSettings, OptimizerSettings, ParallelSettings, DataSettings, ModelSettings):
    """All settings of a run. Raises ValueError if they are wrong or do not fit together."""

    def __post_init__(self) -> None:
        for name, facts in FACTS.items():
            facts.check_value(flag(name), getattr(self, name))
        _check_needs(self)
        if self.fp8:
            _check_fp8(self)
        _check_saving(self)
        check_strategy(self, _check_groups(self))
        if self.chunk is not None and (reason := refuses_chunk(self, self.chunk)):
            raise ValueError(reason)
        _check_steps(self)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def pick_engine(self, has_bmtrain: bool) -> str:
        """Return the engine. "auto" is torch for --fp8, else bmtrain if there is one. Raises
        ValueError for options that torch does not have.
        """
        engine = "bmtrain" if has_bmtrain and not self.fp8 else "torch"
        engine = engine if self.engine == "auto" else self.engine
        if engine == "torch" and (self.dtype == "fp16" or self.offload_optimizer):
            raise ValueError("--dtype fp16 and --offload-optimizer need --engine bmtrain, on GPUs")
        return engine

    @property
    def tokens_of_chunk(self) -> int | None:
        """--chunk, or None if a sequence is one chunk, which would keep keys for nothing."""
        is_one = self.chunk is None or self.chunk >= self.seq_len
        return None if is_one else self.chunk

    def model_config(self) -> ModelConfig:
        """Return the model's shape. Raises ValueError for options that do not go with the model."""
        named = self.named_model()
        instead = {n: getattr(self, n) for n, facts in FACTS.items() if REPLACES in facts.scope}
        given = {name: value for name, value in instead.items() if value is not None}
        with naming(f"{', '.join(map(flag, given))} with {self.model_name}"):
            model = dataclasses.replace(named, **given)
        if isinstance(model, CPMConfig):
            check_layers(self, model)
        if self.fp8:
            assert isinstance(model, CPMConfig), "_check_kind refuses the others"
            with naming(f"--fp8 with {self.model_name}"):
                check_model(model)
        return model

    @property
    def model_name(self) -> str:
        """The model for messages: as its user named it, or where it is from."""
        if given := self.given_model:
            return given
        resumed = self.resumed()
        return f"the model of {resumed[0]}" if resumed else f"the default model {DEFAULT_MODEL}"

    @property
    def model_source(self) -> str:
        """The folder, file, preset or checkpoint that the model is from."""
        if given := self.init_from or self.model:
            return given
        resumed = self.resumed()
        return str(resumed[0]) if resumed else DEFAULT_MODEL

    def resumed(self) -> tuple[Path, Any] | None:
        """Return the checkpoint of --resume and its state, which may be damaged, or None for a run
        that starts. Raises CheckpointError for one that cannot be read, and ValueError for a
        --new-stage that has none.
        """
        if self.resume == "never":
            return None
        root = Path(self.output if self.resume == "auto" else self.resume)
        found = checkpoint.peek(root)
        if found is None and self.resume != "auto":
            raise checkpoint.CheckpointError(f"there is no checkpoint in {root}")
        if found is None and self.new_stage:
            raise ValueError(
                f"{root} has no checkpoint of a stage yet: give --resume CHECKPOINT to start one"
            )
        return found

    def named_model(self) -> ModelConfig:
        """Return the shape of the starting weights, with the head of --untie."""
        named = self._read_model()
        self._check_kind(kind_of(named))
        is_untied = isinstance(named, CPMConfig) and not named.tie_embeddings
        if not self.untie or (is_untied and self.given_model is None and self.resumed()):
            return named
        assert isinstance(named, CPMConfig), "_check_kind refuses the others"
        with naming(f"--untie with {self.model_name}"):
            return named.untied()

    def expected_weights(self) -> Expected:
        """Return how to check the weights of --init-from. Raises ValueError as `model_config`."""
        source = Path(self.init_from or "")
        return expected_weights(source, self.named_model(), self.model_name, self.untie)

    def accepted_fields(self) -> dict[str, Any]:
        """Return the fields of --accept-field with their values. Raises ValueError or OSError."""
        if not self.accepted_names:
            return {}
        assert self.model_file is not None, "_check_needs refuses the others"
        values = read_json(self.model_file)
        if missing := [name for name in self.accepted_names if name not in values]:
            raise ValueError(
                f"--accept-field {','.join(missing)}: expected a field of {self.model_file}"
            )
        return {name: values[name] for name in self.accepted_names}

    def _read_model(self) -> ModelConfig:
        if self.init_from and not is_file(self.init_from):
            if not Path(self.init_from).exists() and self.resumed():
                raise ValueError(
                    f"folder {self.init_from} does not exist; leave out --init-from to continue "
                    "with the checkpoint's model"
                )
            found = read_model(Path(self.init_from), self.accepted_names)
            self._check_folder_of_weights(kind_of(found))
            return found
        if self.model is None:
            resumed = self.resumed()
            return PRESETS[DEFAULT_MODEL] if resumed is None else saved_model(*resumed)
        if self.model in PRESETS:
            return PRESETS[self.model]
        path = Path(self.model)
        if path.suffix != ".json" or not path.is_file():
            raise ValueError(
                f"--model {self.model} is neither a preset ({', '.join(PRESETS)}) nor a JSON file"
            )
        # missing, unknown or wrong fields, text that is not JSON, or JSON that is nested too deeply
        with naming(path, TypeError, RecursionError):
            found = config_of(json.loads(path.read_text()), self.accepted_names)
        self.accepted_fields()  # other files than Hugging Face's may lack them
        return found

    def _check_folder_of_weights(self, found: Kind) -> None:
        """Raise ValueError for a folder with another kind of model than the preset of --model."""
        named = kind_of(PRESETS[self.model]) if self.model in PRESETS else KINDS[0]
        if named not in (KINDS[0], found):
            raise ValueError(
                f"--init-from {self.init_from}, a {found.name}, does not go with --model "
                f"{self.model}, a {named.name}: give a folder or a file of its weights"
            )

    def _check_kind(self, kind: Kind) -> None:
        """Raise ValueError for options that do not go with such a model."""
        for name, facts in FACTS.items():
            value = getattr(self, name)
            given = value is not False and value not in (None, "auto")
            if kind is not KINDS[0] and facts.instances and given:
                raise ValueError(
                    f"{flag(name)} does not go with {self.model_name}, a {kind.name}: "
                    f"{facts.instances}"
                )


def _check_needs(settings: TrainConfig) -> None:
    """Raise ValueError for an option without another one that it needs."""
    for name in ("allow_other_tokenizer", "grow_vocabulary"):
        if getattr(settings, name) and not settings.init_from:
            raise ValueError(f"{flag(name)} needs --init-from, which is not given")
    if settings.accept_field is not None and settings.model_file is None:
        raise ValueError("--accept-field needs --init-from FOLDER or --model FILE, got neither")
    if settings.accept_field is not None and not settings.accepted_names:
        raise ValueError(
            f"--accept-field must name fields of config.json, got {settings.accept_field!r}"
        )
    if settings.new_stage and settings.resume == "never":
        raise ValueError("--new-stage needs the checkpoint to start from: give --resume CHECKPOINT")
    if settings.skip_data and settings.resume == "never":
        raise ValueError(
            "--skip-data needs a checkpoint to resume from: give --resume auto or --resume "
            "CHECKPOINT"
        )
    if "positions" in settings.evaluation_tasks and not settings.val_data:
        raise ValueError("--eval-tasks positions needs --val-data, which is not given")
    if settings.documents == "ignore" and settings.bos not in ("auto", "none"):
        raise ValueError(
            f"--bos {settings.bos} does not go with --documents ignore, which makes rows one text"
        )


def _check_fp8(settings: TrainConfig) -> None:
    """Raise ValueError for options that exclude --fp8."""
    if settings.engine == "bmtrain":
        raise ValueError("--fp8 needs --engine torch, got --engine bmtrain")
    if settings.dtype != "bf16":
        raise ValueError(f"--fp8 needs --dtype bf16, got --dtype {settings.dtype}")
    tokens, multiple = settings.seq_len, MULTIPLE * settings.sp_size
    if tokens % multiple:
        raise ValueError(
            f"--fp8 with --sp-size {settings.sp_size} needs --seq-len as a multiple of {multiple}, "
            f"got {tokens}"
        )
    if settings.mlp_tile is not None and settings.mlp_tile % MULTIPLE:
        raise ValueError(
            f"--fp8 needs --mlp-tile as a multiple of {MULTIPLE}, got {settings.mlp_tile}"
        )


def _check_saving(settings: TrainConfig) -> None:
    """Raise ValueError if options for what blocks save do not go together."""
    blocks, every = settings.checkpointing_blocks, settings.checkpointing_every
    needing = {
        "--offload": settings.offload or None,
        "--checkpointing-blocks": blocks,
        "--checkpointing-every": every,
    }
    for option, value in needing.items():
        if value is not None and settings.checkpointing == "none":
            raise ValueError(f"{option} needs --checkpointing selective or full")
    if every is not None and blocks is not None:
        raise ValueError("--checkpointing-every excludes --checkpointing-blocks: give one of them")


def check_layers(settings: TrainConfig, model: CPMConfig) -> None:
    """Raise ValueError for options that exclude layers of the model."""
    if model.lightning_layers and settings.layout == "striped":
        raise ValueError(
            "--layout striped excludes lightning layers, whose ranks would send a state for each "
            "token: give --layout zigzag"
        )


def refuses_chunk(settings: TrainConfig, tokens: int) -> str | None:
    """Return why a run with these settings cannot have --chunk `tokens`, or None if it can."""
    ranks, count = settings.sp_size, -(-settings.seq_len // tokens)
    shortest = settings.seq_len // count
    if shortest < ranks:
        return (
            f"--chunk {tokens} cuts --seq-len {settings.seq_len} into chunks of "
            f"{counted(shortest, 'token')}, too few for {counted(ranks, 'rank')}: give at least "
            f"{-(-settings.seq_len // (settings.seq_len // ranks))}"
        )
    strategy = settings.attention["strategy"]
    if strategy in ("ulysses", "usp"):
        given = f"--strategy {strategy}" if settings.ulysses_size is None else "--ulysses-size"
        return (
            f"--chunk excludes {given}, which refuses queries that attend to keys of earlier "
            "chunks: leave it out, and the ring is used"
        )
    if settings.fp8 and settings.seq_len % (count * MULTIPLE * ranks):
        return (
            f"--fp8 with --sp-size {ranks} needs chunks of a multiple of {MULTIPLE * ranks} "
            f"tokens, got {counted(count, 'chunk')} of --seq-len {settings.seq_len} by --chunk "
            f"{tokens}"
        )
    return None


def remark_length(settings: TrainConfig, model: CPMConfig, option: str | None = None) -> str | None:
    """Return a remark if rows are longer than the model was made for, or than its rotary scaling
    if that is not known. `option` gave their length.
    """
    longest, made, scaling = model.longest_sequence, "the model was", model.rope_scaling
    # Llama 3.1 and 3.2 were not made for the lengths that follow from their factors
    if longest is None and scaling and not isinstance(scaling, Llama3):
        longest, made = scaling.extended_length, f"its rotary positions ({scaling.kind}) were"
    if longest is None or settings.seq_len <= longest:
        return None
    others = ("rope_theta", "rope_scaling") if option is None else ()
    advice = " and ".join(flag(name) for name in others if getattr(settings, name) is None)
    return (
        f"{option or '--seq-len'} {settings.seq_len:,} is beyond the {longest:,} tokens that "
        f"{made} made for{f': see {advice}' if advice else ''}"
    )


def _check_groups(settings: TrainConfig) -> int:
    """Return the number of ranks in a group. Raises ValueError for groups that cannot be made."""
    inner, ulysses, ranks = settings.inner_size, settings.ulysses_size, settings.sp_size
    strategy = settings.strategy
    if inner is not None and ulysses is not None:
        raise ValueError(
            "--inner-size and --ulysses-size both say which ranks are a group: give one of them"
        )
    if ulysses is not None and strategy not in ("auto", "usp"):
        raise ValueError(f"--ulysses-size is for --strategy usp, got --strategy {strategy}")
    if inner not in (None, 1, ranks) and strategy == "ulysses":
        raise ValueError(
            "--strategy ulysses takes all ranks as one group: leave out --inner-size, or choose usp"
        )
    if settings.seq_len < ranks:
        raise ValueError(
            f"--seq-len {settings.seq_len} is too short for {counted(ranks, 'rank')}; the smallest "
            f"is {ranks}"
        )
    for name, size in (("--inner-size", inner), ("--ulysses-size", ulysses)):
        if size is not None and ranks % size:
            raise ValueError(f"{name} {size} does not divide --sp-size {ranks}")
    if ulysses is None and inner == 1:
        return ranks  # a ring of hosts with a rank each is one ring
    return ulysses or inner or ranks


def check_strategy(settings: TrainConfig, group_size: int, scores: Scores | None = None) -> None:
    """Raise ValueError, with the reason, if --strategy cannot run with the other options.

    group_size  consecutive ranks that are a group: the ranks of a host, or --ulysses-size ranks
    scores      of an example row, for models that add a learned bias to the scores
    """
    strategy, layout = settings.attention["strategy"], settings.layout
    seq_len, ranks = settings.seq_len, settings.sp_size
    if strategy == "auto":
        return
    from bmt_burst.planning import find_refusal  # loads all kernels

    on_ranks = Layout.named("zigzag" if layout == "auto" else layout, seq_len, ranks)
    if reason := find_refusal(strategy, scores or Mask.causal(seq_len), on_ranks, group_size):
        options = f"--strategy {strategy}"
        if layout != "auto":
            options += f" with --layout {layout}"
        raise ValueError(f"{options}, --seq-len {seq_len} and --sp-size {ranks}: {reason}")


def _check_steps(settings: TrainConfig) -> None:
    """Raise ValueError if steps, the learning rates of the schedule and the timeout do not fit."""
    if settings.timeout > _LONGEST_TIMEOUT:
        raise ValueError(
            f"--timeout must be at most {_LONGEST_TIMEOUT:.0e} seconds, got {settings.timeout}"
        )
    if not 0 <= settings.min_lr_ratio <= 1:
        raise ValueError(
            f"--min-lr-ratio must be at least 0 and at most 1, got {settings.min_lr_ratio}"
        )
    if settings.stop_after is not None and settings.stop_after > settings.steps:
        raise ValueError(
            f"--stop-after {settings.stop_after} is beyond --steps {settings.steps}, the last step"
        )
    if settings.profile:
        parse_steps(settings.profile, settings.steps)
    if settings.schedule != "wsd":
        return
    if settings.min_lr_ratio == 0:
        raise ValueError(
            "--min-lr-ratio must be above 0 for --schedule wsd, which decays exponentially; "
            "other schedules may end at 0"
        )
    if settings.warmup + settings.decay > settings.steps:
        raise ValueError(
            f"--warmup-steps {settings.warmup} and --decay-steps {settings.decay} are together "
            f"longer than the run, --steps {settings.steps}"
        )
