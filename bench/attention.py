"""Measures attention over sequences that are cut over ranks, ours beside peers.

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
import os
import statistics
import sys
import traceback
from collections.abc import Iterator
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

from bench import masks, tables
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
from bench.machine import GIB, Machine, record
from bmt_burst import Mask, SequenceParallel, init_sequence_parallel
from bmt_burst.scores import is_one_row
from bmt_burst.transport import Arrival, Put
from bmt_burst.transport.torch_dist import TorchTransport

_ROUNDS = 3


def describe(case: Case, gpus: int) -> str:
    facts = {"gpus": gpus, **vars(case)}
    return f"{case.seq_len:,} tokens, {tables.describe(tuple(facts[name] for name in tables.CASE))}"


def inputs(case: Case, tokens: int, machine: Machine, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Make q, k, v with gradients, and an output gradient, of `tokens` tokens."""
    generator = torch.Generator(machine.device).manual_seed(seed)
    shapes = [
        (case.batch, tokens, heads, case.head_dim)
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    ]
    made = [
        torch.randn(s, device=machine.device, dtype=machine.dtype, generator=generator)
        for s in shapes
    ]
    return [x.requires_grad_() for x in made[:3]], made[3]


@torch.no_grad()
def forward(attention: Attention, tensors: list[Tensor]) -> None:
    attention(*tensors)


def step(attention: Attention, tensors: list[Tensor], dout: Tensor) -> None:
    """Compute a forward and a backward."""
    torch.autograd.grad(attention(*tensors), tensors, dout)


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

    Calls that take more than `slow_ms` milliseconds are measured in the first round only.
    """
    tensors, dout = inputs(contestants[0].case, tokens, machine, seed=machine.rank)
    runs = []  # contestant, its works, how long they took once, their times
    for contestant in contestants:
        attention = contestant.attention
        works = {
            "fwd_ms": partial(forward, attention, tensors),
            "fwd_bwd_ms": partial(step, attention, tensors, dout),
        }
        machine.say(f"{contestant.row['impl']}, first calls")
        if failure := machine.attempt(lambda: [work() for work in works.values()]):  # noqa: B023
            yield contestant.row | {"unavailable": failure}
        else:
            once = {name: machine.once_ms(work) for name, work in works.items()}
            runs.append((contestant, works, once, {name: [] for name in works}))
    for number in range(_ROUNDS):
        machine.say(f"round {number + 1} of {_ROUNDS}")
        for _, works, once, times in runs:
            for name, work in works.items():
                if number and once[name] > slow_ms:
                    continue
                times[name].append(machine.time_ms(work, once[name]))
    for contestant, works, _, times in runs:
        extra_gib = machine.extra_gib(works["fwd_bwd_ms"], held_bytes(contestant.attention))
        row = contestant.measured(times, extra_gib)
        way = deliveries(contestant.attention) if machine.cuda else None
        yield row | ({"deliveries": way} if way else {})


def facts_of(case: Case, machine: Machine, kernel: str | None = None) -> dict[str, Any]:
    """Return the facts of a case for its row. `kernel` replaces the case's kernel."""
    kernel = kernel or kernel_name(case, machine.device, machine.dtype)
    return {**vars(case), "kernel": kernel, "visible_pairs": case.visible.area}


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
    wrong = torch.zeros(len(got), 2, dtype=torch.float64)
    group = case.heads // case.kv_heads
    rows = None if table is None else case.scores.dense().to(machine.device)
    for head in range(case.kv_heads):
        mine, shared = slice(head * group, (head + 1) * group), slice(head, head + 1)
        columns = mine, shared, shared
        parts = [x.detach()[:, :, c] for x, c in zip(tensors, columns, strict=True)]
        added = None if table is None else (table.detach()[:, mine], rows)
        exact = _float64(parts, dout[:, :, mine], case.visible, added)
        expected = [layout.shard(x, sp.rank) for x in exact[:4]] + exact[4:]
        ours = [x[..., c, :] for x, c in zip(got, (mine, *columns), strict=False)] + [
            x[:, mine] for x in got[4:]
        ]
        for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
            wrong[i] += torch.stack(((a.to(b) - b).square().sum(), b.square().sum())).cpu()
    dist.all_reduce(wrong)
    names = ("out", "dq", "dk", "dv", "dtable")[: len(got)]
    return dict(zip(names, (wrong[:, 0] / wrong[:, 1]).sqrt().tolist(), strict=True))


def _float64(
    tensors: list[Tensor], dout: Tensor, mask: Mask, added: tuple[Tensor, Tensor] | None = None
) -> list[Tensor]:
    """Compute out, dq, dk, dv of one kv head and its query heads in float64.

    `added` is a bias: its table (R, heads), and the row of each pair (S, S). The gradient of the
    table is the fifth result.
    """
    q, k, v = inputs = [x.double().requires_grad_() for x in tensors]
    if added is not None:
        table, rows = added[0].double().requires_grad_(), added[1]
        inputs = [*inputs, table]
    visible = mask.dense(q.device)
    blind, outs = ~visible.any(1, keepdim=True), []
    for head in range(q.shape[2]):
        scores = torch.einsum("bqd,bkd->bqk", q[:, :, head], k[:, :, 0]) * q.shape[-1] ** -0.5
        if added is not None:
            scores = scores + table[:, head][rows]
        weights = (
            scores.masked_fill(~visible, -torch.inf)
            .masked_fill(blind, 0.0)
            .softmax(-1)
            .masked_fill(blind, 0.0)
        )
        outs.append(torch.einsum("bqk,bkd->bqd", weights, v[:, :, 0]))
    out = torch.stack(outs, 2)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.double())]


