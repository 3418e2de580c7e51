"""Measures how long a save stops training, in a few steps of train/pretrain.py.

    python bench/saving.py --gpus 1 --model minicpm-1b --data data/corpus/train \\
        --output bench/results/saving.jsonl

The run has a row of JSON. `stop_s` is the time between the printed lines of two steps with a save
between them, less the median time between other steps. So it is seen from outside. The first steps
compile and allocate, and are not counted. `whole_s` is the time until the checkpoint was complete,
as the run reports it. After `-- --no-save-in-background`, training waits for each save.
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
from pathlib import Path

import torch

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.machine import GIB, pretrain, record
from bench.options import make_parser
from models.config import PRESETS

_WARM_UP = 2  # steps that are not counted
_SHOWN = ("model", "dtype", "seq_len", "batch_size")  # options that rows have
_STEP = re.compile(r"step (\d+)/\d+: ")
_SAVED = re.compile(r"step (\d+): saved \S+ in ([\d.]+) s")


def measure(args: argparse.Namespace) -> dict:
    """Run pretrain.py. Return the numbers of its row, or its error."""
    options = {name: getattr(args, name) for name in (*_SHOWN, "data", "steps", "save_every")}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        options |= {"sp_size": args.gpus, "log_every": 1, "output": f"{folder}/run"}
        lines, code = _run(pretrain(args.gpus, options, args.more))
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


def row(args: argparse.Namespace) -> dict:
    """Measure one run. Return its row."""
    facts = {name: getattr(args, name) for name in ("gpus", *_SHOWN)}
    background = "--no-save-in-background" not in args.more
    return {"kind": "saving", "background": background, **facts, **measure(args)}


def parse_args() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = make_parser(__doc__)
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
    parser.add_argument("more", nargs="*", help="further options of pretrain.py, after --")
    args = parser.parse_args()
    if not _WARM_UP < args.save_every < args.steps - 1:
        parser.error(f"--save-every must be more than {_WARM_UP} and less than --steps - 1")
    if "--no-save" in args.more:
        parser.error("expected a run that saves, got --no-save")
    if args.folder and not args.folder.is_dir():
        parser.error(f"--folder: expected a folder, got {args.folder}")
    return args


def main() -> int:
    args = parse_args()
    gpu_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return 0 if record([row(args)], args.output, gpu_name) else 1


if __name__ == "__main__":
    sys.exit(main())
