"""Measures attention over sequences that are cut over ranks: ours and that of peers.

bench.sh runs it, or:

    torchrun --nproc-per-node 8 bench/attention.py --tokens-per-gpu 8192 16384 32768 \\
        --output bench/results/mine.jsonl

Each case and implementation has a row of JSON. bench/report.py makes tables and plots of them.

Times are those of the slowest rank, by device events: the mean of consecutive calls, as in
training, where the host runs ahead of the GPU. An equally long warm-up precedes them, because cool
GPUs are faster than warm ones. All implementations take turns in several rounds. The median round
counts. Rows keep all rounds ("rounds"), which show the noise.

FLOPs count only visible pairs of queries and keys (bench/masks.py has the masks). "fwd_bwd" is a
forward and a backward, "bwd" is fwd_bwd minus the forward. Rates are compared with yardsticks: one
GPU that computes a rank's share of the case alone, in one kernel call.

The mask "bee" has a bias (bench/live_rows.py). "bmt_burst without a bias" and the yardsticks
compute the same pairs without it. "dense_bias_gib" is the memory of that bias as a tensor.

On a machine without GPUs it runs a tiny version over gloo, which tests the script itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import masks, options, tables
from bench.implementations import (
    IMPLEMENTATIONS,
    YARDSTICKS,
    Attention,
    Case,
    Implementation,
    Unavailable,
    deliveries,
    held_bytes,
    kernel_alone,
    kernel_name,
    table_of,
)
from bench.machine import GIB, Machine
from bmt_burst import SequenceParallel, Transport, burst_attn_func, init_sequence_parallel
from bmt_burst.scores import is_one_row
from bmt_burst.transport import Arrival, Put
from bmt_burst.transport.imagined import ImaginedRing
from bmt_burst.transport.torch_dist import TorchTransport

_ROUNDS = 3
_MOST_ERROR = 1e-2  # relative L2 between two results in half precision, which each rounds to 3e-3


def describe(case: Case, gpus: int) -> str:
    facts = {"gpus": gpus, **vars(case)}
    return f"{case.seq_len:,} tokens, {tables.describe(tuple(facts[name] for name in tables.CASE))}"


def inputs(case: Case, tokens: int, machine: Machine, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Make q, k, v with gradients, and an output gradient, of `tokens` tokens."""
    options = {"device": machine.device, "dtype": machine.dtype}
    options["generator"] = torch.Generator(machine.device).manual_seed(seed)
    values = case.value_dim or case.head_dim
    shapes = ((case.heads, case.head_dim), (case.kv_heads, case.head_dim))
    shapes += ((case.kv_heads, values), (case.heads, values))
    *tensors, dout = [torch.randn(case.batch, tokens, *shape, **options) for shape in shapes]
    return [x.requires_grad_() for x in tensors], dout


@torch.no_grad()
def forward(attention: Attention, tensors: list[Tensor]) -> None:
    attention(*tensors)


