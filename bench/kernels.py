"""Measures block kernels alone on one GPU, in turns, with one call of a whole sequence each.

    torchrun --nproc-per-node 1 bench/kernels.py --head-dim 80 \\
        --output bench/results/kernels-mine.jsonl

Rows and times are those of bench/attention.py's "kernel alone", with their own "kind". The others
are compared with the first of --kernels. If a kernel refuses a case, its row has the reason.

    torchrun --nproc-per-node 1 bench/kernels.py --kernels fa4 --heads 32:32 --head-dim 192 \\
        --value-dim 128 --output bench/results/value-heads-mine.jsonl

compares values with a smaller head size with values that are padded with zeros. Kernels may pad
them as well: fa4 does for head sizes that are not in fa4._VALUE_SIZES_HOPPER.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import options
from bench.attention import Contestant, describe, facts_of, measure
from bench.implementations import Attention, Case, kernel_alone
from bench.machine import Machine
from bmt_burst import kernels


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure all cases. Yield their rows."""
    for case in options.cases(args, 1):
        machine.at = describe(case, 1)
        contestants = [one for kernel in args.kernels for one in make(args, case, kernel, machine)]
        yield from measure(contestants, case.seq_len, machine)
        gc.collect()


def make(
    args: argparse.Namespace, case: Case, kernel: str, machine: Machine
) -> Iterator[Contestant]:
    """Make a kernel alone, or with values that are padded and that are not."""
    case = dataclasses.replace(case, kernel=kernel, value_dim=args.value_dim)
    attention, facts = kernel_alone(case), {"gpus": 1, **facts_of(case, machine, kernel)}
    if args.value_dim is None:
        yield Contestant({"kind": "kernels", "impl": "kernel alone", **facts}, case, attention)
        return
    for padded, function in ((False, attention), (True, partial(_pad_values, attention))):
        row = {"kind": "value heads", "impl": "kernel alone", "padded": padded, **facts}
        yield Contestant(row, case, function)


def _pad_values(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to values that are padded with zeros to the head size of q."""
    size = v.shape[-1]
    return attention(q, k, pad(v, (0, q.shape[-1] - size)))[..., :size]


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = options.make_parser(__doc__)
    options.add_cases(parser, [(32, 32), (32, 8)], [16384])
    default_kernels = ["fa4", "cudnn", "aten", "triton"] if cuda else ["cpu", "reference"]
    parser.add_argument(
        "--kernels", nargs="+", choices=kernels.names(), default=default_kernels, metavar="NAME"
    )
    parser.add_argument(
        "--value-dim", type=int, help="a smaller head size of v, as it is and padded with zeros"
    )
    args, machine = parser.parse_args(), Machine()
    if machine.size != 1:
        parser.error(f"one process measures kernels alone, not {machine.size}")
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
