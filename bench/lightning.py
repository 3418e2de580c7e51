"""Measures lightning attention: its kernel, its layer, its ranks, and its errors.

    python3 bench/lightning.py --output bench/results/lightning-mine.jsonl
    torchrun --nproc-per-node 2 bench/lightning.py --cases ranks errors \\
        --output bench/results/lightning-mine.jsonl

--cases chooses from these cases. All contestants of a case are measured in turns.

    kernel    --tokens tokens on one GPU, and twice as many, as one document
    documents the same tokens as one document and as documents of --document-tokens each
    layer     nn.LightningAttention, and its five projections alone
    one-rank  some ranks of --size imagined ones with --rank-tokens tokens each (see
              bench/one_rank.py), and one rank's tokens alone, which need no exchange
    ranks     a zigzag sequence over all GPUs with --tokens tokens on each, and the tokens of a GPU
              alone, on all GPUs at once. Needs several ranks.
    errors    against float64, for --dtypes, at --error-tokens tokens

"--peers fla" adds chunk_simple_gla of the package fla-core. Its first calls try hundreds of
kernels, which takes minutes. A row's "first_s" has the seconds of first calls.

Each row has the case, the contestant ("impl"), and:

    fwd_ms, fwd_bwd_ms  medians over --rounds rounds of a forward without gradients, and of a
                        forward and backward; "rounds" has all of them
    extra_gib           the largest memory beyond inputs, results and gradients
    against, ratio      the contestant that this one is compared with, and the ratio of fwd_bwd_ms
    memory_ratio        the ratio of extra_gib, for peers
    target              the largest ratio that is wanted, if there is one
    kernels_ms          with --profile, milliseconds of each GPU kernel in a forward and backward

Rows of errors have for out, dq, dk and dv the relative L2 error, and with "_max" the largest error
divided by the largest value. Their "ratios" are those of the L2 errors to the errors of "against".

Without GPUs cases are tiny, which tests the script.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import options
from bench.attention import fill_slots
from bench.implementations import Unavailable
from bench.machine import GIB, Machine
from bench.timeline import STEPS, activities_of, profiled
from bmt_burst import (
    Mask,
    SequenceParallel,
    alibi_slopes,
    init_sequence_parallel,
    lightning_attn_func,
)
from bmt_burst.nn import LightningAttention, rope_tables
from bmt_burst.transport.imagined import ImaginedRing

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
_ALONE = SequenceParallel(layout="contiguous")
_DEFAULTS = (  # of options that are numbers: with GPUs, without, and what they are
    ("--heads", 32, 4, None),
    ("--head-dim", 128, 16, None),
    ("--width", 4096, 64, "of the layer"),
    ("--tokens", 65536, 128, "of a GPU"),
    ("--document-tokens", 1024, 16, None),
    ("--rank-tokens", 131072, 128, "of an imagined rank"),
    ("--error-tokens", 8192, 128, None),
    ("--rounds", 11, 1, None),
)
_NAMES = ("out", "dq", "dk", "dv")


@dataclass
class Contestant:
    """A function of tensors, and what its row has.

    tensors  its inputs, all with gradients
    douts    the gradients of its results
    """

    row: dict[str, Any]
    of: Callable[..., Tensor | tuple[Tensor, ...]]
    tensors: Sequence[Tensor]
    douts: Sequence[Tensor]
    held: Callable[[], int] = lambda: 0
    times: dict[str, list[float]] = field(default_factory=dict)

    def forward(self) -> None:
        with torch.no_grad():
            self.of(*self.tensors)

    def step(self) -> None:
        outs = self.of(*self.tensors)
        torch.autograd.grad([outs] if isinstance(outs, Tensor) else outs, self.tensors, self.douts)

    @property
    def result_gib(self) -> float:
        """The memory of its results and of the gradients of its inputs."""
        return sum(x.nbytes for x in (*self.tensors, *self.douts)) / GIB

    @property
    def works(self) -> dict[str, Callable[[], None]]:
        return {"fwd_ms": self.forward, "fwd_bwd_ms": self.step}


def measure(
    contestants: Sequence[Contestant], machine: Machine, args: argparse.Namespace
) -> Iterator[dict]:
    """Measure contestants in turns. Yield their rows."""
    running, once = list[Contestant](), dict[int, dict[str, float]]()
    for one in contestants:
        machine.report(f"{one.row['impl']}, first calls")
        began = time.monotonic()
        failure = machine.attempt(lambda: [work() for work in one.works.values()])  # noqa: B023
        machine.settle()
        if failure:
            yield one.row | {"unavailable": failure}
            continue
        one.row["first_s"] = time.monotonic() - began
        once[id(one)] = {name: machine.once_ms(work) for name, work in one.works.items()}
        one.times = {name: [] for name in one.works}
        running.append(one)
    for number in range(args.rounds):
        if number % 5 == 0:
            machine.report(f"round {number + 1} of {args.rounds}")
        for one in running:
            for name, work in one.works.items():
                one.times[name].append(machine.time_ms(work, once[id(one)][name]))
    for one in running:
        for name, times in one.times.items():
            one.row[name] = statistics.median(times)
        extra = machine.extra_gib(one.step, one.held())
        one.row["extra_gib"] = None if extra is None else extra - one.result_gib
        if args.profile and machine.cuda:
            one.row["kernels_ms"] = kernel_times(one.step)
    by_name = {one.row["impl"]: one.row for one in running}
    for one in running:
        compare(one.row, by_name.get(one.row.get("against")))
        yield one.row | {"rounds": one.times}


def compare(row: dict[str, Any], base: dict[str, Any] | None) -> None:
    """Add the ratios of a row to `base`."""
    if base is not None:
        row["ratio"] = row["fwd_bwd_ms"] / base["fwd_bwd_ms"]
        if base.get("extra_gib"):
            row["memory_ratio"] = row["extra_gib"] / base["extra_gib"]


def kernel_times(step: Callable[[], None]) -> dict[str, float]:
    """Return the milliseconds of each kernel of a step, the longest first."""
    spent = Counter[str]()
    for activity in activities_of(profiled(step)):
        spent[activity.name[:60]] += (activity.stop - activity.start) / 1e3 / STEPS
    return dict(spent.most_common(20))


def make_inputs(
    tokens: int, args: argparse.Namespace, machine: Machine, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    """Make q, k, v with gradients, and an output gradient, of `tokens` tokens."""
    made = torch.Generator(machine.device).manual_seed(seed)
    like = {"device": machine.device, "dtype": machine.dtype, "generator": made}
    shape = 1, tokens, args.heads, args.head_dim
    *qkv, dout = [torch.randn(shape, **like) for _ in range(4)]
    return [x.requires_grad_() for x in qkv], dout


def make_ours(args: argparse.Namespace, sp: SequenceParallel = _ALONE, **chosen: Any) -> Attention:
    """Make our attention, over the ranks of sp."""
    slopes = alibi_slopes(args.heads)
    groups = {**sp.groups, **chosen}
    return lambda q, k, v: lightning_attn_func(q, k, v, slopes, **groups)


def make_fla(
    args: argparse.Namespace, machine: Machine, cu_seqlens: Sequence[int] | None = None
) -> Attention:
    """Make fla's attention. It raises Unavailable when called, if the package is missing."""
    decay = -alibi_slopes(args.heads).to(machine.device)
    borders = None if cu_seqlens is None else torch.tensor(cu_seqlens, device=machine.device)
    scale = args.head_dim**-0.5

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        try:
            fla = importlib.import_module("fla.ops.simple_gla")
        except ImportError as error:
            raise Unavailable(f"fla-core does not import: {error}") from error
        out: Tensor
        out, _ = fla.chunk_simple_gla(q, k, v, g_gamma=decay, scale=scale, cu_seqlens=borders)
        return out

    return attend