def step(attention: Attention, tensors: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    """Compute a forward and a backward. Return dq, dk and dv."""
    return torch.autograd.grad(attention(*tensors), tensors, dout)


def check_equal(
    names: str, found: Sequence[Tensor], expected: Sequence[Tensor], between: str
) -> None:
    """Check that results are equal up to rounding. Raises RuntimeError with the name of one that is
    not, and `between` which it differs.
    """
    for name, got, other in zip(names.split(), found, expected, strict=True):
        error = float((got.double() - other.double()).norm() / other.double().norm())
        if not error <= _MOST_ERROR:
            raise RuntimeError(f"{name} differs by {error:.2g} between {between}")


def fill_slots(transport: Transport, machine: Machine) -> None:
    """Fill what imagined peers deliver with random numbers, the same in each call and run.

    Zeros would take less power, so less time, and would be equal blocks for sparse attention.
    """
    if isinstance(transport, ImaginedRing):
        generator = torch.Generator(machine.device)
        for slot in itertools.chain.from_iterable(transport.slots.values()):
            slot.view(machine.dtype).normal_(generator=generator.manual_seed(2000 + machine.rank))


@dataclass(frozen=True)
class Contestant:
    """An implementation that computes a case on some GPUs. `row` has its facts."""

    row: dict[str, Any]
    case: Case
    attention: Attention

    def measured(self, times: dict[str, list[float]], extra_gib: float | None) -> dict[str, Any]:
        """Return the row with what was measured."""
        fwd_ms, fwd_bwd_ms = (statistics.median(times[name]) for name in ("fwd_ms", "fwd_bwd_ms"))
        bwd_ms = fwd_bwd_ms - fwd_ms
        work = self.case.flops / self.row["gpus"] / 1e9
        return self.row | {
            "fwd_ms": fwd_ms,
            "bwd_ms": bwd_ms,
            "fwd_bwd_ms": fwd_bwd_ms,
            "fwd_tflops_per_gpu": work / fwd_ms,
            # the noise of tiny runs
            "bwd_tflops_per_gpu": 2.5 * work / bwd_ms if bwd_ms > 0 else None,
            "fwd_bwd_tflops_per_gpu": 3.5 * work / fwd_bwd_ms,
            "peak_extra_gib": extra_gib,
            "rounds": times,
        }


def measure(
    contestants: list[Contestant], tokens: int, machine: Machine, slow_ms: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Measure all contestants in turns, each with `tokens` tokens on a rank. Yield their rows.

    A call that takes more than `slow_ms` milliseconds is measured once, right after its first call.
    """
    tensors, dout = inputs(contestants[0].case, tokens, machine, seed=machine.rank)
    runs = []  # contestant, its works, how long they took once, their times
    for contestant in contestants:
        attention = contestant.attention
        works = {
            "fwd_ms": partial(forward, attention, tensors),
            "fwd_bwd_ms": partial(step, attention, tensors, dout),
        }
        machine.report(f"{contestant.row['impl']}, first calls")
        if failure := machine.attempt(lambda: [work() for work in works.values()]):  # noqa: B023
            yield contestant.row | {"unavailable": failure}
        else:
            once = {name: machine.once_ms(work) for name, work in works.items()}
            times = {name: [ms] if ms > slow_ms else [] for name, ms in once.items()}
            runs.append((contestant, works, once, times))
    for number in range(_ROUNDS):
        machine.report(f"round {number + 1} of {_ROUNDS}")
        for _, works, once, times in runs:
            for name, work in works.items():
                if not once[name] > slow_ms:  # nan: all
                    times[name].append(machine.time_ms(work, once[name]))
    for contestant, works, _, times in runs:
        extra_gib = machine.extra_gib(works["fwd_bwd_ms"], held_bytes(contestant.attention))
        row = contestant.measured(times, extra_gib)
        way = deliveries(contestant.attention) if machine.cuda else None
        yield row | ({"deliveries": way} if way else {})


def facts_of(case: Case, machine: Machine, kernel: str | None = None) -> dict[str, Any]:
    """Return the facts of a case for its row. `kernel` replaces the case's kernel."""
    kernel = kernel or kernel_name(case, machine.device, machine.dtype)
    facts = {name: value for name, value in vars(case).items() if value is not None}
    return {**facts, "kernel": kernel, "visible_pairs": case.visible.area}


def facts_of_bias(case: Case, attention: Attention, machine: Machine) -> dict[str, Any]:
    """Return the facts of an implementation's bias for its row, or nothing without a bias.

    bias_rows       rows of the table
    biased_kernel   the kernel of pairs that each have their own row of the table
    own_row_pairs   the number of these pairs; the case's kernel computes the others in areas
    segment_pairs   the number of these pairs that do not depend on distance alone
    dense_bias_gib  memory of the bias as a tensor of sequence x sequence x heads in 16 bits
    """
    if (table := table_of(attention)) is None:
        return {}
    return {
        "bias_rows": len(table),
        "biased_kernel": kernel_name(case, machine.device, machine.dtype, biased=True),
        "own_row_pairs": sum(
            term.mask.area for term in case.scores.terms if not is_one_row(term.row)
        ),
        "segment_pairs": sum(term.mask.area for term in case.scores.terms if term.row is None),
        "dense_bias_gib": 2 * case.seq_len**2 * case.heads / GIB,
    }


def alone(kind: str, case: Case, gpus: int, machine: Machine) -> Iterator[Contestant]:
    """Yield the yardsticks: one GPU with a rank's share of a case on `gpus`, see bench/masks.py."""
    own = dataclasses.replace(case, seq_len=case.seq_len // gpus, share_of=gpus)
    for name, make in YARDSTICKS.items():
        row = {"kind": kind, "impl": name, "gpus": 1, **facts_of(own, machine)}
        with contextlib.suppress(Unavailable):  # yardsticks are optional
            yield Contestant(row, own, make(own))


def errors(
    case: Case, implementation: Implementation, sp: SequenceParallel, machine: Machine
) -> dict[str, float]:
    """Compute relative L2 errors over the whole sequence, against float64.

    They are those of out, dq, dk, dv and, with a bias, of its table's gradient.
    """
    tensors, dout = inputs(case, case.seq_len, machine)  # the same on every rank
    layout = implementation.layout_of(case, sp.size)
    shards = [layout.shard(x.detach(), sp.rank).requires_grad_() for x in tensors]
    attention = implementation.on(case, sp)
    table = table_of(attention)
    out = attention(*shards)
    wanted = shards if table is None else [*shards, table]
    got = [out.detach(), *torch.autograd.grad(out, wanted, layout.shard(dout, sp.rank))]
    if table is not None:
        got[4] = got[4].cpu()
        dist.all_reduce(got[4])  # each rank has a share of it
        tensors.append(table)
    wrong = torch.zeros(len(got), 2, dtype=torch.float64)
    group = case.heads // case.kv_heads
    for head in range(case.kv_heads):  # in float64 all heads would take too much memory
        mine, shared = slice(head * group, (head + 1) * group), slice(head, head + 1)
        columns = (mine, mine, shared, shared, mine)[: len(got)]
        parts = [_take_heads(x.detach(), c) for x, c in zip(tensors, columns[1:], strict=True)]
        exact = _float64(parts, dout[:, :, mine], case)
        expected = [layout.shard(x, sp.rank) for x in exact[:4]] + exact[4:]
        for i, (x, c, y) in enumerate(zip(got, columns, expected, strict=True)):
            difference = _take_heads(x, c).to(y) - y
            wrong[i] += torch.stack((difference.square().sum(), y.square().sum())).cpu()
    dist.all_reduce(wrong)
    names = ("out", "dq", "dk", "dv", "dtable")[: len(got)]
    return dict(zip(names, (wrong[:, 0] / wrong[:, 1]).sqrt().tolist(), strict=True))


def _take_heads(x: Tensor, heads: slice) -> Tensor:
    """Return heads of a tensor (B, S, H, D) or a table (R, H)."""
    return x[:, heads] if x.ndim == 2 else x[:, :, heads]


def _float64(tensors: list[Tensor], dout: Tensor, case: Case) -> list[Tensor]:
    """Compute out and the gradients of q, k, v and, if there is one, a bias's table in float64."""
    q, k, v, *table = leaves = [x.double().requires_grad_() for x in tensors]
    shown = {"scores": case.scores, "bias": table[0]} if table else {"mask": case.visible}
    options = {**shown, "flash": "reference", **SequenceParallel(layout="contiguous").groups}
    out = burst_attn_func(q, k, v, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]


def links(sp: SequenceParallel, machine: Machine) -> Iterator[dict]:
    """Measure the links alone, in GiB/s received.

    Messages are sent over NCCL and by copy engines, to one neighbour and to all ranks.
    """
    # smaller messages would measure the host
    for size in (64 << 20, 256 << 20) if machine.cuda else (1 << 16,):
        yield from _links(size, sp, machine)
        gc.collect()  # an arena is part of a cycle


def _links(size: int, sp: SequenceParallel, machine: Machine) -> Iterator[dict]:
    """Measure the links with messages of `size` bytes."""
    mine = torch.zeros(size, dtype=torch.uint8, device=machine.device)
    gathered = torch.empty(size * sp.size, dtype=torch.uint8, device=machine.device)
    slots = list(gathered.chunk(sp.size))
    transport = TorchTransport(sp.process_group)
    transport.reserve({"visit": size * sp.size, "return": 0}, machine.device)

    def exchange(distances) -> None:
        sends = [(mine, (sp.rank + d) % sp.size) for d in distances]
        recvs = [(slots[rank], rank) for rank in ((sp.rank - d) % sp.size for d in distances)]
        transport.exchange(sends, recvs).wait()

    def gather() -> None:
        dist.all_gather(slots, mine, group=sp.process_group)

    def deliver(distances) -> None:
        puts = [Put(mine, (sp.rank + d) % sp.size, sp.rank * size) for d in distances]
        arrivals = [
            Arrival(source := (sp.rank - d) % sp.size, source * size, size) for d in distances
        ]
        delivery = transport.deliver("visit", size * sp.size, puts, arrivals, machine.device)
        delivery.wait()
        delivery.release()

    ways = {
        "neighbour": (lambda: exchange([1]), 1),
        "all at once": (lambda: exchange(range(1, sp.size)), sp.size - 1),
        "all-gather": (gather, sp.size - 1),
    }
    if transport.copy_engines:
        ways["copy engines, neighbour"] = (lambda: deliver([1]), 1)
        ways["copy engines, all at once"] = (lambda: deliver(range(1, sp.size)), sp.size - 1)
    for way, (work, messages) in ways.items():
        work()
        ms = machine.time_ms(work, machine.once_ms(work))
        yield {
            "kind": "links",
            "impl": way,
            "message_mib": size / 2**20,
            "ms": ms,
            "gib_per_s": messages * size / GIB / ms * 1e3,
        }


def inner_size(sp: SequenceParallel) -> int:
    """Return the number of a host's ranks in a double ring, or of all ranks in a single one."""
    return sp.size if sp.process_group is not None else sp.double_group[0].size()


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure all cases. Yield their rows."""
    sp = init_sequence_parallel(inner_size=args.inner_size)
    chosen = {name: IMPLEMENTATIONS[name] for name in args.implementations}
    if not args.no_links and sp.process_group is not None and sp.size > 1:
        yield from links(sp, machine)
    everything = list(options.cases(args, machine.size))
    for number, case in enumerate(everything):
        machine.at = f"case {number + 1} of {len(everything)}, {describe(case, machine.size)}"
        made = list(_make(chosen, case, sp, machine))
        yield from (row for row in made if isinstance(row, dict))
        contestants = list(alone("attention", case, machine.size, machine))
        contestants += [one for one in made if isinstance(one, Contestant)]
        yield from measure(contestants, case.seq_len // machine.size, machine, args.slow_ms)
        del contestants, made  # and the memory of their transports
        gc.collect()
    if args.errors:
        yield from _all_errors(args, chosen, sp, machine)


def _make(
    chosen: dict[str, Implementation], case: Case, sp: SequenceParallel, machine: Machine
) -> Iterator[Contestant | dict]:
    """Make the implementations of a case, or the rows of those that cannot compute it."""
    place = {"gpus": machine.size, "hosts": machine.hosts, "inner_size": inner_size(sp)}
    for name, implementation in chosen.items():
        if not implementation.measures(case, machine.size):
            continue
        facts = facts_of(case, machine, implementation.kernel)
        row = {"kind": "attention", "impl": name, **place, **facts}
        try:
            attention = implementation.on(case, sp)
        except Unavailable as reason:
            yield row | {"unavailable": str(reason)}
        else:
            yield Contestant(row | facts_of_bias(case, attention, machine), case, attention)


def _all_errors(
    args: argparse.Namespace,
    chosen: dict[str, Implementation],
    sp: SequenceParallel,
    machine: Machine,
) -> Iterator[dict]:
    """Measure the errors of all implementations, at a length that all of them can cut."""
    length = -(-args.errors // (2 * machine.size)) * 2 * machine.size
    for (heads, kv_heads), mask in itertools.product(args.heads, masks.chosen(args)):
        case = Case(length, 1, heads, kv_heads, args.head_dim, mask, args.kernel)
        machine.at = f"errors, {describe(case, machine.size)}"
        for name, (ranks, implementation) in _error_cases(chosen, sp).items():
            if masks.kind(mask) not in implementation.kinds:
                continue
            facts = facts_of(case, machine, implementation.kernel)
            row = {"kind": "errors", "impl": name, "gpus": ranks.size, **facts}
            machine.report(name)
            if failure := machine.attempt(
                lambda: row.update(errors(case, implementation, ranks, machine))  # noqa: B023
            ):
                row["unavailable"] = failure
            gc.collect()
            yield row


def _error_cases(
    chosen: dict[str, Implementation], sp: SequenceParallel
) -> dict[str, tuple[SequenceParallel, Implementation]]:
    alone = Implementation("contiguous", lambda case, _sp, _layout: kernel_alone(case))
    limit = {"kernel alone": (SequenceParallel(), alone)}
    return limit | {name: (sp, implementation) for name, implementation in chosen.items()}


def parse_args() -> argparse.Namespace:
    parser = options.make_parser(__doc__)
    options.add_kernel(parser)
    options.add_cases(parser, [(32, 32), (32, 8)], [8192, 16384, 32768])
    parser.add_argument(
        "--inner-size", type=int, help="GPUs of a host, for the double ring; by default as they lie"
    )
    names = list(IMPLEMENTATIONS)
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=", ".join(names),
    )
    parser.add_argument(
        "--errors",
        type=options.at_least(0),
        default=8192 if torch.cuda.is_available() else 128,
        help="length for errors against float64; 0: none",
    )
    parser.add_argument(
        "--slow-ms",
        type=float,
        default=math.inf,
        help="measure calls that take longer only once, instead of in several rounds",
    )
    parser.add_argument("--no-links", action="store_true", help="do not measure the links")
    return parser.parse_args()


def main() -> None:
    args, machine = parse_args(), Machine()
    if machine.size % (args.inner_size or 1):
        raise SystemExit(f"--inner-size must divide {machine.size} ranks, got {args.inner_size}")
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
