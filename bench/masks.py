"""The masks that are measured: "causal", "full", "documents 4K", "window 4096", "bee", for example.

Documents are packed as in pretraining. Their lengths are drawn from a distribution. None is longer
than a quarter of the sequence, and the last one is cut at its end. A packing has the same lengths
in every process.

    4K, 1K, 256   log-normal lengths of this mean, sigma 1
    700           log-normal lengths of this mean, sigma 1.3: many short ones and a few long ones
    long          one document of three quarters of the sequence, and others as in "1K"
    magi          lengths of a dataset that MagiAttention's benchmark samples, up to 192K. A longer
                  one than a quarter of the sequence is cut into several documents.
                  https://sandai-org.github.io/MagiAttention/docs/main/blog/cp_benchmark.html

"bee" is a row of CPM-Bee's long-context training, and has a bias: see bench/live_rows.py.

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
PACKINGS = {  # means and sigmas of log-normal lengths, or None for _BINS
    "4K": (4096, 1.0),
    "1K": (1024, 1.0),
    "256": (256, 1.0),
    "700": (700, 1.3),
    "long": (1024, 1.0),
    "magi": None,
}
# MagiAttention's: (most tokens of a bin, % of the documents in it), uniform within a bin
_BINS = (
    *((10, 0.2), (50, 2.9), (100, 5.2), (200, 10.2), (500, 28.2)),
    *((1 << 10, 24.6), (2 << 10, 15.7), (4 << 10, 7.3), (8 << 10, 3.1), (16 << 10, 1.3)),
    *((32 << 10, 0.85), (64 << 10, 0.14), (128 << 10, 0.17), (192 << 10, 0.14)),
)
_TRIES = 100


def kind(name: str) -> str:
    """Return the kind of a mask, one of KINDS."""
    return name.partition(" ")[0]


@functools.lru_cache(maxsize=64)
def mask_of(name: str, seq_len: int) -> Mask:
    """Make the mask `name` of `seq_len` tokens."""
    detail = name.partition(" ")[2]
    if kind(name) == "documents":
        return _packed(packing(detail, seq_len))
    if scores := scores_of(name, seq_len):
        return scores.mask
    if kind(name) == "window":
        return Mask.window(seq_len, int(detail))
    return {"causal": Mask.causal, "full": Mask.full}[name](seq_len)


def scores_of(name: str, seq_len: int) -> Scores | None:
    """Make the scores of a mask with a bias, or return None for others."""
    return live_rows.bee(seq_len) if name == "bee" else None


@functools.lru_cache(maxsize=64)
def share_of(name: str, seq_len: int, ranks: int) -> Mask:
    """Make the mask of a kernel alone that is compared with one of several ranks.

    It has a rank's number of tokens. For documents it is a packing of some of them, chosen to have
    nearly a rank's mean number of visible pairs. The last document, or one that is longer than a
    rank's tokens, is cut. Other masks are the same on a shorter sequence. It is a limit, because
    one kernel call computes all of it, except for "bee", which needs several for its slices.
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
    """Draw lengths of documents that fill a sequence."""
    rng = random.Random(f"{name} on {seq_len}")
    lengths = [3 * seq_len // 4] if name == "long" else []
    longest, left = max(seq_len // 4, 1), seq_len - sum(lengths)
    while left:
        lengths.append(min(_draw(name, longest, rng), left))
        left -= lengths[-1]
    rng.shuffle(lengths)
    return lengths


def draw_document(longest: int, rng: random.Random) -> int:
    """Draw the length of a document from MagiAttention's bins that end at `longest` or before."""
    ends, shares = zip(*(one for one in _BINS if one[0] <= longest), strict=True)
    (number,) = rng.choices(range(len(ends)), shares)
    return rng.randint(ends[number - 1] + 1 if number else 1, ends[number])


def draw_piece(longest: int, rng: random.Random) -> int:
    """Draw the length of a piece of a document, as MagiAttention's benchmark does.

    It cuts all documents into pieces of `longest` tokens and a rest, and shuffles the pieces. So a
    document is drawn as often as it has pieces.
    """
    most = -(-_BINS[-1][0] // longest)
    while True:
        length = draw_document(_BINS[-1][0], rng)
        left = length - rng.randrange(most) * longest
        if left > 0:
            return min(left, longest)


def _draw(name: str, longest: int, rng: random.Random) -> int:
    """Draw the length of a document, or of a piece of one, at most `longest`."""
    if (parameters := PACKINGS[name]) is None:
        return draw_piece(longest, rng)
    mean, sigma = parameters
    drawn = round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))
    return min(max(drawn, 1), longest)


def balanced(name: str, seq_len: int, size: int) -> Layout:
    """Return a layout with equal work for all ranks.

    It is zigzag or contiguous if these are balanced, otherwise it is made for the mask.
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
    """Return the first lengths, the last one cut, that sum to `tokens`."""
    taken = []
    for length in lengths:
        if not tokens:
            break
        taken.append(min(length, tokens))
        tokens -= taken[-1]
    return taken


def chosen(args: argparse.Namespace) -> list[str]:
    """Return the names of the requested masks."""
    details = {"documents": args.documents, "window": args.windows}
    return [
        f"{mask} {detail}".rstrip() for mask in args.masks for detail in details.get(mask, [""])
    ]
