"""The first line of a run: what is trained, on which ranks and data."""

from __future__ import annotations

from bmt_burst import SequenceParallel
from train.base.wording import counted
from train.data.batches import Dealer
from train.engine import Engine
from train.run import resume
from train.run.config import TrainConfig
from train.run.inputs import Inputs
from train.run.kinds import ModelConfig


def describe_run(
    config: TrainConfig,
    model: ModelConfig,
    engine: Engine,
    sp: SequenceParallel,
    inputs: Inputs,
    batches: Dealer,
    step: int,
) -> str:
    """Describe the model, the ranks, the data, and the step after which the run resumes."""
    c, describe, epoch = config, batches.describe, inputs.training.epoch
    resumed = f", resumed after step {step}" if step else ""
    if resume.begins_stage(c):
        resumed = f", a new stage from {c.resume}"
    seen = dict.fromkeys(map(describe, inputs.validation.values()))  # most often identical
    val = f"; validation: {', '.join(seen)}" if seen else ""
    strategy = c.attention["strategy"]
    said = [
        f"{c.init_from or c.model}: {model.num_parameters:,} parameters, {c.dtype} on "
        f"{engine.device.type}, {type(engine).__name__}",
        f"{batches.dp_size} data parallel x {counted(sp.size, 'sequence parallel rank')}"
        + ("" if strategy == "auto" else f", strategy {strategy}"),
        f"{counted(c.batch_size, 'sequence')} of {counted(c.seq_len, 'token')} a step",
        (f"{counted(epoch, 'sequence')} an epoch, " if epoch else "") + describe(inputs.training),
    ]
    return "; ".join(said) + val + resumed
