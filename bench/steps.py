r"""Measures whole training steps of several runs in one group of processes, to compare checkouts.

    torchrun --nproc-per-node 2 bench/steps.py --commit NAME --engine torch --output steps.jsonl \
        'dense=--model minicpm4-8b --seq-len 32768 --sp-size 2 --data data/corpus/train --steps 7' \
        'sparse=--model minicpm4-8b --seq-len 32768 --sp-size 2 --sparse {} ...'

Each run has a name and options of train/pretrain.py, whose --engine and --output this script sets.
`--tree` is the checkout whose code runs, from commit 7ebe4564 on. Processes, groups and compiled
kernels are shared, so that a run takes seconds. Rank 0 writes a row of JSON for each: medians over
the steps after --warm-up, the seconds of the first step, and all losses, gradient norms and
balances. Nothing is saved. bench/mixed.py writes documents of mixed lengths for --data.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
_MEDIANS = ("step_s", "tokens_per_s", "mfu", "peak_gib", "documents")
_PHASES = ("data_s", "forward_s", "backward_s", "optimizer_s")


def run(name: str, options: list[str], args: argparse.Namespace, device: Any) -> dict[str, Any]:
    """Train. Return the row without its origin, on rank 0."""
    from train.loop.stages import parse_run
    from train.loop.trainer import Trainer
    from train.planning.dry_run import fit_memory
    from train.planning.warming import warm
    from train.run.watchdog import Watchdog

    folder = f"{args.folder}/{name}"
    fixed = ["--engine", args.engine, "--no-save", "--log-every", "1000", "--output", folder]
    config, _ = parse_run([*options, *fixed])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    watchdog = Watchdog(dist.get_rank(), 900.0)
    trainer = Trainer(config, device, args.stop, watchdog, fit_memory, warm)
    trainer.run()
    model = trainer.start.model
    built: Any = trainer.engine.model
    facts = {
        "kind": "steps",
        "case": name,
        "model": config.model_source,
        "layers": model.num_layers,
        "mixers": getattr(model, "mixers", None),
        "engine": args.engine,
        "gpus": dist.get_world_size(),
        "sp": config.sp_size,
        **{key: getattr(config, key) for key in ("seq_len", "batch_size", "micro_batch_size")},
        **{key: getattr(config, key) for key in ("dtype", "checkpointing", "offload")},
        **{key: getattr(config, key) for key in ("fp8", "chunk", "mlp_tile")},
        "checkpointing_blocks": built.saving.blocks,  # as many as memory asked for
        "sparse": model.sparse and model.sparse.to_dict(),
    }
    return facts | summarize(Path(folder) / "metrics.jsonl", args.warm_up)


def summarize(metrics: Path, warm_up: int) -> dict[str, Any]:
    """Return the medians of a run's records, on the rank that wrote them."""
    if dist.get_rank():
        return {}
    steps = [r for r in map(json.loads, metrics.read_text().splitlines()) if "loss" in r]
    measured = steps[min(warm_up, len(steps) - 1) :]
    medians = {
        key: statistics.median(r[key] for r in measured)
        for key in (*_MEDIANS, *_PHASES)
        if key in measured[0]
    }
    return {
        **medians,
        "tokens_per_s_per_gpu": medians["tokens_per_s"] / dist.get_world_size(),
        "warm_up": len(steps) - len(measured),
        "mask": "documents" if "documents" in medians else "causal",
        "first_step_s": steps[0]["step_s"],
        "steps_s": [r["step_s"] for r in steps],
        "balances": [r["balance"] for r in steps if "balance" in r],
        "losses": [r["loss"] for r in steps],
        "grad_norms": [r["grad_norm"] for r in steps],
    }


def _read_run(text: str) -> tuple[str, list[str]]:
    """Return the name and the options of a run."""
    name, equals, options = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=OPTIONS, got {text!r}")
    try:
        return name, shlex.split(options)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}") from error


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose code runs")
    parser.add_argument("--commit", required=True, help="its commit, for the rows")
    parser.add_argument("--engine", choices=("torch", "bmtrain"), required=True)
    parser.add_argument(
        "--warm-up", type=int, default=3, help="steps before those measured, at most all but one"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("runs", nargs="+", type=_read_run, metavar="NAME=OPTIONS")
    args = parser.parse_args()
    if args.warm_up < 0:
        parser.error(f"argument --warm-up: expected 0 or more steps, got {args.warm_up}")
    if not (args.tree / "train/loop/stages.py").is_file():
        parser.error(f"argument --tree: expected a checkout of 7ebe4564 or later, got {args.tree}")
    if args.output.is_dir() or not args.output.parent.is_dir():
        parser.error(f"argument --output: expected a file in a folder, got {args.output}")
    if "RANK" not in os.environ:
        parser.error("expected ranks of torchrun, got a process without RANK")
    return args


def _fail(reason: str) -> NoReturn:
    print(f"steps.py: {reason}", file=sys.stderr, flush=True)
    os._exit(2)


def main() -> None:
    args = parse_args()
    sys.path[0] = str(args.tree.resolve())
    from bench.machine import origin
    from train.base.ranks import RankError
    from train.base.signals import StopSignal
    from train.loop.stages import parse_run
    from train.run.distributed import init_distributed

    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    args.stop = StopSignal(lambda signum: None, lambda: os._exit(1))
    args.folder = tempfile.mkdtemp() if os.environ["RANK"] == "0" else ""
    first, _ = parse_run([*args.runs[0][1], "--engine", args.engine])
    try:
        device = init_distributed(first)
    except (RankError, ValueError) as error:
        _fail(str(error))
    folders: list[Any] = [args.folder]
    dist.broadcast_object_list(folders)
    [args.folder] = folders
    for name, options in args.runs:
        try:
            row = run(name, options, args, device)
        except RankError as error:  # all ranks have it
            _fail(f"{name}: {error}")
        gc.collect()
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            name_of_gpu = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
            row |= origin(name_of_gpu) | {"commit": args.commit}
            with args.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shown = (*_MEDIANS, *_PHASES, "first_step_s", "steps_s")
            print(name, {key: row[key] for key in shown if key in row}, flush=True)
    os._exit(0)  # at once: BMTrain leaves communicators behind


if __name__ == "__main__":
    main()