def links(sp: SequenceParallel, machine: Machine) -> Iterator[dict]:
    """Measure the links alone, in GiB/s received.

    Messages are sent over NCCL and by copy engines, to one neighbour and to all ranks.
    """
    sizes = (
        (64 << 20, 256 << 20) if machine.cuda else (1 << 16,)
    )  # smaller messages measure the host
    for size in sizes:
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
        ops = []
        for d in distances:
            ops.append(
                dist.P2POp(
                    dist.isend, mine, group=sp.process_group, group_peer=(sp.rank + d) % sp.size
                )
            )
            source = (sp.rank - d) % sp.size
            ops.append(
                dist.P2POp(dist.irecv, slots[source], group=sp.process_group, group_peer=source)
            )
        for work in dist.batch_isend_irecv(ops):
            work.wait()

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


def cases(args: argparse.Namespace, size: int) -> Iterator[Case]:
    for mask, (heads, kv_heads) in itertools.product(masks.chosen(args), args.heads):
        for tokens in args.tokens_per_gpu:
            yield Case(tokens * size, 1, heads, kv_heads, args.head_dim, mask, args.kernel)
        for batch in args.batches:
            yield Case(
                args.tokens_per_gpu[0] * size,
                batch,
                heads,
                kv_heads,
                args.head_dim,
                mask,
                args.kernel,
            )


def inner_size(sp: SequenceParallel) -> int:
    """Return the number of a host's ranks in a double ring, or of all ranks in a single one."""
    return sp.size if sp.process_group is not None else sp.double_group[0].size()


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure all cases. Yield their rows."""
    sp = init_sequence_parallel(inner_size=args.inner_size)
    chosen = {name: IMPLEMENTATIONS[name] for name in args.implementations}
    if not args.no_links and sp.process_group is not None and sp.size > 1:
        yield from links(sp, machine)
    place = {"gpus": machine.size, "hosts": machine.hosts, "inner_size": inner_size(sp)}
    everything = list(cases(args, machine.size))
    for number, case in enumerate(everything):
        machine.at = f"case {number + 1} of {len(everything)}, {describe(case, machine.size)}"
        tokens = case.seq_len // machine.size
        contestants = list(alone("attention", case, machine.size, machine))
        for name, implementation in chosen.items():
            if (
                tokens > (implementation.most_tokens or tokens)
                or masks.kind(case.mask) not in implementation.kinds
            ):
                continue
            row = {
                "kind": "attention",
                "impl": name,
                **place,
                **facts_of(case, machine, implementation.kernel),
            }
            try:
                attention = implementation.on(case, sp)
                contestants.append(
                    Contestant(row | facts_of_bias(case, attention, machine), case, attention)
                )
            except Unavailable as reason:
                yield row | {"unavailable": str(reason)}
        yield from measure(contestants, tokens, machine)
        del contestants
        gc.collect()
    length = (
        -(-args.errors // (2 * machine.size)) * 2 * machine.size
    )  # a length that all implementations can cut
    if length:
        for (heads, kv_heads), mask in itertools.product(args.heads, masks.chosen(args)):
            case = Case(length, 1, heads, kv_heads, args.head_dim, mask, args.kernel)
            machine.at = f"errors, {describe(case, machine.size)}"
            for name, (ranks, implementation) in _error_cases(chosen, sp).items():
                if masks.kind(mask) not in implementation.kinds:
                    continue
                facts = facts_of(case, machine, implementation.kernel)
                row = {"kind": "errors", "impl": name, "gpus": ranks.size, **facts}
                machine.say(name)
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


def heads(text: str) -> tuple[int, int]:
    q, kv = text.split(":")
    return int(q), int(kv)


def parse_args() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lengths = [8192, 16384, 32768] if cuda else [64]
    parser.add_argument("--tokens-per-gpu", type=int, nargs="*", default=lengths)
    parser.add_argument(
        "--batches", type=int, nargs="*", default=[], help="batch sizes at the first length"
    )
    parser.add_argument(
        "--heads",
        type=heads,
        nargs="+",
        default=[(32, 32), (32, 8)] if cuda else [(4, 2)],
        metavar="Q:KV",
    )
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 16)
    masks.add_arguments(parser)
    parser.add_argument("--kernel", default="auto")
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
        type=int,
        default=8192 if cuda else 128,
        help="length for errors against float64; 0: none",
    )
    parser.add_argument("--no-links", action="store_true", help="do not measure the links")
    parser.add_argument(
        "--output", type=Path, required=True, help="file of JSON lines to append to"
    )
    args = parser.parse_args()
    if args.batches and not args.tokens_per_gpu:
        parser.error("--batches needs a length, --tokens-per-gpu")
    return args


def main() -> None:
    args, machine = parse_args(), Machine()
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
