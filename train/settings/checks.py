"""Checks of a run's settings: whether they are in range and fit together."""

from __future__ import annotations

import dataclasses
import math

import torch

from bmt_burst import Layout, Scores, kernels, strategies
from bmt_burst.bias.kernels import load
from bmt_burst.bias.scoring import TableScoring
from bmt_burst.extensions import read_extension
from bmt_burst.sequence.layout import count_chunks
from bmt_burst.sequence.mask import Mask
from bmt_burst.spec import Spec
from models.config import CPMConfig
from models.rope import RopeScaling
from train.base.wording import counted, flag
from train.data.shares import parse_shares, validation_folders
from train.data.skips import parse_range
from train.engine.fp8 import MULTIPLE
from train.settings.settings import Settings
from train.settings.values import check_project, check_time_limit, parse_steps

_LARGEST = 2**63 - 1
_LONGEST_TIMEOUT = 1e8  # seconds; longer ones overflow timers


def check_settings(settings: Settings) -> None:
    """Raise ValueError for settings that are out of range or do not fit together."""
    for field in dataclasses.fields(settings):
        _check_value(field.name, getattr(settings, field.name), field.metadata.get("least"))
    _check_numbers(settings)
    if not isinstance(settings.data, str):
        parse_shares(settings.data)
    validation_folders(settings.val_data)
    _check_needs(settings)
    if settings.fp8:
        _check_fp8(settings)
    _check_saving(settings)
    _check_tables(settings)
    _check_choices(settings)
    check_strategy(settings, _check_groups(settings))
    _check_chunk(settings)
    _check_schedule(settings)
    _check_ends(settings)


def _check_value(name: str, value: object, least: int | None) -> None:
    """Raise ValueError for empty text, and for a number that is out of range."""
    if value == "":
        raise ValueError(f"{flag(name)} must not be empty")
    if not isinstance(value, int | float):
        return
    if least is not None and value < least:
        expected = "not be negative" if least == 0 else f"be at least {least}"
        raise ValueError(f"{flag(name)} must {expected}, got {value}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(f"{flag(name)} must be below 2^63, got {value}")
    unbounded = (name, value) == ("clip", math.inf)
    if not math.isfinite(value) and not unbounded:
        raise ValueError(f"{flag(name)} must be finite, got {value}")


def _check_numbers(settings: Settings) -> None:
    """Raise ValueError for real numbers that are out of range."""
    for name in ("beta1", "beta2"):
        if not 0 <= (value := getattr(settings, name)) < 1:
            raise ValueError(f"{flag(name)} must be at least 0 and below 1, got {value}")
    if settings.timeout > _LONGEST_TIMEOUT:
        raise ValueError(
            f"--timeout must be at most {_LONGEST_TIMEOUT:.0e} seconds, got {settings.timeout}"
        )
    for name in ("lr", "clip", "timeout", "rope_theta"):
        if (value := getattr(settings, name)) is not None and not value > 0:
            raise ValueError(f"{flag(name)} must be positive, got {value}")


def _check_needs(settings: Settings) -> None:
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


def _check_fp8(settings: Settings) -> None:
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


def _check_saving(settings: Settings) -> None:
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


def _check_chunk(settings: Settings) -> None:
    """Raise ValueError for options that exclude --chunk, and for chunks that are too short."""
    if settings.chunk is not None and (reason := refuses_chunk(settings, settings.chunk)):
        raise ValueError(reason)


def check_layers(settings: Settings, model: CPMConfig) -> None:
    """Raise ValueError for options that exclude layers of the model."""
    if model.lightning_layers and settings.layout == "striped":
        raise ValueError(
            "--layout striped excludes lightning layers, whose ranks would send a state for each "
            "token: give --layout zigzag"
        )


def refuses_chunk(settings: Settings, tokens: int) -> str | None:
    """Return why a run with these settings cannot have --chunk `tokens`, or None if it can."""
    ranks, count = settings.sp_size, count_chunks(settings.seq_len, tokens)
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


def _check_tables(settings: Settings) -> None:
    """Raise ValueError for options of several numbers that are wrong."""
    for name, read in (("rope_scaling", RopeScaling.from_dict), ("sparse", read_extension)):
        if (values := getattr(settings, name)) is not None:
            try:
                read(dict(values))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{flag(name)}: {error}") from error


def _check_choices(settings: Settings) -> None:
    for field in dataclasses.fields(settings):
        choices, value = field.metadata.get("choices"), getattr(settings, field.name)
        if choices and value not in choices:
            raise ValueError(
                f"{flag(field.name)} must be one of {', '.join(choices)}, got {value!r}"
            )


def _check_groups(settings: Settings) -> int:
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


def check_strategy(settings: Settings, group_size: int, scores: Scores | None = None) -> None:
    """Raise ValueError, with the reason, if --strategy cannot run with the other options.

    group_size  consecutive ranks that are a group: the ranks of a host, or --ulysses-size ranks
    scores      of an example row, for models that add a learned bias to the scores
    """
    strategy, layout = settings.attention["strategy"], settings.layout
    seq_len, ranks = settings.seq_len, settings.sp_size
    if strategy == "auto":
        return
    # Strategies do not refuse numbers of heads or dtypes, so these are examples.
    sizes = strategies.Sizes(1, ranks, ranks, 16, torch.float32, torch.float32)
    problem = strategies.Problem(
        mask=scores.mask if scores else Mask.causal(seq_len),
        layout=Layout.named("zigzag" if layout == "auto" else layout, seq_len, ranks),
        spec=Spec(1.0),
        kernel=kernels.load("reference"),
        sizes=sizes,
        inner=group_size,
        outer=ranks // group_size,
        scoring=TableScoring(scores, load("reference")) if scores else strategies.DENSE,
    )
    if reason := strategies.load(strategy).refuses(problem):
        options = f"--strategy {strategy}"
        if layout != "auto":
            options += f" with --layout {layout}"
        raise ValueError(f"{options}, --seq-len {seq_len} and --sp-size {ranks}: {reason}")


def _check_schedule(settings: Settings) -> None:
    """Raise ValueError if the settings of the learning rate do not fit together."""
    if not 0 <= settings.min_lr_ratio <= 1:
        raise ValueError(
            f"--min-lr-ratio must be at least 0 and at most 1, got {settings.min_lr_ratio}"
        )
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


def _check_ends(settings: Settings) -> None:
    """Raise ValueError for steps and names that a run cannot have."""
    if settings.stop_after is not None and settings.stop_after > settings.steps:
        raise ValueError(
            f"--stop-after {settings.stop_after} is beyond --steps {settings.steps}, the last step"
        )
    if settings.skip_data:
        parse_range(settings.skip_data)
    if settings.time_limit:
        check_time_limit(settings.time_limit)
    if settings.profile:
        parse_steps(settings.profile, settings.steps)
    if settings.wandb:
        check_project(settings.wandb)
