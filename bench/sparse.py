"""Measures InfLLM-V2 and dense attention: the same function with and without `sparse`.

    torchrun --nproc-per-node 1 bench/sparse.py --output bench/results/sparse-mine.jsonl
    torchrun --nproc-per-node 2 bench/sparse.py --output bench/results/sparse-mine.jsonl

--cases chooses from these cases:

    batch     a batch of --batch sequences of --batch-tokens tokens on one GPU
    one-rank  one rank of --size imagined ones, for each of --lengths (see bench/one_rank.py)
    ring      a sequence of --ring-tokens tokens over all GPUs, and the same work of each rank with
              imagined peers, so without communication

Rows are those of bench/attention.py with their own "kind". "visible_pairs" and the TFLOP/s of
sparse attention count the pairs that it attends to, without the choice. "fwd_ms" includes the
choice. Calls of more than 2 seconds are measured once, not in several rounds.

Sparse attention chooses by queries and keys of its own ("choose_by"), which are made so that the
choices of neighbouring queries overlap by --overlaps. 0.8 means: the next query also chose 80 % of
the blocks that a query chose by score. The keys are random. The queries of a head are a random
walk over the tokens, which forgets slowly:

    q_t = sqrt(1 - step^2) q_(t-1) + step n_t        n_t random and independent

Calls with several steps find the step that has the wanted overlap. With 0 the step is 1, so the
queries are independent and far blocks are random. Each row has its "step", and the "overlap" that
was measured: the mean over all pairs of neighbouring queries of a rank that see more blocks than
they choose. Blocks that are always chosen do not count. Imagined peers also have random keys.

On a machine without GPUs it runs a tiny version with small constants, which tests the script.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import options
from bench.attention import Contestant, facts_of, fill_slots, forward, inputs, measure, step
from bench.implementations import Burst, Case
from bench.machine import Machine
from bmt_burst import InfLLMV2, Layout, SequenceParallel, init_sequence_parallel
from bmt_burst.sparse import keep_choices
from bmt_burst.transport.imagined import ImaginedRing

_SLOW_MS = 2000.0
_AMPLITUDE = 8.0  # of queries: a head's scores of compressed keys differ by factors
_TRIES = 8  # to find the step of a random walk
_NEAR = 0.005  # an overlap is as wanted
_AT_ONCE = 512  # the overlap of so many queries is computed at once


@dataclass(frozen=True)
class SparseCase(Case):
    """A case of causal attention, sparse unless `sparse` is None."""

    sparse: InfLLMV2 | None = None

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and a key that it attends to."""
        if self.sparse is None or self.sparse.is_dense(self.seq_len):
            return self.visible.area
        places, size = torch.arange(self.seq_len), self.sparse.block_size
        blocks = (places // size).clamp_max(self.sparse.most_blocks - 1)
        return int((blocks * size + places % size + 1).sum())

    @property
    def flops(self) -> float:
        return 4.0 * self.batch * self.pairs * self.heads * self.head_dim


@dataclass(frozen=True)
class Place:
    """The ranks that compute a case: this rank with real or imagined peers, or alone."""

    sp: SequenceParallel
    peers: str

    @staticmethod
    def imagined(rank: int, size: int) -> Place:
        return Place(
            SequenceParallel(rank, size, process_group=ImaginedRing(rank, size)), "imagined"
        )


class Choosing:
    """The queries and keys by which the attention of a case chooses blocks, for this rank's tokens.

    positions  (S,) those of this rank's tokens in the sequence
    """

    def __init__(self, attention: Burst, case: SparseCase, positions: Tensor, machine: Machine):
        self.attention, self.case, self.machine = attention, case, machine
        self.positions = positions.to(machine.device)

    def prepare(self, wanted: float) -> dict[str, float | None]:
        """Find a step of the queries with the `wanted` overlap, or independent queries for 0.

        Return the step and the measured overlap, which is None if no query chooses.
        """
        tensors, dout = inputs(self.case, len(self.positions), self.machine, self.machine.rank)
        length, overlap = 0.1 if wanted else 1.0, None
        self._make(length)
        step(self.attention, tensors, dout)  # reserves the transport's memory
        fill_slots(self.attention.transports[0], self.machine)
        for _ in range(_TRIES):
            overlap = self._measure(tensors)
            if not wanted or overlap is None or abs(overlap - wanted) < _NEAR:
                break
            # A small step changes a share of the choice that is proportional to it.
            length = min(length * (1 - wanted) / max(1 - overlap, 0.01), 1.0)
            self._make(length)
            overlap = None
        overlap = self._measure(tensors) if overlap is None else overlap
        return {"step": length, "overlap": overlap}

    def _make(self, length: float) -> None:
        """Make random keys, and queries that are random walks with steps of a length."""
        case, machine = self.case, self.machine
        tokens = len(self.positions)
        generator = torch.Generator(machine.device).manual_seed(1000 + machine.rank)
        k = torch.randn(
            (case.batch, tokens, case.kv_heads, case.head_dim),
            device=machine.device,
            generator=generator,
        ).to(machine.dtype)
        q = torch.empty(
            (case.batch, tokens, case.heads, case.head_dim),
            device=machine.device,
            dtype=machine.dtype,
        )
        for row in q:
            row.copy_(walk(row.shape, length, generator) * _AMPLITUDE)
        self.attention.options["choose_by"] = q, k

    def _measure(self, tensors: list[Tensor]) -> float | None:
        """Return the overlap of the choices that a forward makes, over all ranks."""
        assert self.case.sparse is not None
        first_run, _ = keep_choices()
        with first_run:
            forward(self.attention, tensors)
        counts = torch.zeros(2, dtype=torch.float64)
        # earlier queries choose nothing
        later = self.positions[self.positions >= self.case.sparse.exact_tokens]
        for chosen in first_run.kept:
            counts += count_overlap(chosen.int(), later, self.case.sparse)
        dist.all_reduce(counts)
        return float(counts[0] / counts[1]) if counts[1] else None


def walk(shape: torch.Size, length: float, generator: torch.Generator) -> Tensor:
    """Return a random walk over the first dimension: fp32, of mean 0 and variance 1.

    Each entry is sqrt(1 - length^2) times the one before, plus `length` times a random one.
    """
    x = torch.randn(shape, device=generator.device, generator=generator)
    x[1:] *= length
    kept, reach = (1 - length**2) ** 0.5, 1
    while reach < len(x):  # x now has the random numbers of the last `reach` entries
        x[reach:] += kept**reach * x[:-reach]
        reach *= 2
    return x


def count_overlap(chosen: Tensor, positions: Tensor, sparse: InfLLMV2) -> Tensor:
    """Count the blocks that queries chose by score and that have a next query at hand.

    chosen     (B, S, G, N) int32, -1 for no block
    positions  (S,) rising

    Return (2,) float64: the number that the next query also chose, and the number of all.
    """
    counts = torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(positions) - 1, _AT_ONCE):
        at = positions[start : start + _AT_ONCE + 1]
        blocks = chosen[:, start : start + _AT_ONCE + 1]
        own = at // sparse.block_size
        counted = (at[1:] - at[:-1] == 1) & (own[:-1] >= sparse.most_blocks)
        far = (own[:-1] - sparse.window_blocks).view(1, -1, 1, 1)
        mine, following = blocks[:, :-1], blocks[:, 1:]
        by_score = (mine >= sparse.init_blocks) & (mine < far) & counted.view(1, -1, 1, 1)
        again = (mine.unsqueeze(-1) == following.unsqueeze(-2)).any(-1)
        counts += torch.stack(((again & by_score).sum(), by_score.sum())).cpu()
    return counts


