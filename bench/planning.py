"""Measures what a new mask costs a rank on the host, on a CPU, without other ranks.

    python bench/planning.py --output bench/results/planning-cpu.jsonl

With packed documents every step has a new mask and pays this: the mask and its digest, the balanced
layout and what ranks compare of it, and the plan of one rank's forward and backward. Rows have
medians over many random masks, in milliseconds, of each part and of their sum. They are CPU time,
so that other processes do not count. Nothing here waits. The last row shows whether memory grows
with the number of masks.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.machine import cpu_name, record
from bench.options import at_least, make_parser
from bmt_burst import Layout, Mask, burst_attn_func, kernels
from bmt_burst.spec import Spec
from bmt_burst.strategies import Problem, Sizes, load

_TOKENS = 16384  # of each rank
_WINDOW = 4096
_WARM_UP = 100  # masks that fill the caches


class Setting(NamedTuple):
    """Masks of a kind over some ranks. `target_ms` is the limit for their total time."""

    mask: str
    documents: int
    hosts: int
    ranks_a_host: int
    target_ms: float

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_a_host


SETTINGS = (
    Setting("documents", 100, 1, 8, 2.0),
    Setting("documents", 1000, 1, 8, 10.0),
    Setting("documents", 100, 64, 8, 10.0),
    Setting("causal", 1, 1, 8, 2.0),
    Setting("causal", 1, 64, 8, 10.0),
    Setting("window", 1, 1, 8, 2.0),
    Setting("window", 1, 64, 8, 10.0),
)


def lengths(rng: random.Random, documents: int, tokens: int) -> list[int]:
    """Draw lengths of documents that fill `tokens`, log-normal with sigma 1, at least 1 each."""
    drawn = [rng.lognormvariate(0.0, 1.0) for _ in range(documents)]
    spare = tokens - documents
    cuts = [round(spare * share / sum(drawn)) for share in itertools.accumulate(drawn)]
    return [1 + stop - start for start, stop in itertools.pairwise([0, *cuts])]


def new_mask(setting: Setting, tokens: int, rng: random.Random) -> Callable[[], Mask]:
    """Return a function that makes a new mask."""
    if setting.mask == "documents":
        cu_seqlens = list(itertools.accumulate(lengths(rng, setting.documents, tokens), initial=0))
        return lambda: Mask.documents(cu_seqlens)
    if setting.mask == "window":
        return lambda: Mask.window(tokens, _WINDOW)
    return lambda: Mask.causal(tokens)


def plan_one(setting: Setting, backward: str, rng: random.Random) -> dict[str, float]:
    """Measure the parts of planning for a new mask on a random rank, in milliseconds."""
    tokens = setting.ranks * (_TOKENS - rng.randrange(256))
    make, rank = new_mask(setting, tokens, rng), rng.randrange(setting.ranks)
    spent = {}

    def timed(part: str, work: Callable):
        start = time.thread_time()
        result = work()
        spent[part] = (time.thread_time() - start) * 1e3
        return result

    def layout_of(mask: Mask) -> Layout:
        return (
            Layout.zigzag(tokens, setting.ranks)
            if setting.mask == "causal"
            else Layout.balanced(mask, setting.ranks)
        )

    mask = timed("mask", make)
    timed("digest", lambda: mask.digest)
    layout = timed("layout", lambda: layout_of(mask))
    timed("term", lambda: (layout.term, [layout.length(r) for r in range(setting.ranks)]))
    plan = load("ring").plan(problem(mask, layout, setting, backward), rank)
    timed("forward", lambda: plan.forward_program)
    timed("backward", lambda: plan.backward_program)
    return spent


def problem(mask: Mask, layout: Layout, setting: Setting, backward: str) -> Problem:
    """Make the problem of attention in bf16 with 32:8 heads of 128."""
    return Problem(
        mask=mask,
        layout=layout,
        spec=Spec(128**-0.5),
        kernel=kernels.load("reference"),
        sizes=Sizes(1, 32, 8, 128, torch.bfloat16, torch.bfloat16),
        inner=setting.ranks_a_host,
        outer=setting.hosts,
        backward=backward,
    )


def measured(setting: Setting, backward: str, masks: int) -> dict:
    """Measure a setting. Return medians over `masks` masks, after a tenth as many to warm up."""
    rng = random.Random(0)
    for _ in range(-(-masks // 10)):
        plan_one(setting, backward, rng)
    found = [plan_one(setting, backward, rng) for _ in range(masks)]
    totals = sorted(sum(spent.values()) for spent in found)
    return {
        "kind": "planning",
        **setting._asdict(),
        "gpus": setting.ranks,
        "backward": backward,
        "masks": masks,
        "ms": {part: statistics.median(spent[part] for spent in found) for part in found[0]},
        "total_ms": statistics.median(totals),
        "p90_ms": totals[len(totals) * 9 // 10],
    }


def memory(masks: int) -> dict:
    """Measure how memory grows over calls with new masks, once caches are full.

    A block is a piece of memory from Python's allocator. A mask and its plan take hundreds.
    """
    rng, tokens = random.Random(0), 48
    x = torch.randn(1, tokens, 1, 8, requires_grad=True)

    def call() -> None:
        mask = Mask.documents(
            list(itertools.accumulate(lengths(rng, rng.randint(2, 12), tokens), initial=0))
        )
        burst_attn_func(x, x, x, mask=mask, layout="balanced").sum().backward()

    def held() -> tuple[int, int]:
        gc.collect()
        return sys.getallocatedblocks(), _resident_kib()

    for _ in range(_WARM_UP):
        call()
    blocks, resident = held()
    for _ in range(masks):
        call()
    blocks_then, resident_then = held()
    return {
        "kind": "planning memory",
        "masks": masks,
        "blocks": blocks,
        "blocks_more": blocks_then - blocks,
        "resident_kib": resident,
        "resident_kib_more": resident_then - resident,
    }


def _resident_kib() -> int:
    """Return the resident memory of this process, on Linux."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


def rows(masks: int, memory_masks: int) -> Iterator[dict]:
    for setting, backward in itertools.product(SETTINGS, ("kv", "q")):
        yield measured(setting, backward, masks)
    if memory_masks:
        yield memory(memory_masks)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--masks", type=int, default=200, help="random masks of each kind")
    parser.add_argument(
        "--memory-masks",
        type=at_least(0),
        default=10000,
        help="calls with a new mask; 0: do not measure",
    )
    args = parser.parse_args()
    record(rows(args.masks, args.memory_masks), args.output, cpu_name())


if __name__ == "__main__":
    main()
