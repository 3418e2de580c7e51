"""Runs of one rank in the process of a test, and the records that runs leave."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.preparing import write_tokens
from tests.test_model import SMALL
from train.checkpoints import checkpoint
from train.checkpoints.checkpoint import Checkpoint
from train.data.tokenizer import ByteTokenizer
from train.data.tokenizer_base import Tokenizer
from train.pretrain import Trainer
from train.settings.config import TrainConfig


def written_text(folder: Path, tokenizer: Tokenizer, start: int = 0) -> Path:
    """Write a folder of tokens of 30 short functions. Return it."""
    numbers = range(start, start + 30)
    texts = (f"def function_{i}(x):\n    return x + {i * i}\n\n" for i in numbers)
    return write_tokens(folder, tokenizer, *texts)


def make_settings(folder: Path) -> dict:
    """Return options of a model of 61 tokens a sequence over two texts, in steps of 2 sequences."""
    for name, start in (("text", 0), ("other", 500)):
        written_text(folder / name, ByteTokenizer(), start)
    (folder / "model.json").write_text(json.dumps(SMALL.to_dict()))
    options = {"model": str(folder / "model.json"), "data": str(folder / "text")}
    options |= {"seq_len": 61, "batch_size": 2, "micro_batch_size": 1, "eval_sequences": 4}
    options |= {"steps": 4, "lr": 3e-3, "warmup_steps": 1, "decay_steps": 1}
    return options | {"save_every": 2, "keep_last": 9, "output": str(folder / "run")}


def train(settings: dict, stop: SimpleNamespace | None = None, **options) -> bool:
    """Run a trainer to its end. Return whether nothing is left to do."""
    stop = stop or SimpleNamespace(received=False)
    watchdog = SimpleNamespace(
        alive=lambda doing: None, quiet=lambda: None, write_to=lambda folder: None
    )
    trainer = Trainer(TrainConfig(**settings | options), torch.device("cpu"), stop, watchdog)
    try:
        return trainer.run()
    finally:
        trainer.lock.close()


def read_records(folder: Path) -> list[dict]:
    """Return the records of a run's folder."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def records(folder: Path, name: str = "loss") -> dict[int, float]:
    """Return the values of `name` by step."""
    return {r["step"]: r[name] for r in read_records(folder) if name in r}


def newest(folder: Path) -> Checkpoint:
    """Return the newest checkpoint of a run."""
    return Checkpoint(checkpoint.newest(folder))


def forget(folder: Path, *steps: int) -> None:
    """Remove the checkpoints of these steps of a run."""
    for step in steps:
        shutil.rmtree(folder / f"step_{step:08d}")
