"""Resuming: choosing the checkpoint, checking that it fits, and printing what has changed.

A new stage takes weights and optimizer only, like MiniCPM's longer contexts (arXiv 2404.06395,
2506.07900). Once its folder has a checkpoint, --resume auto continues the stage.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from train.base import ranks
from train.base.wording import flag
from train.checkpoints import checkpoint
from train.data.mixture import flatten_identities
from train.data.shares import show_sources
from train.data.skips import Skips, parse_range
from train.data.source import Source
from train.data.tokenizer import Tokenizer
from train.loop.progress import Progress, learning_rate
from train.settings.config import TrainConfig
from train.settings.facts import REPLACES, TECHNICAL
from train.settings.kinds import ModelConfig, config_of, kind_of, saved_model
from train.settings.settings import FACTS

_NOTES = {"max_position_embeddings", "family"}  # fields of a model that no computation uses
_REPLACED = {name for name, facts in FACTS.items() if REPLACES in facts.scope}
_CHANGED_BY_STAGES = {*_REPLACED, "window_pattern"}  # fields of a model
_STAGE = (
    "give --new-stage to start another stage from its weights and optimizer, with --resume "
    "CHECKPOINT and another --output"
)
_JUMP = 0.01  # relative change of a learning rate that is reported


def check_output(config: TrainConfig) -> None:
    """Raise ValueError if a run that does not resume has checkpoints in its --output."""
    if config.resume == "never" and checkpoint.listed(Path(config.output)):
        raise ValueError(
            f"{config.output} has checkpoints: give --resume auto to resume, or another --output"
        )


def choose_checkpoint(config: TrainConfig) -> Path | None:
    """Return the checkpoint to resume from, or None. Every rank must call this function.
    Raises RankError for checkpoints that the run would not continue, and broken ones.
    """
    root = Path(config.output)
    if config.resume == "never":
        return None
    auto = config.resume == "auto"
    path = checkpoint.newest(root, set_aside=True) if auto else checkpoint.find(Path(config.resume))
    if path is None:
        if config.skip_data:
            needed = f"--skip-data {config.skip_data} needs a checkpoint to resume from"
            raise ranks.RankError(f"{needed}, but {root} has none")
        return None
    if begins_stage(config) and checkpoint.listed(root):
        raise ranks.RankError(
            f"{root} has checkpoints: give --resume auto to continue their stage, or another "
            "--output for a new one"
        )
    latest = next(iter(checkpoint.listed(root)), path)
    # the latest one may be damaged
    whole = path if latest.samefile(path) else checkpoint.newest(root, set_aside=True)
    if whole is None or not whole.samefile(path):
        raise ranks.RankError(
            f"{root} has checkpoints that do not follow from {path}: give another --output"
        )
    return path


def choose_skips(config: TrainConfig, state: dict, progress: Progress) -> Skips:
    """Return the ranges of data to leave out, of a state and of --skip-data. Raises ValueError."""
    skips = Skips(tuple((start, end) for start, end in state.get("skip_data", [])))
    if config.skip_data is None:
        return skips
    remaining = max(config.steps - progress.step, 0) * config.batch_size
    return skips.with_range(parse_range(config.skip_data), progress.samples, remaining)


def begins_stage(config: TrainConfig) -> bool:
    """Whether the resumed checkpoint is the end of another stage."""
    return config.new_stage and config.resume != "auto"


def choose_documents(config: TrainConfig, path: Path | None) -> bool:
    """Whether to keep documents apart: by option, else as in checkpoint `path`, else always."""
    if config.documents == "auto" and path is not None and not begins_stage(config):
        return saved_documents(checkpoint.Checkpoint(path).state) == "mask"
    return config.documents != "ignore"


def saved_documents(state: dict) -> str:
    """Return "mask" or "ignore". Older checkpoints do not have it: all ignored documents."""
    return state["data"].get("documents", "ignore")


def choose_begin_token(
    config: TrainConfig, path: Path | None, apart: bool, data: Source, tokenizer: Tokenizer
) -> int | None:
    """Return the begin token by option, by checkpoint `path` or by `data`, or raise ValueError."""
    if config.bos == "none" or (config.bos == "auto" and not apart) or data.kind:
        return None
    if config.bos == "auto" and path is not None and not begins_stage(config):
        return saved_begin_token(checkpoint.Checkpoint(path).state)
    if config.bos == "auto":
        return data.bos_id
    return named_token(config.bos, tokenizer, str(data.folder))


def named_token(bos: str, tokenizer: Tokenizer, owner: str) -> int:
    """Return the id of --bos TOKEN. Raises ValueError if the tokenizer of `owner` lacks it."""
    found = tokenizer.id_of(bos)
    if found is None:
        raise ValueError(f"--bos must be auto, none or a token of {owner}'s tokenizer, got {bos!r}")
    return found


def saved_begin_token(state: dict) -> int | None:
    """Return the begin token of a checkpoint's run. Older runs had none."""
    return state["data"].get("bos")


