"""Measures attention of two checkouts in one process: the proof of value of a change.

    git worktree add /tmp/before HEAD~1
    torchrun --nproc-per-node 2 bench/compare.py --before /tmp/before --output mine.jsonl

This checkout is "after". Both sides get the same tensors, and take turns in rounds: so clocks, the
GPU's temperature and other work of the machine are the same for both. The outputs and gradients of
both must be equal up to rounding. A case has a row of JSON, with the milliseconds of a forward and
backward on the slowest rank in each round, and their medians. Noise is the range of a side's rounds
over their median. Differences below it mean nothing.

On a machine without GPUs it runs a tiny version over gloo, which tests the script itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import bmt_burst
from bench import masks, options
from bench.attention import check_equal, describe, inputs
from bench.implementations import Case
from bench.machine import Machine
from bmt_burst import strategies

_LIBRARY = "bmt_burst/__init__.py"
_ROUNDS = 6  # an even number: each side is the first one equally often

Step = Callable[[], list[torch.Tensor]]


def load_library(folder: Path) -> ModuleType:
    """Import the bmt_burst of another checkout, under a name of its own."""
    path, name = folder / _LIBRARY, "bmt_burst_before"
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[str(path.parent)]
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict[str, Any]]:
    """Measure all cases. Yield their rows."""
    libraries = {"before": load_library(args.before), "after": bmt_burst}
    ranks = list(range(machine.size))
    groups = {side: dist.new_group(ranks) for side in libraries}  # a transport for each side
    for case in options.cases(args, machine.size):
        machine.at = describe(case, machine.size)
        steps = {
            side: _make_step(library, groups[side], case, args.strategy, machine)
            for side, library in libraries.items()
        }
        results = steps["after"](), steps["before"]()
        check_equal("out dq dk dv", *results, "the two checkouts")
        yield {"kind": "compare", "case": machine.at, **_measure(steps, machine)}


def _make_step(
    library: ModuleType, group: dist.ProcessGroup, case: Case, strategy: str, machine: Machine
) -> Step:
    """Return a forward and backward, which returns out, dq, dk and dv."""
    # objects of one checkout mean nothing to another one
    slices = masks.mask_of(case.mask, case.seq_len).slices
    mask = library.Mask(case.seq_len, tuple(library.Slice(*s) for s in slices))
    causal = masks.kind(case.mask) == "causal"
    layout = (
        library.Layout.zigzag(case.seq_len, machine.size)
        if causal
        else library.Layout.balanced(mask, machine.size)
    )
    tensors, dout = inputs(case, layout.length(machine.rank), machine, seed=machine.rank)
    named = {"mask": mask, "layout": layout, "strategy": strategy, "process_group": group}

    def step() -> list[torch.Tensor]:
        out = library.burst_attn_func(*tensors, **named)
        return [out.detach(), *torch.autograd.grad(out, tensors, dout)]

    return step


def _measure(steps: dict[str, Step], machine: Machine) -> dict[str, Any]:
    """Let both sides take turns, and return the fields of a row."""
    once = max(map(machine.once_ms, steps.values()))
    rounds = machine.take_turns(steps, dict.fromkeys(steps, once), _ROUNDS)
    medians = {side: statistics.median(found) for side, found in rounds.items()}
    return {
        "ms": medians,
        "change": medians["after"] / medians["before"] - 1,
        "noise": {side: (max(x) - min(x)) / medians[side] for side, x in rounds.items()},
        "rounds": rounds,
    }


def main() -> None:
    parser = options.make_parser(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="another checkout")
    parser.add_argument("--strategy", choices=("auto", *strategies.names()), default="auto")
    pairs, tokens = [(32, 32), (32, 8)], [8192, 16384, 32768]
    options.add_cases(parser, pairs, tokens, [k for k in masks.KINDS if k != "bee"])
    args = parser.parse_args()
    if not (args.before / _LIBRARY).is_file():
        parser.error(f"--before: expected a checkout with {args.before / _LIBRARY}")
    machine = Machine()
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
