"""Measures USP with every way to cut the GPUs into rings and groups that share heads.

bench.sh --usp runs it, or:

    torchrun --nproc-per-node 8 bench/usp.py --output bench/results/mine.jsonl

With N GPUs, a ring degree R and a Ulysses degree U = N / R, each U consecutive ranks share heads,
and R ranks form each ring (arXiv 2405.07719). 1 x N is Ulysses alone, N x 1 is a ring alone. Each
has a row of JSON for each case, measured as in bench/attention.py. All take turns in the same
rounds. bench/report.py makes a table of the rows.

All ranks must be on one host, or consecutive ranks at least: nothing else is known about places.

On a machine without GPUs it runs a tiny version over gloo, which tests the script itself.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.attention import Contestant, alone, describe, facts_of, heads, measure
from bench.implementations import Case
from bench.machine import Machine, record
from bmt_burst import SequenceParallel, burst_attn_func, init_sequence_parallel


def degrees(ranks: int) -> list[tuple[int, int]]:
    """List all pairs (ring degree, Ulysses degree) of a number of ranks."""
    return [(ranks // ulysses, ulysses) for ulysses in range(1, ranks + 1) if not ranks % ulysses]


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict[str, Any]]:
    """Measure all cases. Yield their rows."""
    groups = {
        (ring, ulysses): init_sequence_parallel(ulysses_size=ulysses)
        for ring, ulysses in degrees(machine.size)
    }
    for mask, (q, kv), tokens in itertools.product(args.masks, args.heads, args.tokens_per_gpu):
        case = Case(tokens * machine.size, 1, q, kv, args.head_dim, mask, args.kernel)
        machine.at = describe(case, machine.size)
        contestants = list(alone("usp", case, machine.size, machine))
        contestants += [_contestant(case, cut, sp, machine) for cut, sp in groups.items()]
        yield from measure(contestants, tokens, machine)


def _contestant(
    case: Case, cut: tuple[int, int], sp: SequenceParallel, machine: Machine
) -> Contestant:
    ring, ulysses = cut
    row = {
        "kind": "usp",
        "impl": f"usp {ring} x {ulysses}",
        "gpus": machine.size,
        "ring_degree": ring,
        "ulysses_degree": ulysses,
        **facts_of(case, machine),
    }
    options = {**sp.groups, "strategy": "usp", "flash": case.kernel, "mask": case.visible}
    return Contestant(row, case, partial(burst_attn_func, **options))


def parse_args() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lengths = [8192, 32768] if cuda else [64]
    parser.add_argument("--tokens-per-gpu", type=int, nargs="+", default=lengths)
    parser.add_argument(
        "--heads",
        type=heads,
        nargs="+",
        default=[(32, 32), (32, 8)] if cuda else [(4, 2)],
        metavar="Q:KV",
    )
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 16)
    parser.add_argument("--masks", nargs="+", choices=("causal", "full"), default=["causal"])
    parser.add_argument("--kernel", default="auto")
    parser.add_argument(
        "--output", type=Path, required=True, help="file of JSON lines to append to"
    )
    return parser.parse_args()


def main() -> None:
    args, machine = parse_args(), Machine()
    if machine.size < 2:
        sys.exit("bench/usp.py: expected two ranks or more, got one: USP cuts ranks into groups")
    try:
        record(run(args, machine), args.output, machine.name, machine.rank)
    except BaseException:  # noqa: BLE001 - Ctrl-C too
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # streams may wait for ranks that have ended
    dist.destroy_process_group()
    sys.stdout.flush()
    # In torch 2.13 a gloo thread may abort a process that shuts down.
    os._exit(0)


if __name__ == "__main__":
    main()
