"""Measures one rank of a ring with imagined peers, on one GPU. Nothing is sent.

    torchrun --nproc-per-node 1 bench/one_rank.py --size 8 --tokens-per-gpu 8192 \\
        --output bench/results/one-rank.jsonl

This leaves the block kernels, the kernels that merge and sum, and the host: the best that the ring
can reach with any links. Each of a few ranks has a row, as in bench/attention.py, with its own
"kind". It also has a profile of a forward and backward by kind of work (see bench/timeline.py).

Imagined peers repeat what this rank says. Therefore all ranks must have equally many tokens, as
they have if the lengths divide.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import masks
from bench.attention import (
    Contestant,
    alone,
    describe,
    facts_of,
    facts_of_bias,
    heads,
    inputs,
    measure,
    step,
)
from bench.implementations import IMPLEMENTATIONS, Case
from bench.machine import Machine, record
from bench.timeline import milliseconds, profiled
from bmt_burst import SequenceParallel
from bmt_burst.transport.simulator import ImaginedRing

VARIANTS = (
    *("bmt_burst", "bmt_burst without a bias", "bmt_burst q", "bmt_burst kv"),
    *("bmt_burst low memory", "bmt_burst contiguous", "ring", "one-call", "ulysses"),
)


def contestant(name: str, case: Case, rank: int, size: int, machine: Machine) -> Contestant:
    """Make variant `name` on one rank with imagined peers, which have sent random numbers."""
    ring = ImaginedRing(rank, size)
    attention = IMPLEMENTATIONS[name].on(case, SequenceParallel(rank, size, process_group=ring))
    step(attention, *inputs(case, case.seq_len // size, machine))
    for slots in ring.slots.values():
        for slot in slots:  # zeros would take less power, and so less time
            slot.view(machine.dtype).normal_()
    row = {"kind": "one rank", "impl": name, "gpus": size, "rank": rank}
    row |= facts_of(case, machine) | facts_of_bias(case, attention, machine)
    return Contestant(row, case, attention)


def one_rank(
    names: list[str], case: Case, rank: int, size: int, machine: Machine
) -> Iterator[dict]:
    """Measure variants of one rank in turns. Yield their rows: times, rates, memory, profile."""
    tokens = case.seq_len // size
    made = {name: contestant(name, case, rank, size, machine) for name in names}
    for row in measure(list(made.values()), tokens, machine):
        if machine.cuda and "unavailable" not in row:
            attention = made[row["impl"]].attention
            work = partial(step, attention, *inputs(case, tokens, machine))
            row["ms"] = milliseconds(profiled(work))
        yield row


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    ranks = sorted(set(args.ranks or (0, args.size // 2, args.size - 1)))
    for mask, (q_heads, kv_heads), tokens in itertools.product(
        masks.chosen(args), args.heads, args.tokens_per_gpu
    ):
        case = Case(
            tokens * args.size, args.batch, q_heads, kv_heads, args.head_dim, mask, args.kernel
        )
        machine.at = describe(case, args.size)
        yield from measure(list(alone("one rank", case, args.size, machine)), tokens, machine)
        variants = [
            name for name in args.variants if masks.kind(mask) in IMPLEMENTATIONS[name].kinds
        ]
        for rank in ranks:
            machine.at = f"rank {rank} of {args.size}, {describe(case, args.size)}"
            yield from one_rank(variants, case, rank, args.size, machine)
            gc.collect()


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", type=int, default=8, help="ranks of the ring, of which there is one"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", help="which of them; by default the first, middle and last"
    )
    parser.add_argument(
        "--tokens-per-gpu", type=int, nargs="+", default=[8192, 16384, 32768] if cuda else [64]
    )
    parser.add_argument("--batch", type=int, default=1)
    default_heads = [(32, 32), (32, 8)] if cuda else [(4, 2)]
    parser.add_argument("--heads", type=heads, nargs="+", default=default_heads, metavar="Q:KV")
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 16)
    masks.add_arguments(parser)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="NAME")
    parser.add_argument(
        "--output", type=Path, required=True, help="file of JSON lines to append to"
    )
    args, machine = parser.parse_args(), Machine()
    record(run(args, machine), args.output, machine.name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
