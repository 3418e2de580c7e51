"""Which checkpoint a run goes on from, and whether it may."""

from __future__ import annotations

import sys
from pathlib import Path

from train import checkpoint, ranks
from train.config import TrainConfig
from train.data import Sequences

_TECHNICAL = {
    *("resume", "output", "processes", "save_every", "keep_last", "eval_every", "eval_sequences", "max_skips"),
    *("checkpointing", "checkpointing_blocks", "offload", "offload_optimizer", "timeout", "save"),
}  # settings that do not matter for the result


def chosen(config: TrainConfig) -> Path | None:
    """The checkpoint that the configuration asks for; None: the start. Every rank calls it.

    Raises RankError if the output has checkpoints that the run would not go on from, or none of those there is whole.
    """
    root = Path(config.output)
    if config.resume == "never":
        if checkpoint.listed(root):
            raise ranks.RankError(f"{root} has checkpoints: give --resume auto to go on, or another --output")
        return None
    auto = config.resume == "auto"
    path = checkpoint.newest(root, set_aside=True) if auto else checkpoint.find(Path(config.resume))
    if path is None:
        return None
    newest = next(iter(checkpoint.listed(root)), path)
    if not newest.samefile(path):
        newest = checkpoint.newest(root, set_aside=True)  # that one may be damaged
    if not newest.samefile(path):
        raise ranks.RankError(f"{root} has checkpoints that {path} does not lead to: give another --output")
    return path


def data_identity(data: Sequences) -> dict:
    """What must not change for the sample count to mean the same samples."""
    order = {"seq_len": data.seq_len, "seed": data.seed}
    return {"tokens": len(data.file.tokens), "digest": data.file.digest, **order}


def check_same(saved: checkpoint.Checkpoint, model: dict, data: dict) -> None:
    """Raises ValueError if the checkpoint is of another model or was reading other data."""
    if saved.state["model"] != model:
        raise ValueError(f"{saved.path} holds another model: {saved.state['model']}")
    before = saved.state["data"]
    if any(data.get(name) != value for name, value in before.items()):
        raise ValueError(f"{saved.path} was reading {before}, this run reads {data}")


def name_changes(before: dict, config: TrainConfig) -> None:
    """Says which settings that matter for the result differ from those of the run that is resumed."""
    now = config.to_dict()
    changed = [f"{k} {before.get(k)} -> {v}" for k, v in now.items() if k not in _TECHNICAL and before.get(k) != v]
    if changed and ranks.rank() == 0:
        print("changed since the checkpoint:", ", ".join(changed), file=sys.stderr)
