"""Profiles one implementation on each rank's GPU, by kind of work. Needs GPUs.

    torchrun --nproc-per-node 8 bench/timeline.py --tokens-per-gpu 8192 --heads 32:32 \\
        --output bench/results/timeline.jsonl

Each rank has a row of JSON: milliseconds of a step for attention kernels, kernels that merge and
sum, copies, NCCL and others, and the idle time of the compute stream. Kernels run one after the
other. Copies and NCCL run at the same time.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import options
from bench.attention import facts_of, inputs, step
from bench.implementations import IMPLEMENTATIONS, Case
from bench.machine import Machine
from bmt_burst import SequenceParallel, init_sequence_parallel

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


def measure(case: Case, name: str, sp: SequenceParallel, machine: Machine) -> Iterator[dict]:
    """Yield the rows of all ranks."""
    implementation = IMPLEMENTATIONS[name]
    tensors, dout = inputs(case, case.seq_len // machine.size, machine, seed=machine.rank)
    work = partial(step, implementation.on(case, sp), tensors, dout)
    work()
    machine.settle()
    spent: list = [None] * machine.size
    dist.all_gather_object(spent, milliseconds(profiled(work)))
    facts = {**facts_of(case, machine, implementation.kernel), "gpus": machine.size}
    for rank, ms in enumerate(spent):
        yield {"kind": "timeline", "impl": name, "rank": rank, **facts, "ms": ms}


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure all cases. Yield their rows."""
    sp = init_sequence_parallel()
    for case in options.cases(args, machine.size):
        for name in args.implementations:
            yield from measure(case, name, sp, machine)


def main() -> None:
    parser = options.make_parser(__doc__)
    options.add_kernel(parser)
    options.add_cases(parser, [(32, 32)], [8192])
    parser.add_argument(
        "--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["bmt_burst"]
    )
    args, machine = parser.parse_args(), Machine()
    if not machine.cuda:
        parser.error("a timeline of GPUs needs GPUs")
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
