"""A synthetic row of CPM-Bee's data, as a long-context run packs it.

A row has a few instances, or spans, which do not see each other. Their lengths are drawn from a
log-normal distribution (sigma 0.5) with a mean of a quarter of the row. None is longer than half of
the row. Short instances would make a short context of a long row, and a single one would not show
packing. A rest of less than a 32nd of the row is padding. The shares are the same for every length,
so that rows differ only in scale.

An instance is a tree of nine segments as CPM-Bee's data has them, keys and their values below a
root:

    {"document": 70 to 90 % of the tokens, "notes": the rest,
     "prompt": 100 tokens, "<ans>": 5 to 20 %, predicted}

The longest span also has two samples in context, a quarter of it each. Their answers are given.

Try `python -c "from bench.live_rows import instances; print(instances(65536))"`.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bmt_burst import Scores
from models.cpm_bee import BeeConfig, bee_scores
from models.cpm_live.config import PRESETS

BEE = PRESETS["cpm-bee-10b"]

_SIGMA = 0.5
# of the segments: root, four keys, each with a value below it
_PARENTS = (None, 0, 1, 0, 3, 0, 5, 0, 7)
_ANSWER = 8
_ROOT, _KEY, _PROMPT = 1, 3, 100  # tokens, of short instances fewer or none
_DEEPEST = 8  # of CPM-Bee's trees


class Instance(NamedTuple):
    """A tree of segments in a row: its span, its sample, and the tokens of each segment."""

    span: int
    sample: int
    segments: tuple[int, ...]


@functools.lru_cache(maxsize=8)
def instances(seq_len: int) -> tuple[Instance, ...]:
    """Return the instances of a row of `seq_len` tokens."""
    rng, found = random.Random("a packed row"), []
    shares = _shares(rng)
    for span, share in enumerate(shares):
        parts = (0.5, 0.25, 0.25) if share == max(shares) else (1.0,)
        for sample, part in enumerate(parts):
            found.append(Instance(span, sample, _segments(int(share * part * seq_len), rng)))
    return tuple(found)


def _shares(rng: random.Random) -> list[float]:
    """Draw the shares of the spans in a row."""
    shares, left = [], 1.0
    while left >= 1 / 32:
        drawn = rng.lognormvariate(math.log(1 / 4) - _SIGMA**2 / 2, _SIGMA)
        shares.append(min(drawn, 1 / 2, left))
        left -= shares[-1]
    return shares


def _segments(tokens: int, rng: random.Random) -> tuple[int, ...]:
    """Draw the tokens of an instance's segments.

    In short instances keys and prompt are shorter, or missing.
    """
    text, answer = rng.uniform(0.7, 0.9), rng.uniform(0.05, 0.2)
    root, key, prompt = (min(most, tokens // 20) for most in (_ROOT, _KEY, _PROMPT))
    answer = int(answer * tokens)
    left = tokens - root - 4 * key - prompt - answer
    text = min(int(text * tokens), left)
    return root, key, text, key, left - text, key, prompt, key, answer


def bee_fields(seq_len: int) -> dict[str, Tensor]:
    """Make the arguments of `bee_scores` after the configuration."""
    runs, offsets = [], itertools.count(0, len(_PARENTS) ** 2)
    packed = instances(seq_len)
    for (span, sample, lengths), offset in zip(packed, offsets, strict=False):
        for segment, tokens in enumerate(lengths):
            context = segment != _ANSWER or sample > 0
            runs.append((tokens, context, sample, len(_PARENTS), segment, offset, span))
    tokens, *numbers = torch.tensor(runs).unbind(1)
    length = int(tokens.sum())
    row = [F.pad(x.repeat_interleave(tokens), (0, seq_len - length)) for x in numbers]
    names = "context", "sample_ids", "num_segments", "segment", "segment_rel_offset", "span"
    fields = dict(zip(names, row, strict=True))
    fields["context"] = fields["context"].bool()
    return {
        "length": torch.tensor(length),
        **fields,
        "segment_rel": _relations().repeat(len(packed)),
    }


def _relations() -> Tensor:
    """Compute the relations (81,) of each two segments of the tree.

    It is 0 for the same segment, otherwise 1 + 8 * levels up + levels down, which is 2 or more.
    """
    paths = [_path(segment) for segment in range(len(_PARENTS))]
    found = []
    for a, b in itertools.product(paths, paths):
        shared = sum(x == y for x, y in zip(a, b, strict=False))
        up, down = len(a) - shared, len(b) - shared
        found.append(1 + _DEEPEST * up + down if up or down else 0)
    return torch.tensor(found)


def _path(segment: int | None) -> list[int]:
    return [] if segment is None else [*_path(_PARENTS[segment]), segment]


@functools.lru_cache(maxsize=8)
def bee(seq_len: int, config: BeeConfig = BEE) -> Scores:
    """Compute the row's scores for a Bee.

    By default it is cpm-bee-10b: 256 rows by distance, up to 2048, and 256 by segments.
    """
    return bee_scores(config, **bee_fields(seq_len))