def facts(case: str, tokens: int, args: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """Return the facts of a case with `tokens` tokens on each GPU."""
    dtype = str(machine.dtype).removeprefix("torch.")
    row = {"kind": "lightning", "case": case, "tokens": tokens, "heads": args.heads}
    return row | {"head_dim": args.head_dim, "dtype": dtype, "gpus": 1}


def measure_kernel(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure one document of --tokens tokens, and of twice as many."""
    for tokens in (args.tokens, 2 * args.tokens):
        machine.at = f"kernel, {tokens:,} tokens"
        qkv, dout = make_inputs(tokens, args, machine)
        row = facts("kernel", tokens, args, machine)
        peer = {"against": "fla", "target": 0.8} if args.peers else {}
        both = [Contestant(row | {"impl": "bmt_burst"} | peer, make_ours(args), qkv, [dout])]
        if args.peers:
            both.append(Contestant(row | {"impl": "fla"}, make_fla(args, machine), qkv, [dout]))
        yield from measure(both, machine, args)


def measure_documents(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure one document, and short ones of as many tokens together."""
    tokens, length = args.tokens, args.document_tokens
    machine.at = f"documents of {length:,} tokens"
    qkv, dout = make_inputs(tokens, args, machine)
    row = facts("documents", tokens, args, machine)
    cu_seqlens = [*range(0, tokens, length), tokens]
    many, against = f"{len(cu_seqlens) - 1} documents", {"against": "one document"}
    packed = make_ours(args, mask=Mask.documents(cu_seqlens))
    both = [
        Contestant(row | {"impl": "one document"}, make_ours(args), qkv, [dout]),
        Contestant(row | {"impl": many, "target": 1.1} | against, packed, qkv, [dout]),
    ]
    if args.peers:
        peer = make_fla(args, machine, cu_seqlens)
        both.append(Contestant(row | {"impl": f"fla, {many}"}, peer, qkv, [dout]))
    yield from measure(both, machine, args)


def measure_layer(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure the layer, and its projections. Each has gradients of its inputs and weights.

    The projections of heads have the layer's input, and that of the result has another input, so
    that no other work is measured apart from sums of the gradients of one input.
    """
    tokens, width = args.tokens, args.width
    machine.at = f"layer, {tokens:,} tokens"
    like = {"device": machine.device, "dtype": machine.dtype}
    torch.manual_seed(0)
    layer = LightningAttention(width, args.heads, args.head_dim).to(**like)
    inner = args.heads * args.head_dim
    x, dout = (
        torch.randn(1, tokens, width, **like).requires_grad_(),
        torch.randn(1, tokens, width, **like),
    )
    attended = torch.randn(1, tokens, inner, **like).requires_grad_()
    dheads = torch.randn(1, tokens, inner, **like)
    cos, sin = rope_tables(torch.arange(tokens, device=machine.device), args.head_dim)
    inward = [layer.q_proj, layer.k_proj, layer.v_proj, layer.z_proj]

    def project(x: Tensor, attended: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return (*(of(x) for of in inward), layer.o_proj(attended))

    def whole(x: Tensor, *_: Tensor) -> Tensor:
        return layer(x, cos, sin)

    row = facts("layer", tokens, args, machine) | {"width": width}
    weights = [of.weight for of in (*inward, layer.o_proj)]
    tensors, douts = [x, attended, *weights], [*[dheads] * len(inward), dout]
    wanted = {"impl": "layer", "against": "five projections", "target": 1.4}
    both = [
        Contestant(row | {"impl": "five projections"}, project, tensors, douts),
        Contestant(row | wanted, whole, [x, *layer.parameters()], [dout]),
    ]
    yield from measure(both, machine, args)


def measure_one_rank(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure ranks with imagined peers, and the tokens of one rank without an exchange."""
    tokens, size = args.rank_tokens, args.size
    machine.at = f"one rank of {size}, {size * tokens:,} tokens"
    qkv, dout = make_inputs(tokens, args, machine)
    row = facts("one rank", tokens, args, machine) | {"size": size}
    contestants = [Contestant(row | {"impl": "alone"}, make_ours(args), qkv, [dout])]
    for rank in args.ranks or sorted({0, size // 2, size - 1}):
        ring = ImaginedRing(rank, size)
        ours = make_ours(args, SequenceParallel(rank, size, "zigzag", process_group=ring))
        named = {"impl": f"rank {rank}", "against": "alone", "target": 1.03}
        one = Contestant(row | named, ours, qkv, [dout], partial(getattr, ring, "held_bytes"))
        one.step()  # takes the ring's memory
        fill_slots(ring, machine)
        contestants.append(one)
    yield from measure(contestants, machine, args)


def measure_ranks(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure a sequence over all GPUs, and the tokens of a GPU alone."""
    tokens = args.tokens
    machine.at = f"{machine.size} ranks, {machine.size * tokens:,} tokens"
    qkv, dout = make_inputs(tokens, args, machine, seed=machine.rank)
    row = facts("ranks", tokens, args, machine)
    over = {"impl": "zigzag", "gpus": machine.size, "against": "alone", "target": 1.08}
    sp = init_sequence_parallel(layout="zigzag")
    both = [
        Contestant(row | {"impl": "alone"}, make_ours(args), qkv, [dout]),
        Contestant(row | over, make_ours(args, sp), qkv, [dout]),
    ]
    yield from measure(both, machine, args)


def measure_errors(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Compute errors against float64, on one GPU and, with several ranks, over all of them."""
    usual = machine.dtype
    for dtype in args.dtypes:
        machine.dtype = getattr(torch, dtype)
        tokens = args.error_tokens
        machine.at = f"errors, {dtype}"
        qkv, dout = make_inputs(tokens, args, machine)
        exact = results(
            make_ours(args, flash="reference"), [x.double() for x in qkv], dout.double()
        )
        row = facts("errors", tokens, args, machine)
        contestants = {"bmt_burst": partial(results, make_ours(args))}
        if args.peers:
            contestants = {"fla": partial(results, make_fla(args, machine)), **contestants}
        if machine.size > 1:
            contestants[f"bmt_burst, {machine.size} ranks"] = partial(
                results_of_ranks, args, machine
            )
        rows = dict[str, dict[str, Any]]()
        for name, compute in contestants.items():
            machine.report(name)
            rows[name] = row | {"impl": name}
            failure = machine.attempt(
                lambda: rows[name].update(errors(compute(qkv, dout), exact))  # noqa: B023
            )
            if failure:
                rows[name]["unavailable"] = failure
            base = "bmt_burst" if "ranks" in name else "fla"
            if not failure and name != base and "out" in rows.get(base, {}):
                ratios = {x: rows[name][x] / rows[base][x] for x in _NAMES}
                rows[name] |= {"against": base, "target": 1.1, "ratios": ratios}
            yield rows[name]
    machine.dtype = usual


def results(attention: Attention, qkv: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    """Return out, dq, dk and dv."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def results_of_ranks(
    args: argparse.Namespace, machine: Machine, qkv: Sequence[Tensor], dout: Tensor
) -> list[Tensor]:
    """Return out, dq, dk and dv of the whole sequence, computed over all ranks in zigzag."""
    sp = init_sequence_parallel(layout="zigzag")
    shards = [sp.shard(x.detach()) for x in (*qkv, dout)]
    found = results(make_ours(args, sp), shards[:3], shards[3])
    return [sp.unshard(x, dout.shape[1]) for x in found]


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    """Return the relative L2 and largest errors of out, dq, dk and dv."""
    row = dict[str, float]()
    for name, x, y in zip(_NAMES, found, exact, strict=True):
        wrong = x.double() - y
        row[name] = float(wrong.norm() / y.norm())
        row[f"{name}_max"] = float(wrong.abs().max() / y.abs().max())
    return row


CASES: dict[str, Callable[[argparse.Namespace, Machine], Iterator[dict]]] = {
    "kernel": measure_kernel,
    "documents": measure_documents,
    "layer": measure_layer,
    "one-rank": measure_one_rank,
    "ranks": measure_ranks,
    "errors": measure_errors,
}


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure all cases. Yield their rows."""
    for case in args.cases:
        yield from CASES[case](args, machine)
        gc.collect()
        if machine.cuda:
            torch.cuda.empty_cache()


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = options.make_parser(__doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=[x for x in CASES if x != "ranks"])
    add("--peers", nargs="*", choices=["fla"], default=[])
    add("--size", type=int, default=8, help="imagined ranks")
    add("--ranks", type=options.at_least(0), nargs="+", help="imagined ones that are measured")
    halves = ["bfloat16", "float16"]
    add(
        "--dtypes", nargs="+", choices=[*halves, "float32"], default=halves if cuda else ["float32"]
    )
    for name, on_gpus, tiny, text in _DEFAULTS:
        add(name, type=int, default=on_gpus if cuda else tiny, help=text)
    add("--profile", action="store_true", help="add the milliseconds of each GPU kernel")
    args = parser.parse_args()
    options.check_ranks(parser, "--ranks", args.ranks or (), args.size)
    machine = Machine()
    if "ranks" in args.cases and machine.size == 1:
        parser.error("the case 'ranks' needs several ranks: start it with torchrun")
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
