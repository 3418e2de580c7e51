"""Measures the forward of a chunk, once with keys and values sent and once with queries sent.

    torchrun --nproc-per-node 2 bench/sides.py --output bench/results/sides-mine.jsonl

Each rank has a share of the queries, which are the last of all tokens, and of the keys. Rows have
the slowest rank's milliseconds of both ways. Their outputs must be equal up to rounding.

With NCCL_HOSTID, ranks of one machine count as hosts of their own, which sockets connect.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import options
from bench.attention import check_equal
from bench.machine import Machine
from bmt_burst import Layout, Mask, burst_attn_func
from bmt_burst.strategies import GROUP_BYTES, ring
from bmt_burst.strategies.ring.payload import KeysValues, QueriesOnly

_PAYLOADS = {"kv": KeysValues(returns=False), "q": QueriesOnly()}


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure all cases. Yield their rows."""
    choose = ring.forward_payload
    for (heads, kv_heads), queries, times in itertools.product(
        args.heads, args.tokens_per_gpu, args.times
    ):
        machine.at = f"{heads}:{kv_heads}, {queries} queries, {times} times as many keys"
        like = {"device": machine.device, "dtype": machine.dtype}
        q = torch.randn(1, queries, heads, args.head_dim, **like)
        k, v = torch.randn(2, 1, queries * times, kv_heads, args.head_dim, **like)
        total = queries * times * machine.size
        chunks = Layout.chunks(total, machine.size, queries * machine.size)
        named = {
            "mask": Mask.causal(queries * machine.size, total),
            "layout": chunks.layouts[-1],
            "kv_layout": chunks.since(0, len(chunks.spans) - 1),
        }
        outs, ms = {}, {}
        for number, (side, payload) in enumerate(_PAYLOADS.items()):
            # another size of stages is another plan, which does not take the kept one's side
            named["group_bytes"] = GROUP_BYTES + number
            forward = functools.partial(burst_attn_func, q, k, v, **named)
            ring.forward_payload = lambda _, payload=payload: payload
            try:
                outs[side] = forward()
                ms[side] = machine.time_ms(forward, machine.once_ms(forward))
            finally:
                ring.forward_payload = choose
        check_equal("out", [outs["q"]], [outs["kv"]], "the two sides")
        facts = {"heads": heads, "kv_heads": kv_heads, "queries": queries, "keys": queries * times}
        yield {"kind": "sides", **facts, "gpus": machine.size, "hosts": machine.hosts, "ms": ms}


def main() -> None:
    parser, cuda = options.make_parser(__doc__), torch.cuda.is_available()
    parser.add_argument("--heads", type=options.parse_heads, nargs="+", metavar="Q:KV")
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 16)
    parser.add_argument("--tokens-per-gpu", type=int, nargs="+", help="queries of a rank")
    parser.add_argument("--times", type=int, nargs="+", help="keys of a rank for each query")
    parser.set_defaults(
        heads=[(32, 2), (32, 8)] if cuda else [(4, 2)],
        tokens_per_gpu=[8192, 16384] if cuda else [16],
        times=[16, 24, 48] if cuda else [8],
    )
    args, machine = parser.parse_args(), Machine()
    with torch.inference_mode():
        machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
