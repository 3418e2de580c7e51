"""Options that several benchmarks have."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from bench import masks
from bench.implementations import Case
from bmt_burst import InfLLMV2, kernels
from models.config import PRESETS, CPMConfig


def make_parser(
    doc: str | None, output: str = "file of JSON lines to append to"
) -> argparse.ArgumentParser:
    """Make the parser of a script with this docstring. It has the option --output.

    Its options with `type=int` take whole numbers, 1 or more. Use `at_least` for other limits.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.register("type", int, at_least(1))
    parser.add_argument("--output", type=_output_file, required=True, help=output)
    return parser


def _output_file(text: str) -> Path:
    """Return the path of a file that can be written, in a folder that exists or is made now."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {text!r}")
    return path


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of options that takes whole numbers, `least` or more."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (number := int(text)) >= least:
                return number
        raise argparse.ArgumentTypeError(f"expected a whole number, {least} or more, got {text!r}")

    return read


def add_kernel(parser: argparse.ArgumentParser) -> None:
    """Add the option --kernel."""
    parser.add_argument("--kernel", choices=("auto", "cuda", *kernels.names()), default="auto")


def parse_sparse(text: str) -> InfLLMV2 | None:
    """Parse the JSON of sparse attention, as pretrain.py has it."""
    try:
        values = json.loads(text)
        return values if values is None else InfLLMV2.from_dict(values)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def check_ranks(
    parser: argparse.ArgumentParser, name: str, ranks: Iterable[int], size: int
) -> None:
    """End with an error unless the ranks of option `name` are some of a ring of --size ranks."""
    if wrong := [rank for rank in ranks if rank >= size]:
        parser.error(f"argument {name}: expected ranks below --size, {size}, got {wrong}")


def check_layers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with an error if --layers is more than --model has."""
    if (args.layers or 0) > (most := PRESETS[args.model].num_layers):
        parser.error(f"argument --layers: expected at most {most}, got {args.layers}")


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
    parser.add_argument("--masks", nargs="+", choices=kinds, default=["causal"])
    parser.add_argument(
        "--documents",
        nargs="+",
        choices=masks.PACKINGS,
        default=list(masks.PACKINGS),
        help="packings, for the mask of this name",
    )
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[4096], help="tokens, for the mask 'window'"
    )
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
    q, _, kv = text.partition(":")
    if not (q.isdecimal() and kv.isdecimal() and int(kv) and int(q) and int(q) % int(kv) == 0):
        expected = "query heads and kv heads that divide them, as in 32:8"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return int(q), int(kv)


def cases(args: argparse.Namespace, size: int) -> Iterator[Case]:
    """Yield the requested cases on `size` ranks, with the kernel of --kernel if there is one."""
    kernel = getattr(args, "kernel", "auto")
    shapes = [(tokens, 1) for tokens in args.tokens_per_gpu]
    shapes += [(args.tokens_per_gpu[0], batch) for batch in args.batches]
    for mask, (heads, kv_heads) in itertools.product(masks.chosen(args), args.heads):
        for tokens, batch in shapes:
            yield Case(tokens * size, batch, heads, kv_heads, args.head_dim, mask, kernel)
