"""Measures the memory and the time of a trainer's steps over the ranks of one group.

    torchrun --nproc-per-node 2 bench/trainers.py --output bench/results/trainers.jsonl

The model is a small Llama with a large vocabulary, so that logits of whole sequences would be most
of the memory: S * V numbers, where S is the length of a sequence and V the vocabulary. A row has
the peak of allocated memory of the rank that has most, and tokens a second, the median of the
steps after the first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.machine import cpu_name, record
from bench.options import at_least, make_parser
from bmt_burst.adapters.transformers import sequence_parallel

CASES = {
    "Trainer": (False, {}),
    "Trainer, label smoothing": (False, {"label_smoothing_factor": 0.1}),
    "SFTTrainer": (True, {}),
    "SFTTrainer, label smoothing": (True, {"label_smoothing_factor": 0.1}),
}


class _Steps(transformers.TrainerCallback):
    """The seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_args: Any, **_named: Any) -> None:
        self._start = self._now()

    def on_step_end(self, *_args: Any, **_named: Any) -> None:
        self.seconds.append(self._now() - self._start)

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """Measure all cases. Yield their rows."""
    for case in args.cases:
        seconds, peak = _measure(case, args)
        yield {
            "kind": "trainers",
            "case": case,
            "gpus": int(os.environ["WORLD_SIZE"]),
            "seq_len": args.seq_len,
            "vocab_size": args.vocab_size,
            "layers": args.layers,
            "hidden_size": args.hidden_size,
            "tokens_per_second": args.seq_len / seconds,
            "peak_gib": peak,
            "whole_logits_gib": 4 * args.seq_len * args.vocab_size / 2**30,
        }


def _measure(case: str, args: argparse.Namespace) -> tuple[float, float | None]:
    """Return the seconds of a step and the peak of memory in GiB, of the rank with most."""
    import datasets

    uses_trl, options = CASES[case]
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(args.vocab_size, (args.steps, args.seq_len), generator=draw).tolist()
    data = datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in tokens])
    steps = _Steps()
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "output_dir": folder,
            "per_device_train_batch_size": 1,
            "max_steps": args.steps,
            "bf16": True,
            "use_cpu": not torch.cuda.is_available(),
            "gradient_checkpointing": True,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            **options,
        }
        trainer = _make_trainer(uses_trl, common, data, args)
        trainer.add_callback(steps)
        trainer.train()
        del trainer
    peak = None
    if torch.cuda.is_available():
        found = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device="cuda")
        dist.all_reduce(found, dist.ReduceOp.MAX)
        peak = float(found)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return statistics.median(steps.seconds[1:]), peak


def _make_trainer(
    uses_trl: bool, common: dict[str, Any], data: Any, args: argparse.Namespace
) -> Any:
    model = _make_model(args)
    if not uses_trl:
        arguments = transformers.TrainingArguments(**common)
        return sequence_parallel(transformers.Trainer)(
            model=model, args=arguments, train_dataset=data
        )
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="a", eos_token="b", unk_token="a"
    )
    arguments = SFTConfig(**common, max_length=None)
    return sequence_parallel(SFTTrainer)(
        model=model, args=arguments, train_dataset=data, processing_class=tokenizer
    )


def _make_model(args: argparse.Namespace) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": args.vocab_size,
        "hidden_size": args.hidden_size,
        "intermediate_size": 2 * args.hidden_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden_size // 128,
        "num_key_value_heads": max(args.hidden_size // 512, 1),
        "max_position_embeddings": args.seq_len,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config = transformers.LlamaConfig(**sizes)
    return transformers.LlamaForCausalLM(config)


def main() -> None:
    parser = make_parser(__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("--seq-len", type=int, default=1 << 16 if cuda else 64)
    parser.add_argument("--vocab-size", type=int, default=150_016 if cuda else 256)
    parser.add_argument("--layers", type=int, default=4 if cuda else 1)
    parser.add_argument("--hidden-size", type=int, default=2048 if cuda else 128)
    parser.add_argument("--steps", type=at_least(2), default=4)
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("expected ranks of torchrun, got a process without RANK")
    if args.seq_len < int(os.environ["WORLD_SIZE"]):
        parser.error(f"--seq-len must have a token for each rank, got {args.seq_len}")
    if args.hidden_size % 128:
        parser.error(f"--hidden-size must be a multiple of 128, got {args.hidden_size}")
    name = torch.cuda.get_device_name() if cuda else cpu_name()
    record(rows(args), args.output, name, int(os.environ["RANK"]))


if __name__ == "__main__":
    main()
