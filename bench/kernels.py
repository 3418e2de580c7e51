"""Measures block kernels alone on one GPU, in turns, with one call of a whole sequence each.

    torchrun --nproc-per-node 1 bench/kernels.py --head-dims 128 80 \\
        --output bench/results/kernels-mine.jsonl

Rows and times are those of bench/attention.py's "kernel alone", with their own "kind". The others
are compared with the first of --kernels. If a kernel refuses a case, its row has the reason.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import masks
from bench.attention import Contestant, describe, facts_of, heads, measure
from bench.implementations import Case, kernel_alone
from bench.machine import Machine, record
from bmt_burst import kernels


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure all cases. Yield their rows."""
    settings = itertools.product(masks.chosen(args), args.head_dims, args.heads, args.tokens)
    for mask, head_dim, (q_heads, kv_heads), tokens in settings:
        cases = [
            Case(tokens, 1, q_heads, kv_heads, head_dim, mask, kernel) for kernel in args.kernels
        ]
        machine.at = describe(cases[0], 1)
        yield from measure([_contestant(case, machine) for case in cases], tokens, machine)
        gc.collect()


def _contestant(case: Case, machine: Machine) -> Contestant:
    row = {
        "kind": "kernels",
        "impl": "kernel alone",
        "gpus": 1,
        **facts_of(case, machine, case.kernel),
    }
    return Contestant(row, case, kernel_alone(case))


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384] if cuda else [64])
    default_heads = [(32, 32), (32, 8)] if cuda else [(4, 2)]
    parser.add_argument("--heads", type=heads, nargs="+", default=default_heads, metavar="Q:KV")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128] if cuda else [16])
    masks.add_arguments(parser)
    default_kernels = ["fa4", "cudnn", "aten", "triton"] if cuda else ["cpu", "reference"]
    parser.add_argument(
        "--kernels", nargs="+", choices=kernels.names(), default=default_kernels, metavar="NAME"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="file of JSON lines to append to"
    )
    args, machine = parser.parse_args(), Machine()
    if machine.size != 1:
        parser.error(f"one process measures kernels alone, not {machine.size}")
    record(run(args, machine), args.output, machine.name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
