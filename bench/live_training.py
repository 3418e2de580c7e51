"""Measures steps of CPM-Bee on a synthetic row of its data (bench/live_rows.py).

    torchrun --nproc-per-node 2 bench/live_training.py --models cpm-bee-3b --seq-len 65536 \\
        --output bench/results/live-training-mine.jsonl

Each setting has a row of JSON, as in bench/training.py: peak memory, and medians over the steps
after --warm-up of tokens a second and GPU, MFU and seconds a step. FLOPs are those of
train/loop/measure.py, which count only visible pairs. All ranks share one row, in the layout that
balances its work. Every step has the same row with new tokens. With --layers models have fewer
layers than their presets, and the row states it.

This measures only the model and its engine. Pretraining also reads data and saves.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import live_rows
from bench.machine import GIB, Machine
from bench.options import add_kernel, at_least, make_parser
from bmt_burst import IGNORE_INDEX, Layout, Scores, SequenceParallel, init_sequence_parallel
from bmt_burst.ranks.rings import make_rings
from models.blocks import CHECKPOINTING, Saving
from models.cpm_bee import BeeConfig, CPMBee
from models.cpm_live.config import PRESETS
from train.engine import Engine
from train.engine.bmtrain import BMTrainEngine
from train.engine.torch import TorchEngine
from train.loop.measure import peak_tflops, step_flops

_EXTENDED = 16  # tokens with sub-ids that can be predicted


class Row:
    """A whole row of CPM-Bee's data, on the CPU: its scores, its layout, and what is predicted."""

    def __init__(self, config: BeeConfig, seq_len: int, sp: SequenceParallel):
        self.config, self.sp = config, sp
        self.scores: Scores = live_rows.bee(seq_len, config)
        self.layout = Layout.balanced(self.scores.mask, sp.size)
        fields = live_rows.bee_fields(seq_len)
        self.predicted = ~fields["context"]
        self.predicted[fields["length"] :] = False
        self.targets = int(self.predicted.sum())

    def arguments(self, step: int, device: torch.device) -> tuple[Any, ...]:
        """Make the arguments of this rank's model, with a step's tokens and labels."""
        generator = torch.Generator().manual_seed(step)
        shape, vocabulary = self.predicted.shape, self.config.vocab_size
        tokens, labels = (torch.randint(vocabulary, shape, generator=generator) for _ in range(2))
        labels = labels.where(self.predicted, IGNORE_INDEX)
        words, sub_ids, labels = (
            self._part(x, device) for x in (tokens, torch.zeros_like(tokens), labels)
        )
        extended = torch.arange(_EXTENDED, device=device)
        return words, sub_ids, extended, extended, self.scores, labels, self.layout

    def _part(self, x: Tensor, device: torch.device) -> Tensor:
        """Return this rank's part of a row, as a batch of one."""
        return self.layout.shard(x, self.sp.rank, 0).unsqueeze(0).to(device)


def train(
    config: BeeConfig, row: Row, args: argparse.Namespace, checkpointing: str, machine: Machine
) -> dict:
    """Run some steps. Return medians of their times, their losses, and the peak of memory."""
    build = partial(CPMBee, config, row.sp, Saving(checkpointing), flash=args.kernel)
    engine = _engine(args.engine, build, machine)
    seconds, losses, norms = [], [], []
    for step in range(args.steps):
        arguments = row.arguments(step, machine.device)
        machine.settle()
        began = time.perf_counter()
        loss, _ = engine.model(*arguments)
        engine.backward(loss / row.targets)
        norms.append(engine.step(1e-4, 1.0))
        losses.append(engine.sum([float(loss.detach())])[0] / row.targets)
        seconds.append(machine.slowest(time.perf_counter() - began))
    step_s = statistics.median(seconds[args.warm_up :])
    mask = row.scores.mask
    flops = step_flops(config, mask.seq_len, mask.area * config.num_attentions)
    found = {"step_s": step_s, "tokens_per_s_per_gpu": mask.seq_len / step_s / machine.size}
    found["tflops_per_rank"] = flops / machine.size / step_s / 1e12
    found |= {"losses": losses, "grad_norms": norms}
    if peak := peak_tflops(machine.device, machine.dtype):
        found["mfu"] = found["tflops_per_rank"] / peak
    if machine.cuda:
        # torch does not count them
        held = make_rings(row.sp.process_group, row.sp.double_group).inner.held_bytes
        found["peak_gib"] = machine.slowest((torch.cuda.max_memory_allocated() + held) / GIB)
    return found


def _engine(name: str, build: Callable[[], nn.Module], machine: Machine) -> Engine:
    if name == "bmtrain":
        return BMTrainEngine(build, dtype=machine.dtype)
    return TorchEngine(build, device=machine.device, dtype=machine.dtype)


def _join_bmtrain() -> None:
    """Start BMTrain's groups. The measurements use those of torch.distributed."""
    # NCCL's way to run several communicators at once
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    import bmtrain

    bmtrain.init_distributed(seed=0)


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure all settings. Yield their rows."""
    if args.engine == "bmtrain":
        _join_bmtrain()
    sp = init_sequence_parallel()
    for name, seq_len in itertools.product(args.models, args.seq_len):
        config = PRESETS[name]
        config = dataclasses.replace(config, num_layers=args.layers or config.num_layers)
        row = Row(config, seq_len, sp)
        for checkpointing in args.checkpointing:
            facts = {
                "kind": "train",
                "model": name,
                "layers": config.num_layers,
                "engine": args.engine,
                "gpus": machine.size,
                "sp": sp.size,
                "seq_len": seq_len,
                "batch_size": 1,
                "dtype": str(machine.dtype).removeprefix("torch."),
                "checkpointing": checkpointing,
                "mask": "packed instances",
                "visible_pairs": row.scores.mask.area,
                "targets": row.targets,
                "parameters": config.num_parameters,
                "measured_steps": args.steps - args.warm_up,
            }
            machine.at = f"{name}, {config.num_layers} layers, {seq_len:,} tokens, {checkpointing}"
            machine.report("training")
            yield facts | _outcome(config, row, args, checkpointing, machine)


def _outcome(
    config: BeeConfig, row: Row, args: argparse.Namespace, checkpointing: str, machine: Machine
) -> dict:
    """Measure one setting. Return the results or the error, and free the memory."""
    if machine.cuda:
        torch.cuda.reset_peak_memory_stats()
    found: dict = {}
    failure = machine.attempt(
        lambda: found.update(train(config, row, args, checkpointing, machine))
    )
    gc.collect()
    if machine.cuda:
        torch.cuda.empty_cache()
    return {"error": failure} if failure else found


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = make_parser(__doc__)
    bees = [name for name, config in PRESETS.items() if isinstance(config, BeeConfig)]
    models = ["cpm-bee-3b"] if cuda else ["cpm-bee-tiny"]
    parser.add_argument("--models", nargs="+", choices=bees, default=models, metavar="NAME")
    parser.add_argument("--layers", type=int, help="fewer layers than the preset has")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[65536 if cuda else 256])
    parser.add_argument("--checkpointing", nargs="+", choices=CHECKPOINTING, default=["selective"])
    parser.add_argument("--engine", choices=("torch", "bmtrain"), default="torch")
    add_kernel(parser)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--warm-up", type=at_least(0), default=2, help="steps before those that are measured"
    )
    args = parser.parse_args()
    if args.warm_up >= args.steps:
        parser.error(f"--warm-up must be less than --steps, {args.steps}, got {args.warm_up}")
    if args.engine == "bmtrain" and not cuda:
        parser.error("--engine bmtrain needs GPUs")
    machine = Machine()
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
