"""Measures pretraining as its users run it: a few steps of train/pretrain.py for each setting.

    python bench/training.py --gpus 8 --model minicpm4-8b --seq-len 262144 \\
        --checkpointing selective full --data data/corpus/train \\
        --output bench/results/training.jsonl

Each setting has a row of JSON, with the mask and medians over the steps after --warm-up: tokens a
second and GPU, MFU (train/loop/measure.py has its formula), seconds of a step and of its parts,
peak memory, and the balance of the ranks' work. All GPUs share each sequence, unless --sp-size is
given. With --layers the model has fewer layers than its preset, and the row states it. On a machine
without GPUs ranks are CPU processes.

Sparse and dense attention, where each sequence is one document:

    python bench/training.py --gpus 2 --model minicpm4-8b --layers 6 --seq-len 262144 524288 \\
        --sparse null '{}' --data data/corpus/train --output bench/results/training.jsonl \\
        -- --documents ignore
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.machine import pretrain, record
from bench.options import at_least, check_layers, first_layers, make_parser, parse_sparse
from models.config import PRESETS


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """Measure all settings. Yield their rows."""
    model = PRESETS[args.model]
    model = first_layers(model, args.layers)
    sp_size = args.sp_size or args.gpus
    batch_size = args.batch_size or args.gpus // sp_size
    for seq_len, checkpointing, sparse in itertools.product(
        args.seq_len, args.checkpointing, args.sparse
    ):
        options = {
            "engine": args.engine,
            "dtype": args.dtype,
            "seq_len": seq_len,
            "batch_size": batch_size,
            "checkpointing": checkpointing,
            **{name: getattr(args, name) for name in _OPTIONAL},
        }
        changed = model if sparse is None else dataclasses.replace(model, sparse=sparse)
        facts = {
            "kind": "train",
            "model": args.model,
            "layers": model.num_layers,
            "gpus": args.gpus,
            "sp": sp_size,
            **options,
            "offload": args.offload,
            "sparse": changed.sparse and changed.sparse.to_dict(),
            "more": args.more,
        }
        with tempfile.TemporaryDirectory() as folder:
            shape = Path(folder) / "model.json"
            shape.write_text(json.dumps(changed.to_dict()))
            options |= {"model": shape, "data": args.data, "sp_size": sp_size, "steps": args.steps}
            options |= {"micro_batch_size": 1, "lr": 1e-4, "timeout": args.timeout}
            options |= {"output": f"{folder}/run"}
            yield facts | measure(args, options, Path(folder) / "run/metrics.jsonl")


def measure(args: argparse.Namespace, options: dict, metrics: Path) -> dict:
    """Run pretrain.py. Return medians of its metrics, or its error."""
    more = ["--no-save", *(["--offload"] if args.offload else []), *args.more]
    command = pretrain(args.gpus, options, more)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stdout + done.stderr)[-6000:]}
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [r for r in records if "loss" in r]
    measured = steps[args.warm_up :]
    if not measured:
        skipped = f"{len(records) - len(steps)} of {len(records)} steps were skipped"
        return {"error": f"{skipped}: {done.stdout[-2000:]}"}
    medians: dict = {
        name: statistics.median(r[name] for r in measured)
        for name in (*_MEASURED, *_PHASES)
        if name in measured[0]
    }
    medians["tokens_per_s_per_gpu"] = medians.pop("tokens_per_s") / args.gpus
    return {
        **medians,
        "measured_steps": len(measured),
        "mask": "documents" if "documents" in medians else "causal",
        "engine": "bmtrain" if "BMTrainEngine" in done.stdout else "torch",
        "losses": [r["loss"] for r in steps],
        "grad_norms": [r["grad_norm"] for r in steps],
    }


_OPTIONAL = ("checkpointing_blocks", "checkpointing_every", "mlp_tile")
_MEASURED = ("tokens_per_s", "tflops_per_rank", "mfu", "peak_gib", "step_s", "balance", "documents")
_PHASES = ("data_s", "forward_s", "backward_s", "optimizer_s")


def parse_args() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = make_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument(
        "--model", choices=list(PRESETS), default="minicpm4-8b" if cuda else "cpm-tiny"
    )
    parser.add_argument("--layers", type=int, help="fewer layers than the preset has")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[262144 if cuda else 256])
    parser.add_argument("--sp-size", type=int, help="ranks that share a sequence; by default all")
    parser.add_argument(
        "--batch-size", type=int, help="sequences a step; by default one for each group of ranks"
    )
    parser.add_argument("--checkpointing", nargs="+", default=["selective", "full"])
    for name in _OPTIONAL:
        parser.add_argument("--" + name.replace("_", "-"), type=int, help="as of pretrain.py")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--engine", choices=("auto", "torch", "bmtrain"), default="auto")
    parser.add_argument("--dtype", default="bf16" if cuda else "fp32")
    parser.add_argument(
        "--sparse",
        type=parse_sparse,
        nargs="+",
        default=[None],
        metavar="JSON",
        help="sparse attention as of pretrain.py, each in turn; null: as the model has it",
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--warm-up", type=at_least(0), default=2, help="steps before those that are measured"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds without a step that end a run"
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of tokens from prepare_data.py"
    )
    parser.add_argument("more", nargs="*", help="further options of pretrain.py, after --")
    args = parser.parse_args()
    check_layers(parser, args)
    if args.warm_up >= args.steps:
        parser.error(f"--warm-up must be less than --steps, {args.steps}, got {args.warm_up}")
    if args.gpus % (args.sp_size or args.gpus):
        parser.error(f"--sp-size must divide --gpus, {args.gpus}, got {args.sp_size}")
    return args


def main() -> int:
    args = parse_args()
    gpu_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return 0 if record(rows(args), args.output, gpu_name) else 1


if __name__ == "__main__":
    sys.exit(main())
