"""Measures how unevenly layouts share out work, on a CPU.

    python bench/balance.py --output bench/results/balance-cpu.jsonl

Unevenness is the most work of a rank over the mean, less 1. No layout can have less than 0. For
2 and 3 ranks, "chunks" is the least that any assignment of 12 equal chunks has, by trying all.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.machine import cpu_name, record
from bench.options import make_parser
from bmt_burst import Layout, Mask

_TOKENS = 8192  # of each rank, nearly: a multiple of 12 times as many ranks
_SIZES = (2, 3, 4, 8, 32, 128)
_CHUNKS = 12


def masks(n: int) -> dict[str, Mask]:
    rng, bounds = random.Random(n), [0]
    while bounds[-1] < n:  # log-normal lengths of mean 4096 with sigma 1
        drawn = int(rng.lognormvariate(math.log(4096) - 0.5, 1))
        bounds.append(min(bounds[-1] + max(drawn, 1), n))
    half = n // 2
    long = [0, *(half + x for x in sorted(rng.sample(range(n - half), 300))), n]
    return {
        "causal": Mask.causal(n),
        "window": Mask.window(n, 4096),
        "documents": Mask.documents(bounds),
        "windowed documents": Mask.documents(bounds, window=1024),
        "full documents": Mask.documents(bounds, causal=False),
        "equal documents": Mask.documents([n * i // 100 for i in range(101)]),
        "one long, 300 short": Mask.documents(sorted(set(long))),
    }


def work(mask: Mask, start: int, stop: int) -> int:
    """Count the visible pairs of some queries."""
    cut = (s._replace(q=(max(start, s.q[0]), min(stop, s.q[1]))) for s in mask.slices)
    return sum(s.area for s in cut if s.q[0] < s.q[1])


def unevenness(mask: Mask, layout: Layout, size: int) -> float:
    found = [sum(work(mask, r[0], r[-1] + 1) for r in layout.ranges(i)) for i in range(size)]
    return max(found) * size / mask.area - 1


def least(mask: Mask, size: int) -> float:
    """Return the least unevenness of chunks, as many on each rank."""
    step = mask.seq_len // _CHUNKS
    chunks = [work(mask, i * step, (i + 1) * step) for i in range(_CHUNKS)]

    def most(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        found = []
        for others in itertools.combinations(left[1:], _CHUNKS // size - 1):
            mine = chunks[left[0]] + sum(chunks[i] for i in others)
            found.append(max(mine, most(tuple(i for i in left[1:] if i not in others))))
        return min(found)

    return most(tuple(range(_CHUNKS))) * size / mask.area - 1


def rows() -> Iterator[dict]:
    for size in _SIZES:
        n = size * (_TOKENS // _CHUNKS) * _CHUNKS
        for name, mask in masks(n).items():
            start = time.thread_time()
            balanced = Layout.balanced(mask, size)
            seconds = time.thread_time() - start
            layouts = {
                "balanced": balanced,
                "zigzag": Layout.zigzag(n, size),
                "contiguous": Layout.contiguous(n, size),
            }
            found = {kind: unevenness(mask, layout, size) for kind, layout in layouts.items()}
            yield {
                "kind": "balance",
                "mask": name,
                "seq_len": n,
                "gpus": size,
                "unevenness": found,
                "chunks": least(mask, size) if size <= 3 else None,
                "seconds": seconds,
            }


def main() -> None:
    record(rows(), make_parser(__doc__).parse_args().output, cpu_name())


if __name__ == "__main__":
    main()