def longest_row(state: dict) -> int:
    """Return the longest row of all stages. Older checkpoints only know the last stage."""
    return state.get("longest_row", state["config"]["seq_len"])


def check_model(
    path: Path, state: Any, model: ModelConfig, new_stage: bool, given: str | None = None
) -> None:
    """Raise ValueError unless the state of checkpoint `path` has the same model. A new stage may
    have other rotary positions, windows and sparse attention. `given` is the option that named the
    model, if any.
    """
    changed = _changed_fields(saved_model(path, state), model)
    allowed = changed.keys() <= _CHANGED_BY_STAGES
    if changed and not (allowed and new_stage):
        ways = [_STAGE] * allowed
        if given or not allowed:  # without a given model only --untie changes more
            ways.append(f"leave out {given or '--untie'} to continue with the checkpoint's model")
        raise ValueError(
            f"{path} holds another model: {_list_changes(changed)}; {'; or '.join(ways)}"
        )


def _changed_fields(before: ModelConfig, now: ModelConfig) -> dict[str, tuple]:
    """Return the fields that a computation uses and that differ, with both values."""
    if type(before) is not type(now):
        return {"model_type": (kind_of(before).name, kind_of(now).name)}
    changed = _differences(before.to_dict(), now.to_dict())
    return {name: values for name, values in changed.items() if name not in _NOTES}


def check_data(
    saved: checkpoint.Checkpoint, data: dict, new_stage: bool, tokenizer: Tokenizer
) -> None:
    """Raise ValueError unless the checkpoint was reading the same data. A new stage may have other
    data.
    """
    reading = saved.state["data"] | {
        "documents": saved_documents(saved.state),
        "bos": saved_begin_token(saved.state),
    }
    changed = _differences(*flatten_identities(reading, data))
    if changed and not new_stage:
        raise ValueError(
            f"{saved.path} was reading other data: {_list_changes(changed, tokenizer)}; {_STAGE}"
        )


def _differences(before: dict, now: dict) -> dict[str, tuple]:
    return {
        name: (value, now.get(name)) for name, value in before.items() if now.get(name) != value
    }


def _list_changes(differences: dict[str, tuple], tokenizer: Tokenizer | None = None) -> str:
    """List changes with both values: settings as options, begin tokens by name."""
    changed = []
    for name, values in differences.items():
        if name == "bos" and tokenizer:
            values = tuple("none" if x is None else tokenizer.name_of(x) for x in values)
        elif name in ("data", "val_data"):
            values = tuple(map(show_sources, values))
        changed.append(f"{flag(name) if name in FACTS else name} {values[0]} -> {values[1]}")
    return ", ".join(changed)


def print_changes(
    state: dict, now: dict, config: TrainConfig, next_step: int, tokenizer: Tokenizer
) -> None:
    """Print which settings that affect the result, and which fields of the model, differ between
    `state` and `now`, the same part of this run's state. Also print a jump of the learning rate at
    `next_step`.
    """
    changed = _changed_fields(config_of(state["model"]), config_of(now["model"]))
    before, now = _settings(state), _settings(now)
    # the model itself was compared, and checkpoints remember skipped data, which the run prints
    changed |= {
        k: (before.get(k), v)
        for k, v in now.items()
        if _affects_result(k) and k not in (*_REPLACED, "skip_data") and before.get(k) != v
    }
    if changed:
        ranks.warn(f"changed since the checkpoint: {_list_changes(changed, tokenizer)}")
    if next_step <= config.steps:
        _print_jump(state, config, next_step)


def changed_settings(state: dict, config: TrainConfig) -> str:
    """Return the settings that differ between a state and `config` and affect the result."""
    now = json.loads(json.dumps(config.to_dict()))  # as a state is stored
    changed = _differences(state["config"], now)
    kept = {k: values for k, values in changed.items() if k in now and _affects_result(k)}
    return _list_changes(kept)


def _affects_result(name: str) -> bool:
    return TECHNICAL not in FACTS[name].scope


def _settings(state: dict) -> dict:
    """Return the settings of a state, with "auto" replaced by its meaning."""
    config, documents = state["config"], saved_documents(state)
    layout, window = config.get("layout"), state["model"].get("window")
    if layout == "auto":
        layout = "balanced" if window or documents != "ignore" else "zigzag"
    meant = {"documents": documents, "bos": saved_begin_token(state), "layout": layout}
    # older checkpoints lack some settings
    return {"strategy": "auto", "fp8": False} | config | meant


def _print_jump(state: dict, config: TrainConfig, next_step: int) -> None:
    then = TrainConfig(**{name: value for name, value in state["config"].items() if name in FACTS})
    last, lr = learning_rate(state["step"], then), learning_rate(next_step, config)
    expected = learning_rate(state["step"] + 1, then) if state["step"] < then.steps else last
    if not math.isclose(lr, expected, rel_tol=_JUMP):
        was = f"{last:.3e} at the checkpoint's step {state['step']}"
        ranks.warn(f"the learning rate jumps: {was}, {lr:.3e} at step {next_step}")
