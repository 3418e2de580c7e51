"""Profiles one implementation on each rank's GPU, by kind of work. Needs GPUs.

    torchrun --nproc-per-node 8 bench/timeline.py --tokens 65536 --heads 32:32 \\
        --output bench/results/timeline.jsonl

Each rank has a row of JSON: milliseconds of a step for attention kernels, kernels that merge and
sum, copies, NCCL and others, and the idle time of the compute stream. Copies and NCCL run beside
the kernels, which run one after the other. --trace FOLDER also writes Chrome traces.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import masks
from bench.attention import facts_of, heads, inputs, step
from bench.implementations import IMPLEMENTATIONS, Case
from bench.machine import Machine, append, origin
from bmt_burst import init_sequence_parallel

STEPS = 3
_KINDS = {  # a kernel is of the first kind that has a word of its name
    "merge": ("_merge_outputs", "_sum_gradients", "_fill_query_rows"),
    "nccl": ("nccl",),
    "copies": ("memcpy",),
    "attention": ("flash", "fmha", "cudnn", "attn"),
}


class Activity(NamedTuple):
    """An activity of a GPU, in microseconds."""

    name: str
    stream: int
    start: float
    stop: float


def kind(name: str) -> str:
    lower = name.lower()
    return next((k for k, words in _KINDS.items() if any(word in lower for word in words)), "other")


def breakdown(activities: Iterable[Activity]) -> dict[str, float]:
    """Sum milliseconds by kind.

    "span" is the time from the first to the last attention kernel, "idle" the part of it in which
    nothing ran on their stream.
    """
    activities = sorted(activities, key=lambda a: a.start)
    spent = Counter()
    for activity in activities:
        spent[kind(activity.name)] += (activity.stop - activity.start) / 1e3
    attention = [a for a in activities if kind(a.name) == "attention"]
    start, stop = attention[0].start, max(a.stop for a in attention)
    busy, until = 0.0, start
    for activity in activities:
        if activity.stream == attention[0].stream:
            busy += max(0.0, min(activity.stop, stop) - max(activity.start, until))
            until = max(until, activity.stop)
    return {**spent, "span": (stop - start) / 1e3, "idle": (stop - start - busy) / 1e3}


def activities_of(profile: torch.profiler.profile) -> list[Activity]:
    """Return the GPU's activities in a profile."""
    events = profile.profiler.kineto_results.events()
    return [
        Activity(
            e.name(),
            e.device_resource_id(),
            e.start_ns() / 1e3,
            (e.start_ns() + e.duration_ns()) / 1e3,
        )
        for e in events
        if e.device_type() == torch.autograd.DeviceType.CUDA and not e.is_user_annotation()
    ]


def profiled(step: Callable[[], None]) -> torch.profiler.profile:
    """Run STEPS steps. Return their profile."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    return profile


def milliseconds(profile: torch.profiler.profile) -> dict[str, float]:
    """Compute the `breakdown` of one profiled step."""
    return {key: value / STEPS for key, value in breakdown(activities_of(profile)).items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[65536], help="of the whole sequence"
    )
    parser.add_argument("--heads", type=heads, nargs="+", default=[(32, 32)], metavar="Q:KV")
    parser.add_argument("--head-dim", type=int, default=128)
    masks.add_arguments(parser)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument(
        "--implementations", nargs="+", choices=list(IMPLEMENTATIONS), default=["bmt_burst"]
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="file of JSON lines to append to"
    )
    parser.add_argument("--trace", type=Path, help="folder for Chrome traces")
    args, machine = parser.parse_args(), Machine()
    if not machine.cuda:
        raise SystemExit("a timeline of GPUs needs GPUs")
    sp = init_sequence_parallel()
    for mask, tokens, (q_heads, kv_heads) in itertools.product(
        masks.chosen(args), args.tokens, args.heads
    ):
        case = Case(tokens, 1, q_heads, kv_heads, args.head_dim, mask, args.kernel)
        for name in args.implementations:
            measure(case, name, sp, machine, args)
    dist.destroy_process_group()


def measure(case: Case, name: str, sp, machine: Machine, args: argparse.Namespace) -> None:
    implementation = IMPLEMENTATIONS[name]
    attention = implementation.on(case, sp)
    tensors, dout = inputs(case, case.seq_len // machine.size, machine, seed=machine.rank)
    work = partial(step, attention, tensors, dout)
    work()
    machine.settle()
    profile = profiled(work)
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)
        parts = (name, case.mask, case.seq_len, case.heads, case.kv_heads, f"rank{machine.rank}")
        file = "-".join(map(str, parts)).replace(" ", "_") + ".json.gz"
        profile.export_chrome_trace(str(args.trace / file))
    spent = milliseconds(profile)
    rows: list = [None] * machine.size
    dist.all_gather_object(rows, spent)
    if machine.rank == 0:
        facts = {**facts_of(case, machine, implementation.kernel), "gpus": machine.size}
        common = origin(machine.name)
        for rank, row in enumerate(rows):
            append(
                args.output,
                {"kind": "timeline", "impl": name, "rank": rank, **facts, "ms": row, **common},
            )
            text = " ".join(f"{key} {value:.3f}" for key, value in sorted(row.items()))
            print(
                f"{name} {case.mask} {case.seq_len} {case.heads}:{case.kv_heads} rank {rank}:",
                text,
                flush=True,
            )


if __name__ == "__main__":
    main()
