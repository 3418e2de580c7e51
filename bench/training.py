"""Measures pretraining as its users run it: a few steps of train/pretrain.py for each setting.

    python bench/training.py --gpus 8 --model minicpm4-8b --seq-len 262144 \\
        --checkpointing selective full --data data/corpus/train \\
        --output bench/results/training.jsonl

Each setting has a row of JSON, with the mask and medians over the steps after --warm-up: tokens a
second and GPU, MFU (train/run/flops.py has its formula), seconds of a step and of its parts, peak
memory, and the balance of the ranks' work. All GPUs share each sequence, unless --sp-size says
otherwise. With --layers the model has fewer layers than its preset, as the row says. On a machine
without GPUs ranks are CPU processes.

Sparse attention beside dense, where each sequence is one document:

    python bench/training.py --gpus 2 --model minicpm4-8b --layers 6 --seq-len 262144 524288 \\
        --sparse null '{}' --documents ignore --data data/corpus/train \\
        --output bench/results/training.jsonl
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

from bench.machine import append, origin
from bmt_burst import InfLLMV2
from models.config import PRESETS

ROOT = Path(__file__).resolve().parents[1]


def rows(args: argparse.Namespace) -> Iterator[dict]:
    model = PRESETS[args.model]
    model = dataclasses.replace(model, num_layers=args.layers or model.num_layers)
    sp_size = args.sp_size or args.gpus
    batch_size = args.batch_size or args.gpus // sp_size
    common = origin(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")
    settings = itertools.product(args.seq_len, args.checkpointing, args.sparse)
    for seq_len, checkpointing, sparse in settings:
        if sparse is None:
            changed = model
        else:
            changed = dataclasses.replace(model, sparse=InfLLMV2.from_dict(sparse))
        row = {
            "kind": "train",
            "model": args.model,
            "layers": model.num_layers,
            "engine": args.engine,
            "gpus": args.gpus,
            "sp": sp_size,
            "seq_len": seq_len,
            "batch_size": batch_size,
            "dtype": args.dtype,
            "checkpointing": checkpointing,
            **{name: getattr(args, name) for name in _OPTIONAL},
            "offload": args.offload,
            "sparse": changed.sparse and changed.sparse.to_dict(),
            "more": args.more,
            **common,
        }
        with tempfile.TemporaryDirectory() as folder:
            shape = Path(folder) / "model.json"
            shape.write_text(json.dumps(changed.to_dict()))
            options = {
                "model": shape,
                "data": args.data,
                "engine": args.engine,
                "dtype": args.dtype,
                "seq_len": seq_len,
                "sp_size": sp_size,
                "batch_size": batch_size,
                "micro_batch_size": 1,
                "checkpointing": checkpointing,
                "steps": args.steps,
                "lr": 1e-4,
                "output": f"{folder}/run",
            }
            yield row | measure(args, options, Path(folder) / "run/metrics.jsonl")


def measure(args: argparse.Namespace, options: dict, metrics: Path) -> dict:
    """Run pretrain.py. Return medians of its metrics, or its error."""
    flags = [
        text
        for name, value in options.items()
        for text in ("--" + name.replace("_", "-"), str(value))
    ]
    flags += [
        "--no-save",
        "--timeout",
        str(args.timeout),
        *(["--offload"] if args.offload else []),
        *args.more,
    ]
    flags += ["--documents", args.documents]
    for name in ("window", *_OPTIONAL):
        if (value := getattr(args, name)) is not None:
            flags += ["--" + name.replace("_", "-"), str(value)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
    command = [sys.executable, *launcher, ROOT / "train/pretrain.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stdout + done.stderr)[-6000:]}
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [r for r in records if "loss" in r]
    measured = steps[args.warm_up :]
    if not measured:
        return {
            "error": f"{len(records) - len(steps)} of {len(records)} steps were skipped: "
            + done.stdout[-2000:]
        }
    medians: dict = {
        name: statistics.median(r[name] for r in measured)
        for name in (
            "tokens_per_s",
            "tflops_per_rank",
            "mfu",
            "peak_gib",
            "step_s",
            "balance",
            "documents",
            *_PHASES,
        )
        if name in measured[0]
    }
    medians["measured_steps"] = len(measured)
    mask = "documents" if "documents" in medians else "causal"
    medians["mask"] = f"{mask}, window {args.window}" if args.window else mask
    medians["engine"] = "bmtrain" if "BMTrainEngine" in done.stdout else "torch"
    medians["tokens_per_s_per_gpu"] = medians.pop("tokens_per_s") / args.gpus
    return {
        **medians,
        "losses": [r["loss"] for r in steps],
        "grad_norms": [r["grad_norm"] for r in steps],
    }


_OPTIONAL = ("checkpointing_blocks", "checkpointing_every", "mlp_tile")
_PHASES = ("data_s", "forward_s", "backward_s", "optimizer_s")


def parse_args() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument(
        "--checkpointing-blocks", type=int, help="of the first so many blocks; by default of all"
    )
    parser.add_argument("--checkpointing-every", type=int, help="as of pretrain.py")
    parser.add_argument("--mlp-tile", type=int, help="as of pretrain.py")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--engine", choices=("auto", "torch", "bmtrain"), default="auto")
    parser.add_argument("--dtype", default="bf16" if cuda else "fp32")
    parser.add_argument(
        "--documents", choices=("auto", "mask", "ignore"), default="auto", help="as of pretrain.py"
    )
    parser.add_argument("--window", type=int, help="as of pretrain.py; by default the model's")
    parser.add_argument(
        "--sparse",
        type=json.loads,
        nargs="+",
        default=[None],
        metavar="JSON",
        help="sparse attention as of pretrain.py, each in turn; null: as the model has it",
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--warm-up", type=int, default=2, help="steps before those that are measured"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds without a step that end a run"
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of tokens from prepare_data.py"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="file of JSON lines to append to"
    )
    parser.add_argument("more", nargs="*", help="further options of pretrain.py, after --")
    args = parser.parse_args()
    if not 0 <= args.warm_up < args.steps:
        parser.error(f"--warm-up must be less than --steps, {args.steps}, and not negative")
    return args


def main() -> int:
    args, failed = parse_args(), 0
    for row in rows(args):
        failed += "error" in row
        append(args.output, row)
        names = (
            "model",
            "seq_len",
            "mask",
            "sparse",
            "checkpointing",
            "tokens_per_s_per_gpu",
            "mfu",
            "peak_gib",
            "step_s",
        )
        print(
            " ".join(f"{name}={row[name]}" for name in (*names, "error") if name in row), flush=True
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
