"""Options that several benchmarks have."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench import masks
from bench.implementations import Case
from models.config import CPMConfig


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Make the parser of a script with this docstring. It has the option --output."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="file of JSON lines to append to"
    )
    return parser


def first_layers(model: CPMConfig, count: int | None) -> CPMConfig:
    """Return a model with so many of its first layers. None: all."""
    if count is None:
        return model
    return dataclasses.replace(
        model, num_layers=count, mixers=model.mixers and model.mixers[:count]
    )


def add_cases(
    parser: argparse.ArgumentParser,
    heads: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    kinds: Sequence[str] = masks.KINDS,
) -> None:
    """Add the options of `cases`, with defaults for GPUs. Without GPUs cases are tiny.

    kinds  the kinds of masks that can be measured
    """
    cuda = torch.cuda.is_available()
    masks.add_arguments(parser, kinds)
    pairs = list(heads) if cuda else [(4, 2)]
    parser.add_argument("--heads", type=parse_heads, nargs="+", default=pairs, metavar="Q:KV")
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 16)
    lengths = list(tokens) if cuda else [64]
    parser.add_argument("--tokens-per-gpu", type=int, nargs="+", default=lengths)
    parser.add_argument(
        "--batches",
        type=int,
        nargs="*",
        default=[],
        help="further batch sizes, at the first length",
    )


def parse_heads(text: str) -> tuple[int, int]:
    """Parse numbers of query and kv heads."""
    q, kv = text.split(":")
    return int(q), int(kv)


def cases(args: argparse.Namespace, size: int) -> Iterator[Case]:
    """Yield the requested cases on `size` ranks, with the kernel of --kernel if there is one."""
    kernel = getattr(args, "kernel", "auto")
    shapes = [(tokens, 1) for tokens in args.tokens_per_gpu]
    shapes += [(args.tokens_per_gpu[0], batch) for batch in args.batches]
    for mask, (heads, kv_heads) in itertools.product(masks.chosen(args), args.heads):
        for tokens, batch in shapes:
            yield Case(tokens * size, batch, heads, kv_heads, args.head_dim, mask, kernel)
