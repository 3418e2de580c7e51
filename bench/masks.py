"""The masks that are measured, by names that rows carry: "causal", "full", "documents 4K", "window
4096", "bee".

Documents are packed as in pretraining: lengths drawn from a log-normal distribution (sigma 1), none
longer than a quarter of the sequence, the last one cut where the sequence ends. A packing has the
same lengths in every process.

    4K, 1K, 256   documents of this mean length
    long          one document of three quarters of the sequence, and others of a mean of 1K

"bee" is what tokens see in a row of CPM-Bee's long-context training, and has a bias: see
bench/live_rows.py.

Try `python -c "from bench.masks import mask_of; print(mask_of('documents 4K', 65536))"`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
from collections.abc import Sequence

from bench import live_rows
from bmt_burst import Layout, Mask, Scores

KINDS = ("causal", "full", "documents", "window", "bee")
PACKINGS = {"4K": 4096, "1K": 1024, "256": 256, "long": 1024}  # mean lengths
_TRIES = 100


def kind(name: str) -> str:
    """What kind of mask a name means, one of KINDS."""
    return name.partition(" ")[0]


@functools.lru_cache(maxsize=64)
def mask_of(name: str, seq_len: int) -> Mask:
    """The mask called `name` on a sequence of so many tokens."""
    detail = name.partition(" ")[2]
    if kind(name) == "documents":
        return _packed(packing(detail, seq_len))
    if scores := scores_of(name, seq_len):
        return scores.mask
    return (
        Mask.window(seq_len, int(detail))
        if kind(name) == "window"
        else getattr(Mask, name)(seq_len)
    )


def scores_of(name: str, seq_len: int) -> Scores | None:
    """What a bias adds to the scores of the mask called `name`; None if there is no bias."""
    return live_rows.bee(seq_len) if name == "bee" else None


@functools.lru_cache(maxsize=64)
def share_of(name: str, seq_len: int, ranks: int) -> Mask:
    """What a kernel alone computes to be compared with a rank of several that share the mask: as
    many tokens, in whole.

    Of documents it is a packing of some of them, chosen so that there are nearly as many visible
    pairs as a rank has in the mean. One that is longer than a rank's tokens, or the last one, is as
    much shorter as it must be. For all other masks it is the same on a shorter sequence. Nothing of
    it is cut over kernel calls, which is what makes it a limit; but for "bee", whose slices need
    several.
    """
    tokens = seq_len // ranks
    if kind(name) != "documents" or ranks == 1:
        return mask_of(name, tokens)
    lengths, wanted = packing(name.partition(" ")[2], seq_len), mask_of(name, seq_len).area / ranks
    rng, longest = random.Random(name), max(lengths)
    candidates = []
    for _ in range(_TRIES):
        rng.shuffle(lengths)
        candidates += [_filled(lengths, tokens), _filled([longest, *lengths], tokens)]
    return min(map(_packed, candidates), key=lambda mask: abs(mask.area - wanted))


def packing(name: str, seq_len: int) -> list[int]:
    """Lengths of documents that fill a sequence."""
    rng = random.Random(f"{name} on {seq_len}")
    lengths = [3 * seq_len // 4] if name == "long" else []
    longest, left = max(seq_len // 4, 1), seq_len - sum(lengths)
    while left:
        drawn = round(rng.lognormvariate(math.log(PACKINGS[name]) - 0.5, 1.0))
        lengths.append(min(max(drawn, 1), longest, left))
        left -= lengths[-1]
    rng.shuffle(lengths)
    return lengths


def balanced(name: str, seq_len: int, size: int) -> Layout:
    """The layout under which ranks have equal work: zigzag or contiguous where that is so, else
    made for the mask.
    """
    if kind(name) in ("causal", "full"):
        return Layout.named({"causal": "zigzag", "full": "contiguous"}[name], seq_len, size)
    return _balanced(name, seq_len, size)


@functools.lru_cache(maxsize=64)
def _balanced(name: str, seq_len: int, size: int) -> Layout:
    return Layout.balanced(mask_of(name, seq_len), size)


def _packed(lengths: Sequence[int]) -> Mask:
    return Mask.documents(list(itertools.accumulate(lengths, initial=0)))


def _filled(lengths: Sequence[int], tokens: int) -> list[int]:
    """The first of some lengths, the last of them as much shorter as makes them `tokens` together."""
    taken = []
    for length in lengths:
        if not tokens:
            break
        taken.append(min(length, tokens))
        tokens -= taken[-1]
    return taken


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--masks, --documents and --windows."""
    parser.add_argument("--masks", nargs="+", choices=KINDS, default=["causal"])
    parser.add_argument(
        "--documents",
        nargs="+",
        choices=PACKINGS,
        default=list(PACKINGS),
        help="packings, for the mask of this name",
    )
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[4096], help="tokens, for the mask 'window'"
    )


def chosen(args: argparse.Namespace) -> list[str]:
    """The masks that were asked for."""
    details = {"documents": args.documents, "window": args.windows}
    return [
        f"{mask} {detail}".rstrip() for mask in args.masks for detail in details.get(mask, [""])
    ]
