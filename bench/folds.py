"""Measures a policy's forward and backward on the completions of a prompt, as separate rows and as
one folded sequence.

    torchrun --nproc-per-node 2 bench/folds.py --model minicpm4-8b --layers 8 \\
        --prompt 32768 --completions 16 --length 2048 --output bench/results/folds-mine.jsonl

All ranks share each sequence. Separate rows are computed one after the other, which needs the least
memory; their gradients add up. The loss is the mean log-probability of the completions, times a
constant for each row, as in a policy gradient. Rows of JSON have the seconds of the slowest rank
(medians of `--rounds` after one), tokens of completions a second, the peak of memory with weights
and gradients but no optimizer, and the relative difference of the log-probabilities (L2) and of the
gradient's norm from those of separate rows. Weights are random, in bf16 on GPUs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import options
from bench.machine import GIB, Machine
from bmt_burst import fold_prefixes, init_sequence_parallel
from bmt_burst.folding import Folded
from models.blocks import CHECKPOINTING, Saving
from models.config import PRESETS
from models.cpm import CPM


class Policy:
    """A model, and the rows whose log-probabilities it is trained on."""

    def __init__(self, args: argparse.Namespace, machine: Machine):
        self.machine = machine
        self.sp = init_sequence_parallel(machine.size)
        config = options.first_layers(PRESETS[args.model], args.layers)
        torch.manual_seed(0)  # all ranks have the same weights and rows
        torch.set_default_dtype(machine.dtype)
        with machine.device:
            self.model = CPM(config, self.sp, Saving(args.checkpointing, tile=args.mlp_tile))
        torch.set_default_dtype(torch.float32)
        generator = torch.Generator(machine.device).manual_seed(0)
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                self.model.init_parameter(name, weight, generator)
        prompt = torch.randint(config.vocab_size, (args.prompt,))
        ends = torch.randint(config.vocab_size, (args.completions, args.length))
        self.rows = [torch.cat([prompt, end]) for end in ends]
        self.prompt, self.count = args.prompt, ends.numel()

    def logprobs(self, folded: Folded) -> list[Tensor]:
        """Compute the log-probabilities of each row's completion."""
        batch, device = self.sp.sequence(folded.mask), self.machine.device
        tokens, targets = (batch.shard(x.to(device)) for x in (folded.tokens, folded.targets))
        positions = batch.positions().to(device)
        logprobs, _ = self.model(tokens, positions, targets, cache=batch, logprobs=True)
        return [row[self.prompt - 1 : -1] for row in folded.unfold(batch.unshard(logprobs))]

    def step(self, groups: list[list[Tensor]]) -> tuple[Tensor, float]:
        """Compute the gradient, a group of rows at a time. Return all log-probabilities and the
        gradient's norm.
        """
        self.model.zero_grad()
        found = list[Tensor]()
        for rows in groups:
            new = self.logprobs(fold_prefixes(rows))
            weighted = [(1.0 + (len(found) + i) % 3) * row.sum() for i, row in enumerate(new)]
            loss = -torch.stack(weighted).sum() / self.count
            (loss / self.sp.size).backward()  # unshard's backward adds up the ranks' gradients
            found += [row.detach() for row in new]
        norms = list[Tensor]()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            norms.append(parameter.grad.float().norm())
        return torch.cat(found), float(torch.stack(norms).norm())


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure all ways. Yield their rows."""
    policy = Policy(args, machine)
    facts = {
        "model": args.model,
        "layers": policy.model.config.num_layers,
        "gpus": machine.size,
        "checkpointing": args.checkpointing,
        "mlp_tile": args.mlp_tile,
        **{name: getattr(args, name) for name in ("prompt", "completions", "length")},
    }
    ways = {"separate": [[row] for row in policy.rows], "folded": [policy.rows]}
    first: tuple[Tensor, float] | None = None
    for way, groups in ways.items():
        machine.at = way
        step = functools.partial(policy.step, groups)
        logprobs, norm = step()
        first = first or (logprobs, norm)
        differences = {
            "logprob_error": float((logprobs - first[0]).norm() / first[0].norm()),
            "norm_difference": abs(norm / first[1] - 1),
        }
        if machine.cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(args.rounds):
            seconds.append(machine.once_ms(step) / 1e3)
            machine.report(f"{seconds[-1]:.2f} s")
        peak = torch.cuda.max_memory_allocated() / GIB if machine.cuda else None
        median = statistics.median(seconds)
        yield {
            "kind": "folds",
            "way": way,
            **facts,
            "tokens": sum(fold_prefixes(rows).seq_len for rows in groups),
            "step_s": median,
            "completion_tokens_per_s": policy.count / median,
            "peak_gib": peak and machine.slowest(peak),
            **differences,
        }


def main() -> None:
    parser, cuda = options.make_parser(__doc__), torch.cuda.is_available()
    models = [name for name, config in PRESETS.items() if not config.mixers]  # dense
    parser.add_argument("--model", choices=models, default="minicpm4-0.5b" if cuda else "cpm-tiny")
    parser.add_argument("--layers", type=int, help="fewer layers than the preset has")
    parser.add_argument("--prompt", type=int, default=32768 if cuda else 64, help="its tokens")
    parser.add_argument("--completions", type=int, default=16 if cuda else 3)
    parser.add_argument(
        "--length", type=int, default=2048 if cuda else 16, help="tokens of a completion"
    )
    parser.add_argument("--checkpointing", choices=CHECKPOINTING, default="full")
    parser.add_argument("--mlp-tile", type=int, help="as of pretrain.py")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    options.check_layers(parser, args)
    machine = Machine()
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
