"""Measures host time: how long Python takes to enqueue calls of burst_attn_func on the GPU.

    torchrun --nproc-per-node 2 bench/host_time.py --output bench/results/host-time.jsonl
    torchrun --nproc-per-node 1 bench/host_time.py --imagined 8 --output ...

A short call cannot take less time than its host. Each row has the milliseconds of a forward, and of
a forward and backward. They are the slowest rank's medians of nine rounds of ten calls in a row. In
a round nothing waits for the GPU. All ranks begin a round together.

Ranks may share a GPU, because its speed does not matter: set
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1. With --imagined, the peers of one rank are imagined (see
bench/one_rank.py). The kernel alone is FlashAttention-4's own function on a rank's tokens, if it is
installed. On a CPU the times include the computation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import options
from bench.attention import describe, facts_of, inputs, step
from bench.implementations import Attention, Case
from bench.machine import Machine
from bmt_burst import burst_attn_func, kernels, strategies
from bmt_burst.transport.imagined import ImaginedRing

_ROUNDS, _CALLS = 9, 10


def host_ms(work: Callable[[], object], machine: Machine) -> float:
    """Measure the milliseconds until a call of `work` returns. A round of calls precedes."""
    rounds, calls = [], _CALLS if machine.cuda else 1
    for _ in range(1 + _ROUNDS):
        machine.settle()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        rounds.append((time.perf_counter() - began) * 1e3 / calls)
    machine.settle()
    return machine.slowest(statistics.median(rounds[1:]))


def attentions(args: argparse.Namespace, case: Case, size: int) -> Iterator[tuple[dict, Attention]]:
    """Yield what is measured, with the facts that tell it apart."""
    peers = {"process_group": ImaginedRing(size // 2, size)} if args.imagined else {}
    for strategy in args.strategies:
        facts = {"impl": f"bmt_burst {strategy}", "strategy": strategy}
        chosen = {"mask": case.visible, "layout": "zigzag", "strategy": strategy}
        yield facts, partial(burst_attn_func, **chosen, **peers)
    if kernels.installed("flash_attn.cute") and torch.cuda.is_available():
        from flash_attn.cute import flash_attn_func

        def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attn_func(q, k, v, causal=True)[0]

        yield {"impl": "kernel alone", "strategy": None, "kernel": "fa4"}, alone


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure all cases. Yield their rows."""
    size = args.imagined or machine.size
    shared = machine.cuda and machine.size > machine.hosts * torch.cuda.device_count()
    place = {"gpus": size, "peers": "imagined" if args.imagined else "real", "shared_gpu": shared}
    for case in options.cases(args, size):
        tokens = case.seq_len // size
        tensors, dout = inputs(case, tokens, machine)
        for facts, attention in attentions(args, case, size):
            machine.at = f"{facts['impl']}, {describe(case, size)}"
            row = {
                "kind": "host time",
                "tokens": tokens,
                **place,
                **facts_of(case, machine),
            } | facts
            both = partial(step, attention, tensors, dout)
            if reason := machine.attempt(both):
                yield row | {"unavailable": reason}
                continue
            forward_ms = host_ms(partial(attention, *tensors), machine)
            yield row | {"forward_ms": forward_ms, "both_ms": host_ms(both, machine)}


def main() -> None:
    parser = options.make_parser(__doc__)
    parser.add_argument("--imagined", type=int, metavar="N", help="be one rank of N imagined ones")
    options.add_cases(parser, [(32, 8)], [2048], ("causal",))
    usual = ["ring", "one-call", "ulysses"]
    parser.add_argument("--strategies", nargs="+", choices=strategies.names(), default=usual)
    args, machine = parser.parse_args(), Machine()
    if args.imagined and machine.size != 1:
        parser.error(f"one process imagines its peers, not {machine.size}")
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
