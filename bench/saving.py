"""Measures for how long a save stops training: a few steps of train/pretrain.py with checkpoints
that are written in the background, and without.

    python bench/saving.py --gpus 1 --model minicpm-1b --data data/corpus/train \\
        --output bench/results/saving.jsonl

Each run has a row of JSON. `stop_s` is the time between the lines of two steps with a save between
them, less the median time between other steps: so it is seen from outside. The first steps compile
and allocate, and are not counted. `whole_s` is how long it took until the checkpoint was whole, as
the run says.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.machine import GIB, append, origin, show
from models.config import PRESETS

ROOT = Path(__file__).resolve().parents[1]
_WARM_UP = 2  # steps that are not counted
_STEP = re.compile(r"step (\d+)/\d+: ")
_SAVED = re.compile(r"step (\d+): saved \S+ in ([\d.]+) s")


def measure(args: argparse.Namespace, background: bool) -> dict:
    """Run pretrain.py. Return the numbers of its row, or its error."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        options = {
            "model": args.model,
            "data": args.data,
            "dtype": args.dtype,
            "seq_len": args.seq_len,
            "batch_size": args.batch_size,
            "sp_size": args.gpus,
            "steps": args.steps,
            "save_every": args.save_every,
            "output": f"{folder}/run",
            "log_every": 1,
        }
        flags = [
            text
            for name, value in options.items()
            for text in ("--" + name.replace("_", "-"), str(value))
        ]
        flags.append("--save-in-background" if background else "--no-save-in-background")
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
        command = [sys.executable, "-m", *launcher, ROOT / "train/pretrain.py", *flags, *args.more]
        lines, code = _run(command)
        last = Path(folder) / "run" / f"step_{args.steps:08d}"
        size = sum(file.stat().st_size for file in last.rglob("*") if file.is_file())
    if code:
        return {"error": "".join(line for _, line in lines)[-6000:]}
    return {"checkpoint_gib": size / GIB, **summarize(lines, args.save_every)}


def _run(command: list) -> tuple[list[tuple[float, str]], int]:
    """Return the lines that a command prints, each with the time of its arrival, and its code."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    assert process.stdout
    lines = [(time.monotonic(), line) for line in process.stdout]
    return lines, process.wait()


def summarize(lines: list[tuple[float, str]], save_every: int) -> dict:
    """Return the median step, the stops of the saves, and how long the saves took."""
    done = {int(match[1]): at for at, line in lines if (match := _STEP.match(line))}
    saved = {int(match[1]): float(match[2]) for _, line in lines if (match := _SAVED.match(line))}
    between = {
        before: done[after] - done[before]
        for before, after in itertools.pairwise(sorted(done))
        if before >= _WARM_UP
    }
    plain = statistics.median(s for step, s in between.items() if step % save_every)
    stops = {step: s - plain for step, s in between.items() if step % save_every == 0}
    return {
        "step_s": plain,
        "stop_s": list(stops.values()),
        "whole_s": [saved[step] for step in stops],
    }


def rows(args: argparse.Namespace) -> Iterator[dict]:
    common = origin(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")
    for background in (True, False):
        row = {
            "kind": "saving",
            "background": background,
            "model": args.model,
            "dtype": args.dtype,
            "gpus": args.gpus,
            "seq_len": args.seq_len,
            "batch_size": args.batch_size,
        }
        yield row | measure(args, background) | common


def parse_args() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 1)
    model = "minicpm-1b" if cuda else "cpm-tiny"
    parser.add_argument("--model", choices=list(PRESETS), default=model)
    parser.add_argument("--dtype", default="bf16" if cuda else "fp32")
    parser.add_argument("--seq-len", type=int, default=4096 if cuda else 256)
    parser.add_argument("--batch-size", type=int, default=16 if cuda else 4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write checkpoints")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of tokens from prepare_data.py"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="file of JSON lines to append to"
    )
    parser.add_argument("more", nargs="*", help="further options of pretrain.py, after --")
    args = parser.parse_args()
    if not _WARM_UP < args.save_every < args.steps - 1:
        parser.error(f"--save-every must be more than {_WARM_UP} and less than --steps - 1")
    return args


def main() -> int:
    args, failed = parse_args(), 0
    for row in rows(args):
        failed += "error" in row
        append(args.output, row)
        show(row)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