def contestants(
    cases: dict[str, SparseCase], place: Place, overlaps: dict[str, float], machine: Machine
) -> Iterator[Contestant | dict[str, Any]]:
    """Yield the attention of each case on this rank, or a row with the reason why there is none."""
    sp = place.sp
    for name, case in cases.items():
        machine.report(f"{name}, {place.peers} peers")
        layout = Layout.named("zigzag", case.seq_len, sp.size)
        row = {
            "kind": "sparse",
            "impl": name,
            "gpus": sp.size,
            "peers": place.peers,
            **facts_of(case, machine),
            "visible_pairs": case.pairs,
            "sparse": case.sparse and case.sparse.to_dict(),
        }
        attention = Burst(case, sp, layout, sparse=case.sparse)
        if case.sparse is None:
            work = partial(_begin, attention, case, case.seq_len // sp.size, machine)
        else:
            choosing = Choosing(attention, case, layout.positions(sp.rank), machine)
            row["wanted_overlap"] = overlaps[name]
            work = partial(choosing.prepare, overlaps[name])
        if failure := machine.attempt(lambda: row.update(work())):  # noqa: B023
            yield row | {"unavailable": failure}
        else:
            yield Contestant(row, case, attention)


def _begin(attention: Burst, case: SparseCase, tokens: int, machine: Machine) -> dict[str, Any]:
    """Call dense attention once, which reserves memory."""
    tensors, dout = inputs(case, tokens, machine, machine.rank)
    step(attention, tensors, dout)
    fill_slots(attention.transports[0], machine)
    return {}


def compare(
    case: SparseCase, places: list[Place], args: argparse.Namespace, machine: Machine
) -> Iterator[dict[str, Any]]:
    """Measure sparse and dense attention of one case at some places. Yield their rows."""
    overlaps = {f"sparse, {name_overlap(x)}": x for x in args.overlaps}
    cases = dict.fromkeys(overlaps, case)
    if not args.no_dense:
        cases["dense"] = replace(case, sparse=None)
    machine.at = f"{case.seq_len:,} tokens, batch {case.batch}, {places[0].sp.size} ranks"
    made = [one for place in places for one in contestants(cases, place, overlaps, machine)]
    yield from (row for row in made if isinstance(row, dict))
    if ready := [one for one in made if isinstance(one, Contestant)]:
        yield from measure(ready, case.seq_len // places[0].sp.size, machine, _SLOW_MS)


def name_overlap(overlap: float) -> str:
    return f"{overlap:.0%} overlap" if overlap else "random"


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict[str, Any]]:
    """Measure all cases. Yield their rows."""
    sparse = replace(args.sparse or InfLLMV2(), use_nope=True)  # it chooses by others

    def case(tokens: int, batch: int = 1) -> SparseCase:
        q_heads, kv_heads = args.heads
        sizes = (batch, q_heads, kv_heads, args.head_dim)
        return SparseCase(tokens, *sizes, "causal", args.kernel, sparse=sparse)

    if "batch" in args.cases:
        place = Place(SequenceParallel(), "no")
        yield from compare(case(args.batch_tokens, args.batch), [place], args, machine)
        gc.collect()
    if "one-rank" in args.cases:
        for tokens in args.lengths:
            place = Place.imagined(args.rank, args.size)
            yield from compare(case(tokens), [place], args, machine)
            del place
            gc.collect()
    if "ring" in args.cases:
        sp = init_sequence_parallel()
        places = [Place(sp, "real"), Place.imagined(machine.rank, machine.size)]
        yield from compare(case(args.ring_tokens), places, args, machine)


_CASES = ("batch", "one-rank", "ring")
_SMALL = {"block_size": 8, "kernel_size": 4, "kernel_stride": 2, "window_size": 16, "topk": 8}
_SMALL |= {"dense_len": 128}


def parse_args() -> argparse.Namespace:
    cuda, ranks = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", "1"))
    parser = options.make_parser(__doc__)
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=_CASES,
        default=["ring"] if ranks > 1 else ["batch", "one-rank"],
        help="by default 'ring' on several GPUs, and the others on one",
    )
    parser.add_argument(
        "--overlaps",
        type=float,
        nargs="*",
        default=[0.8, 0.0],
        help="shares of the far blocks that neighbouring queries both chose; 0: random blocks",
    )
    parser.add_argument("--no-dense", action="store_true", help="do not measure dense attention")
    parser.add_argument("--batch", type=int, default=2, help="sequences of the case 'batch'")
    parser.add_argument("--batch-tokens", type=int, default=1 << 17 if cuda else 256)
    parser.add_argument("--size", type=int, default=8, help="ranks of the case 'one-rank'")
    parser.add_argument(
        "--rank", type=options.at_least(0), default=0, help="which of them is measured"
    )
    lengths = [1 << power for power in range(14, 21)] if cuda else [64, 256]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--ring-tokens", type=int, default=1 << 18 if cuda else 256)
    parser.add_argument(
        "--heads", type=options.parse_heads, default=(32, 2) if cuda else (4, 2), metavar="Q:KV"
    )
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 16)
    options.add_kernel(parser)
    parser.add_argument(
        "--sparse",
        type=options.parse_sparse,
        default=InfLLMV2() if cuda else InfLLMV2(**_SMALL),
        help="JSON of the constants that differ from InfLLM-V2's",
    )
    args = parser.parse_args()
    if not all(0 <= overlap < 1 for overlap in args.overlaps):
        parser.error(f"--overlaps must be at least 0 and below 1, got {args.overlaps}")
    options.check_ranks(parser, "--rank", [args.rank], args.size)
    shared = [
        ("--lengths", length, args.size) for length in args.lengths if "one-rank" in args.cases
    ]
    shared += [("--ring-tokens", args.ring_tokens, ranks)] if "ring" in args.cases else []
    for name, length, size in shared:
        if length % size:
            parser.error(f"argument {name}: expected equal parts for {size} ranks, got {length}")
    return args


def main() -> None:
    args, machine = parse_args(), Machine()
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
