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
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import options
from bench.attention import Contestant, alone, describe, facts_of, measure
from bench.implementations import Case
from bench.machine import Machine
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
    for case in options.cases(args, machine.size):
        machine.at = describe(case, machine.size)
        contestants = list(alone("usp", case, machine.size, machine))
        contestants += [_contestant(case, cut, sp, machine) for cut, sp in groups.items()]
        yield from measure(contestants, case.seq_len // machine.size, machine)


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
    attention = partial(
        burst_attn_func, **sp.groups, strategy="usp", flash=case.kernel, mask=case.visible
    )
    return Contestant(row, case, attention)


def main() -> None:
    parser = options.make_parser(__doc__)
    options.add_kernel(parser)
    options.add_cases(parser, [(32, 32), (32, 8)], [8192, 32768], ("causal", "full"))
    args, machine = parser.parse_args(), Machine()
    if machine.size < 2:
        parser.error("expected two ranks or more, got one: USP cuts ranks into groups")
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
