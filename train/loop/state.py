"""The state of a run: where it begins, its first line, and what its checkpoints hold."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.config import CPMConfig
from train.base import ranks
from train.base.wording import counted
from train.checkpoints import checkpoint
from train.checkpoints.beside import read_beside
from train.checkpoints.weights import load_weights
from train.data.batches import Dealer
from train.data.same_tokenizer import check_folder, check_weights
from train.data.skips import Skips
from train.engine import Engine
from train.loop import resume
from train.loop.inputs import Inputs
from train.loop.progress import Progress
from train.settings.config import TrainConfig
from train.settings.kinds import ModelConfig


@dataclass(frozen=True)
class Start:
    """The state from which a rank begins, with the record of --init-from (beside.py).

    model        the configuration, with the length that resumed weights were made for
    longest_row  the length of the longest row in all stages
    accepted     the fields of --accept-field, with their values
    """

    progress: Progress
    model: ModelConfig
    longest_row: int
    beside: dict[str, Any] | None
    accepted: dict[str, Any]
    skips: Skips = field(default_factory=Skips)


def begin(config: TrainConfig, inputs: Inputs, engine: Engine, path: Path | None) -> Start:
    """Load the checkpoint `path` into the engine, else the weights of --init-from, if any."""
    if path is not None:
        return _load(config, inputs, engine, path)
    beside = None
    if source := config.init_from:
        weights, tokenizer = Path(source), inputs.tokenizer
        allowed, grows = config.allow_other_tokenizer, config.grow_vocabulary
        foreign = check_weights(inputs.training.folder, tokenizer, weights, allowed, grows)
        # exports of other models take nothing over
        if weights.is_dir() and isinstance(inputs.model, CPMConfig):
            beside = read_beside(weights, foreign)
        load_weights(source, engine, config.expected_weights(), config.seed)
    return Start(Progress(), inputs.model, config.seq_len, beside, config.accepted_fields())


def _load(config: TrainConfig, inputs: Inputs, engine: Engine, path: Path) -> Start:
    """Load a checkpoint, also its loss scale, its random numbers, and its place in the data."""
    saved, new_stage = checkpoint.Checkpoint(path), resume.begins_stage(config)
    # `open_inputs` read the newest state, which may be of a damaged checkpoint
    resume.check_model(path, saved.state, inputs.model, new_stage)
    resume.check_data(saved, inputs.training.identity, new_stage, inputs.tokenizer)
    check_folder(inputs.training.folder, path / checkpoint.TOKENIZER, path)
    so_far = {} if new_stage else saved.state
    names = [field.name for field in dataclasses.fields(Progress)]
    progress = Progress(**{name: so_far.get(name, 0) for name in names})
    model = inputs.model
    if made_for := saved.state["model"].get("max_position_embeddings"):
        model = dataclasses.replace(model, max_position_embeddings=made_for)
    skips = resume.choose_skips(config, so_far, progress)
    identity = describe_identity(config, inputs, model)
    resume.print_changes(saved.state, identity, config, progress.step + 1, inputs.tokenizer)
    engine.load(saved.read, saved.state["optimizer_steps"])
    if saved.state["config"]["dtype"] == config.dtype:
        engine.loss_scale = saved.state.get("loss_scale", engine.loss_scale)
        engine.steps_at_scale = saved.state.get("steps_at_scale", 0)
    saved.restore_rng(ranks.rank())
    inputs.training.restore(so_far.get("reading", {}))
    longest_row = max(config.seq_len, resume.longest_row(saved.state))
    accepted = {**saved.state.get("accepted", {}), **config.accepted_fields()}
    beside = saved.state.get("beside")
    return Start(progress, model, longest_row, beside, accepted, skips)


def make_state(config: TrainConfig, inputs: Inputs, engine: Engine, start: Start) -> dict[str, Any]:
    """Return the state of a checkpoint, in JSON's types. `start` has the present progress."""
    progress = start.progress
    return {
        **dataclasses.asdict(progress),
        "optimizer_steps": engine.optimizer_steps,
        "loss_scale": engine.loss_scale,
        "steps_at_scale": engine.steps_at_scale,
        "longest_row": start.longest_row,
        "beside": start.beside,
        "accepted": start.accepted,
        "reading": inputs.training.state(start.skips.end(progress.samples)),
        "skip_data": list(start.skips.ranges),
        **describe_identity(config, inputs, start.model),
    }


def describe_identity(config: TrainConfig, inputs: Inputs, model: ModelConfig) -> dict[str, Any]:
    return {"data": inputs.training.identity, "model": model.to_dict(), "config": config.to_dict()}


def describe_run(
    config: TrainConfig, inputs: Inputs, engine: Engine, batches: Dealer, step: int
) -> str:
    """Describe the model, the ranks, the data, and the step after which the run resumes."""
    c, describe, epoch = config, batches.describe, inputs.training.epoch
    resumed = f", resumed after step {step}" if step else ""
    if resume.begins_stage(c):
        resumed = f", a new stage from {c.resume}"
    seen = dict.fromkeys(map(describe, inputs.validation.values()))  # most often identical
    val = f"; validation: {', '.join(seen)}" if seen else ""
    strategy, chunks = c.attention["strategy"], ""
    if c.tokens_of_chunk is not None:
        chunks = f", each in {counted(-(-c.seq_len // c.tokens_of_chunk), 'chunk')}"
    facts = [
        f"{c.model_source}: {inputs.model.num_parameters:,} parameters, {c.dtype} on "
        f"{engine.device.type}, {type(engine).__name__}",
        f"{batches.dp_size} data parallel x {counted(batches.sp.size, 'sequence parallel rank')}"
        + ("" if strategy == "auto" else f", strategy {strategy}"),
        f"{counted(c.batch_size, 'sequence')} of {counted(c.seq_len, 'token')} a step{chunks}",
        (f"{counted(epoch, 'sequence')} an epoch, " if epoch else "") + describe(inputs.training),
    ]
    return "; ".join(facts) + val + resumed
