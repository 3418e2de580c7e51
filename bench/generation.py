"""Measures a model's prefill and decoding over ranks, with random weights and tokens.

    torchrun --nproc-per-node 2 bench/generation.py --model minicpm4-8b \\
        --output bench/results/generation-mine.jsonl prefill:131072 new:524288 decode:1048576 \\
        decode:1048576:sparse

prefill:N  the tokens a second of a prompt of N tokens, in chunks of --chunk tokens a rank
new:N      the milliseconds of 128 new tokens after N tokens
decode:N   the milliseconds of a new token after N tokens

":sparse" takes InfLLM-V2. The keys and values of the N tokens before new ones are random. One new
token is computed by a CUDA graph where it can be, unless --no-graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import options
from bench.machine import Machine
from bmt_burst import Cache, Decoder, InfLLMV2, init_sequence_parallel
from bmt_burst.lightning.memory import Lightning, StateMemory
from bmt_burst.sparse.memory import SparseMemory
from models.config import PRESETS, CPMConfig
from models.cpm import CPM

_NEW = 128  # tokens of "new"
_STEPS = 24  # calls that are measured, after as many


class Bench:
    """A model on the ranks of a machine."""

    def __init__(self, config: CPMConfig, chunk: int, graph: bool | None, machine: Machine):
        self.config, self.machine, self.chunk, self.graph = config, machine, chunk, graph
        self.sp = init_sequence_parallel(machine.size)
        with torch.device("meta"):
            self.model = CPM(config, self.sp).to(machine.dtype)
        self.model.to_empty(device=machine.device)
        chance = torch.Generator(machine.device).manual_seed(0)
        for weight in self.model.parameters():
            weight.normal_(float(weight.dim() == 1), 0.02, generator=chance)

    def tokens(self, count: int) -> Tensor:
        """Make tokens (1, count), the same on all ranks."""
        chance = torch.Generator().manual_seed(count)
        ids = torch.randint(self.config.vocab_size, (1, count), generator=chance)
        return ids.to(self.machine.device)

    def measure(self, what: str, length: int) -> dict:
        """Return what was measured after or of `length` tokens."""
        cache = Cache(self.sp, self.config.num_layers, length + 2 * _STEPS * _NEW)
        if what == "prefill":
            seconds = self.prefill(cache, length)
            return {"seconds": seconds, "tokens_per_s": length / seconds}
        self.fill(cache, length)
        count, decoder = _NEW if what == "new" else 1, Decoder(self.model, cache, self.graph)
        times = [self.compute(decoder, count) for _ in range(2 * _STEPS)][_STEPS:]
        return {"new_tokens": count, "ms": statistics.median(times) * 1e3}

    def prefill(self, cache: Cache, length: int) -> float:
        """Return the seconds of a prompt."""
        x, positions = self.tokens(length), torch.arange(length, device=self.machine.device)
        self.machine.settle()
        start = time.perf_counter()
        for part in cache.prefill(length, self.chunk * self.machine.size):
            logits = self.model(part.shard(x), part.shard(positions, 0), cache=part)
        assert logits.isfinite().all()
        return self.machine.slowest(time.perf_counter() - start)

    def fill(self, cache: Cache, length: int) -> None:
        """Fill the cache with random keys, values and states, without the time of a prefill."""
        of, chance = self.config, torch.Generator(self.machine.device).manual_seed(0)
        like = {"device": self.machine.device, "dtype": self.machine.dtype}
        for part in cache.prefill(length, self.chunk * self.machine.size):
            tokens = part.span.stop - part.span.start
            q = torch.empty(1, tokens, of.num_heads, of.head_dim, **like)
            for layer, block in enumerate(self.model.layers):
                kind = block.self_attn.kind
                heads = of.num_heads if isinstance(kind, Lightning) else of.num_kv_heads
                keys = torch.randn(2, 1, tokens, heads, of.head_dim, **like)
                memory, turn = part.chunks.take_turn(part, layer, kind, q, *keys)
                if isinstance(memory, StateMemory):
                    memory.keep(turn, q, *keys)
                    shape = 1, heads, of.head_dim, of.head_dim
                    memory.past.final = torch.randn(shape, generator=chance, device=q.device)
                    continue
                memory.put(turn, *keys)
                if isinstance(memory, SparseMemory):
                    shape = 1, part.positions[1] - part.positions[0], *keys.shape[3:]
                    # equal on all ranks
                    memory.sums_of_keys.extend(torch.randn(*shape, generator=chance, **like))

    def compute(self, decoder: Decoder, count: int) -> float:
        """Return the seconds of new tokens, with the choice of the next one."""
        x = self.tokens(count)
        self.machine.settle()
        start = time.perf_counter()
        logits = decoder(x)
        int(logits[0, -1].argmax())
        return self.machine.slowest(time.perf_counter() - start)


@torch.inference_mode()
def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure all cases. Yield their rows."""
    dense = options.first_layers(PRESETS[args.model], args.layers)
    for case in args.cases:
        what, length, *sparse = case.split(":")
        config = dataclasses.replace(dense, sparse=InfLLMV2() if sparse else None)
        machine.at = case
        bench = Bench(config, args.chunk, False if args.no_graph else None, machine)
        row = {"kind": "generation", "case": what, "tokens": int(length), "model": args.model}
        row |= {"layers": config.num_layers, "gpus": machine.size, "chunk": args.chunk}
        row |= {"sparse": config.sparse and config.sparse.to_dict()}
        yield row | bench.measure(what, int(length))
        del bench
        gc.collect()
        if machine.cuda:
            torch.cuda.empty_cache()


def _check_case(text: str) -> str:
    if not re.fullmatch(r"(prefill|new|decode):[1-9]\d*(:sparse)?", text):
        expected = "prefill, new or decode, and tokens, as in decode:4096 or decode:4096:sparse"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return text


def main() -> None:
    parser = options.make_parser(__doc__)
    parser.add_argument("--model", choices=tuple(PRESETS), default="minicpm4-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--chunk", type=int, default=16384, help="tokens of a rank in a chunk")
    parser.add_argument("--no-graph", action="store_true", help="decode without a CUDA graph")
    parser.add_argument("cases", nargs="+", type=_check_case, metavar="WHAT:TOKENS[:sparse]")
    args = parser.parse_args()
    options.check_layers(parser, args)
    machine = Machine()
    if short := [case for case in args.cases if int(case.split(":")[1]) < machine.size]:
        parser.error(f"expected a token for each of {machine.size} ranks, got {short[0]}")
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
