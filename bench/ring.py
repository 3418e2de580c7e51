"""Measures the ring with other stages and passes, turn by turn, and over two hosts.

    torchrun --nproc-per-node 4 bench/ring.py --output bench/results/ring-mine.jsonl
    torchrun --nproc-per-node 4 --no-python bench/two_hosts.sh python3 bench/ring.py \\
        --tokens-per-gpu 8192 --output bench/results/ring-hosts-mine.jsonl

A row is one case: for each variant the milliseconds of a forward and backward on the slowest rank,
the median of the rounds, and their range; the peak of memory; the passes and the hops of each of
their stages. Variants with the same passes and hops are measured once. Gradients must be equal up
to rounding. On two hosts, single rings are compared with double ones, for either side that a
backward sends. With NCCL_HOSTID, ranks of one machine count as hosts of their own, which sockets
connect.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import options
from bench.attention import check_equal, inputs, step
from bench.implementations import Burst, Case, held_bytes
from bench.machine import Machine
from bmt_burst import Layout, SequenceParallel, init_sequence_parallel
from bmt_burst.strategies import GROUP_BYTES, ring
from bmt_burst.strategies.ring.program import Program
from bmt_burst.transport.torch_dist import TorchTransport

_BYTES = GROUP_BYTES if torch.cuda.is_available() else 6144  # as little for small cases
_USUAL = {"strategy": "ring", "group_bytes": _BYTES}
_count_passes = ring.RingPlan._count_passes
_ONE_PASS = {"_count_passes": lambda *_: 1}

Step = Callable[[], tuple[torch.Tensor, ...]]
_Variant = tuple[SequenceParallel, dict[str, Any], dict[str, Any]]


def variants(machine: Machine) -> dict[str, _Variant]:
    """Return the variants by name: ranks, arguments of Burst, and replaced parts of the ring."""
    single = init_sequence_parallel(inner_size=machine.size)
    if machine.hosts > 1:
        double = init_sequence_parallel(inner_size=machine.size // machine.hosts)
        both = ("single", single), ("double", double)
        return {
            f"{name} ring, {side}": (sp, {"backward": side}, {})
            for side, (name, sp) in itertools.product(("kv", "q"), both)
        }
    # replaced parts go with a group_bytes of their own, since calls keep plans by it
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "ring": ({}, {}),
        "one pass, one stage": ({"strategy": "all-gather"}, {}),
        "one pass, stages": ({"group_bytes": _BYTES + 1}, _ONE_PASS),
        "one pass, a block a stage": ({"group_bytes": 1}, _ONE_PASS),
        "passes, one stage": ({"group_bytes": _BYTES + 2}, {"_count_passes": _count_most_passes}),
        "144 MiB": ({"group_bytes": _BYTES * 9 // 20}, {}),
        "over NCCL": ({"transport": partial(TorchTransport, engine_use="never")}, {}),
    }
    return {name: (single, *facts) for name, facts in found.items()}


def _count_most_passes(*args: Any) -> int:
    with mock.patch.object(ring, "_ENOUGH_ROWS", 1):
        return _count_passes(*args)


def shape_of(program: Program) -> str:
    """Return "kv 2 x [1+2]": what is sent, the passes, and the hops of each stage of each round."""
    sent = "q" if program.payload.sends_queries else "kv"
    rounds = ["+".join(str(len(x.hops)) for x in each.stages) or "0" for each in program.rounds]
    return f"{sent} {len(program.passes)} x [{', '.join(rounds)}]"


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure all cases. Yield their rows."""
    chosen = variants(machine)
    for (heads, kv_heads), tokens in itertools.product(args.heads, args.tokens_per_gpu):
        machine.at = f"{heads}:{kv_heads}, {tokens} tokens"
        case = Case(tokens * machine.size, 1, heads, kv_heads, args.head_dim, "causal", "auto")
        facts = {"kind": "ring", "heads": heads, "kv_heads": kv_heads, "tokens": tokens}
        places = {"gpus": machine.size, "hosts": machine.hosts}
        yield facts | places | {"variants": measure(case, chosen, args.rounds, machine)}


def measure(
    case: Case, chosen: dict[str, _Variant], rounds: int, machine: Machine
) -> dict[str, dict]:
    """Measure a case with all variants. Return the facts of each."""
    layout = Layout.zigzag(case.seq_len, machine.size)
    tensors, dout = inputs(case, layout.length(machine.rank), machine, seed=machine.rank)
    found: dict[str, dict] = {}
    steps: dict[str, Step] = {}
    expected = None
    for name, (sp, arguments, replaced) in chosen.items():
        attention = Burst(case, sp, layout, **_USUAL | arguments)
        work = partial(step, attention, tensors, dout)
        gradients, shape = _call_first(work, replaced)
        machine.settle()
        expected = expected or gradients
        check_equal("dq dk dv", gradients, expected, "two variants")
        same = next((x for x in steps if found[x]["shape"] == shape and "NCCL" not in name), None)
        found[name] = {"shape": shape} | ({"as": same} if same else {})
        if not same:
            steps[name] = work
            found[name]["extra_gib"] = machine.extra_gib(work, held_bytes(attention))
    once = {name: machine.once_ms(work) for name, work in steps.items()}
    for name, ms in machine.take_turns(steps, once, rounds).items():
        found[name] |= {"ms": statistics.median(ms), "range_ms": max(ms) - min(ms), "rounds": ms}
    return found


def _call_first(work: Step, replaced: dict[str, Any]) -> tuple[tuple[torch.Tensor, ...], str]:
    """Call `work` for the first time, with parts of the ring replaced. Return its results, and what
    was sent in which passes and stages.
    """
    make, shapes = ring.RingPlan._make_program, list[str]()

    def note(*args: Any) -> Program:
        program = make(*args)
        shapes.append(shape_of(program))
        return program

    with mock.patch.multiple(ring.RingPlan, _make_program=note, **replaced):
        return work(), ", ".join(shapes)


def main() -> None:
    parser, cuda = options.make_parser(__doc__), torch.cuda.is_available()
    parser.add_argument("--heads", type=options.parse_heads, nargs="+", metavar="Q:KV")
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 16)
    parser.add_argument("--tokens-per-gpu", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=6)
    parser.set_defaults(
        heads=[(32, 8), (32, 32)] if cuda else [(4, 2)],
        tokens_per_gpu=[8192, 32768, 65536] if cuda else [16],
    )
    args, machine = parser.parse_args(), Machine()
    if machine.size < 2:
        parser.error("a ring needs several ranks: start it with torchrun")
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
