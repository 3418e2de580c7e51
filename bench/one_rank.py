"""Measures one rank of a ring with imagined peers, on one GPU. Nothing is sent.

    torchrun --nproc-per-node 1 bench/one_rank.py --size 8 --tokens-per-gpu 8192 \\
        --output bench/results/one-rank.jsonl

This leaves the block kernels, the kernels that merge and sum, and the host: the best that the ring
can reach with any links. Each of a few ranks has a row, as in bench/attention.py, with its own
"kind". It also has a profile of a forward and backward by kind of work (see bench/timeline.py).

Imagined peers answer each message with the same one. So all ranks must have equally many tokens,
as they have if the lengths divide.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import options
from bench.attention import (
    Contestant,
    alone,
    describe,
    facts_of,
    facts_of_bias,
    fill_slots,
    inputs,
    measure,
    step,
)
from bench.implementations import IMPLEMENTATIONS, Case, Unavailable
from bench.machine import Machine
from bench.timeline import milliseconds, profiled
from bmt_burst import SequenceParallel
from bmt_burst.transport.imagined import ImaginedRing


def contestant(row: dict[str, Any], case: Case, machine: Machine) -> Contestant:
    """Make the variant and rank of a row with imagined peers, which have sent random numbers."""
    rank, size = row["rank"], row["gpus"]
    ring = ImaginedRing(rank, size)
    sp = SequenceParallel(rank, size, process_group=ring)
    attention = IMPLEMENTATIONS[row["impl"]].on(case, sp)
    step(attention, *inputs(case, case.seq_len // size, machine))
    fill_slots(ring, machine)
    return Contestant(row | facts_of_bias(case, attention, machine), case, attention)


def one_rank(
    names: list[str], case: Case, rank: int, size: int, machine: Machine
) -> Iterator[dict]:
    """Measure variants of one rank in turns. Yield their rows: times, rates, memory, profile."""
    tokens = case.seq_len // size
    made = {}
    for name in names:
        row = {"kind": "one rank", "impl": name, "gpus": size, "rank": rank}
        row |= facts_of(case, machine)
        try:
            made[name] = contestant(row, case, machine)
        except Unavailable as reason:
            yield row | {"unavailable": str(reason)}
    for row in measure(list(made.values()), tokens, machine) if made else ():
        if machine.cuda and "unavailable" not in row:
            attention = made[row["impl"]].attention
            work = partial(step, attention, *inputs(case, tokens, machine))
            row["ms"] = milliseconds(profiled(work))
        yield row


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure all cases. Yield their rows."""
    ranks = sorted(set(args.ranks or (0, args.size // 2, args.size - 1)))
    for case in options.cases(args, args.size):
        machine.at = describe(case, args.size)
        yardsticks = list(alone("one rank", case, args.size, machine))
        yield from measure(yardsticks, case.seq_len // args.size, machine)
        names = [name for name in args.variants if IMPLEMENTATIONS[name].measures(case, args.size)]
        for rank in ranks:
            machine.at = f"rank {rank} of {args.size}, {describe(case, args.size)}"
            yield from one_rank(names, case, rank, args.size, machine)
            gc.collect()


def main() -> None:
    parser = options.make_parser(__doc__)
    parser.add_argument("--size", type=int, default=8, help="ranks of the ring")
    parser.add_argument(
        "--ranks",
        type=options.at_least(0),
        nargs="+",
        help="measured ones; by default the first, middle and last",
    )
    options.add_kernel(parser)
    options.add_cases(parser, [(32, 32), (32, 8)], [8192, 16384, 32768])
    parser.add_argument(
        "--variants", nargs="+", choices=IMPLEMENTATIONS, default=["bmt_burst"], metavar="NAME"
    )
    args = parser.parse_args()
    options.check_ranks(parser, "--ranks", args.ranks or (), args.size)
    machine = Machine()
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
