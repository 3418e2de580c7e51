"""Measures values with a head size of their own against values that are padded with zeros.

    torchrun --nproc-per-node 1 bench/value_heads.py --output bench/results/value-heads.jsonl

Both are burst_attn_func on one GPU, in turns, with the kernel "fa4". Head sizes that are not in
fa4._VALUE_SIZES_HOPPER are padded in both: add them there to measure them. Each row has medians of
rounds, in milliseconds: of a forward, and of a forward and backward.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.machine import Machine, record
from bmt_burst import burst_attn_func

_WARM, _ROUNDS = 4, 12
# heads, and the head sizes of q and of v: DeepSeek-V3's with a quarter of its heads, and MiniCPM3's
_CASES = ((32, 192, 128), (40, 96, 64))


def _attend(padded: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return out (B, S, H, D_v), of v as it is or padded to the head size of q."""
    values = pad(v, (0, q.shape[-1] - v.shape[-1])) if padded else v
    out = burst_attn_func(q, k, values, causal=True, flash="fa4")
    return out[..., : v.shape[-1]]


def _both(padded: bool, tensors: list[Tensor], dout: Tensor) -> None:
    torch.autograd.grad(_attend(padded, *tensors), tensors, dout)


def _milliseconds(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def run(args: argparse.Namespace) -> Iterator[dict]:
    """Measure all cases. Yield their rows."""
    for (heads, size, value_size), tokens in itertools.product(_CASES, args.tokens):
        shapes = [(1, tokens, heads, x) for x in (size, size, value_size, value_size)]
        options = {"device": "cuda", "dtype": torch.bfloat16}
        *tensors, dout = (torch.randn(shape, **options) for shape in shapes)
        tensors = [x.requires_grad_() for x in tensors]
        found: dict[tuple[bool, str], list[float]] = {}
        for _ in range(_WARM + _ROUNDS):
            for padded in (False, True):
                forward = partial(_attend, padded, *(x.detach() for x in tensors))
                both = partial(_both, padded, tensors, dout)
                for name, work in (("fwd_ms", forward), ("fwd_bwd_ms", both)):
                    found.setdefault((padded, name), []).append(_milliseconds(work))
        for padded in (False, True):
            times = {
                name: statistics.median(found[padded, name][_WARM:])
                for name in ("fwd_ms", "fwd_bwd_ms")
            }
            case = {"seq_len": tokens, "heads": heads, "head_dim": size, "value_dim": value_size}
            yield {"kind": "value heads", "padded": padded, "kernel": "fa4", **case, **times}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument(
        "--output", type=Path, required=True, help="file of JSON lines to append to"
    )
    args, machine = parser.parse_args(), Machine()
    if not machine.cuda or machine.size != 1:
        parser.error("one process measures it, on a GPU")
    record(run(args), args.output, machine.name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
