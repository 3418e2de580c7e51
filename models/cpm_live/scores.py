"""The masks and biases of CPM-Live's rows: which pairs are visible, and their rows of the table.

A row is packed with spans, then padding. Tokens see only their own span. Some tokens of a span are
context, which all its tokens see. The others are to be predicted: they see themselves and earlier
tokens to be predicted. A Bee's span may have samples next to the main one. These see only
themselves, and the main sample sees them.

Letters: S tokens of a whole row.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmt_burst import Mask, Scores, Slice
from bmt_burst.scores import BY_DISTANCE, distance_rows
from bmt_burst.sequence.span import merged

from .config import AntConfig, BeeConfig

# of a row, between tokens to be predicted; with this many, planning takes minutes
MOST_SLICES = 1 << 18


class _Run(NamedTuple):
    """Neighbouring tokens that see the same tokens, and that the same tokens see."""

    span: int
    sample: int
    context: bool
    tokens: tuple[int, int]


def bee_scores(
    config: BeeConfig,
    length: int | Tensor,
    context: Tensor,
    sample_ids: Tensor,
    num_segments: Tensor,
    segment: Tensor,
    segment_rel_offset: Tensor,
    segment_rel: Tensor,
    span: Tensor,
) -> Scores:
    """Compute the scores of one whole row of CPM-Bee.

    All tensors are on the CPU. They are integers of any dtype, except `context`.

    length              tokens of the row before its padding
    context             (S,) bool: context tokens see only context tokens
    sample_ids          (S,), below S: 0 is the span's main sample, which sees the others
    num_segments        (S,): number n of segments of the token's tree
    segment             (S,): the token's segment
    segment_rel_offset  (S,): where the tree's n x n entries begin in segment_rel
    segment_rel         (R,): for each tree and its segments [query, key] 0 for the same segment,
                        otherwise 2 or more
    span                (S,): tokens see only their own span

    With N buckets of distances, pairs of one segment have a row by distance, pairs of two samples
    row N, and pairs of two segments of one tree row N - 1 + segment_rel. The cost is linear in S,
    plus the slices of the mask: about p^2 / 2 for a span with p separate runs of tokens that are
    not context. Raises ValueError for tensors of other lengths, for entries out of range, and for
    more than 2^18 slices.
    """
    fields = {"context": context, "sample_ids": sample_ids, "num_segments": num_segments}
    fields |= {"segment": segment, "segment_rel_offset": segment_rel_offset, "span": span}
    length, seq_len = _check_row(length, fields), len(context)
    real = torch.arange(seq_len) < length
    buckets = config.position_bias_num_buckets
    pairs = (segment_rel.int() + (buckets - 1)).where(segment_rel != 0, BY_DISTANCE)
    _check_range("segment_rel", segment_rel, config.position_bias_num_segment_buckets + 1)
    _check_range("segment", segment[:length], num_segments[:length])
    _check_range("sample_ids", sample_ids, seq_len)
    return Scores(
        mask=_mask(seq_len, span[:length], sample_ids[:length], context[:length]),
        group=_number_samples(span, sample_ids).where(real, -1),
        base=_zero_padding(segment.long() * num_segments + segment_rel_offset, real),
        segment=_zero_padding(segment, real),
        pairs=pairs if len(pairs) else torch.tensor([BY_DISTANCE], dtype=torch.int32),
        distances=_distances(buckets, config.position_bias_max_distance),
        other=buckets,
    )


def ant_scores(
    config: AntConfig, length: int | Tensor, context: Tensor, segment: Tensor, span: Tensor
) -> Scores:
    """Compute the scores of one whole row of CPM-Ant.

    Arguments, costs and errors are those of `bee_scores`, except `segment`, the type of each
    token's segment. With N buckets of distances, pairs of one type have a row by distance, others
    row N + segment_types * type of the query + type of the key. If single tokens all over a span
    are hidden, as in masked language modelling, there are many slices.
    """
    length = _check_row(length, {"context": context, "segment": segment, "span": span})
    seq_len = len(context)
    real = torch.arange(seq_len) < length
    buckets, types = config.position_bias_num_buckets, config.segment_types
    _check_range("segment", segment[:length], types)
    pairs = torch.arange(buckets, buckets + types**2, dtype=torch.int32).view(types, types)
    return Scores(
        mask=_mask(seq_len, span[:length], torch.zeros_like(span[:length]), context[:length]),
        group=torch.zeros(seq_len, dtype=torch.int32),
        base=_zero_padding(segment * types, real),
        segment=_zero_padding(segment, real),
        pairs=pairs.fill_diagonal_(BY_DISTANCE).flatten(),
        distances=_distances(buckets, config.position_bias_max_distance),
        other=0,  # there are no others
    )


def slices_of(runs: Any) -> Any:
    """Return the slices of a span with `runs` runs of tokens to be predicted, also an array."""
    return runs * (runs + 1) // 2


def _mask(seq_len: int, span: Tensor, sample: Tensor, context: Tensor) -> Mask:
    """Make the mask of a row of `seq_len` tokens. The tensors end before the padding."""
    by_span: dict[int, list[_Run]] = defaultdict(list)
    for run in _runs(span, sample, context):
        by_span[run.span].append(run)
    predicted = [sum(not run.context for run in runs) for runs in by_span.values()]
    if sum(map(slices_of, predicted)) > MOST_SLICES:
        raise ValueError(
            f"expected a mask of at most {MOST_SLICES} slices, got more for {sum(predicted)} runs "
            f"of tokens to be predicted, up to {max(predicted)} in a span: predict fewer and "
            "longer runs, or cut shorter spans"
        )
    slices = itertools.chain.from_iterable(map(_slices_of_span, by_span.values()))
    return Mask(seq_len, tuple(slices))


def _runs(*numbers: Tensor) -> Iterator[_Run]:
    """Find the runs of tokens with equal numbers (span, sample, context)."""
    if not len(numbers[0]):
        return
    stacked = torch.stack([x.long() for x in numbers])
    changes = (stacked[:, 1:] != stacked[:, :-1]).any(0).nonzero().flatten() + 1
    bounds = [0, *changes.tolist(), stacked.shape[1]]
    found = stacked[:, bounds[:-1]].T.tolist()
    for (span, sample, context), tokens in zip(found, itertools.pairwise(bounds), strict=True):
        yield _Run(span, sample, bool(context), tokens)


def _slices_of_span(runs: list[_Run]) -> Iterator[Slice]:
    """Make a span's slices: a sample and sample 0 see its context, others also earlier others."""
    for sample in {run.sample for run in runs}:
        queries = [run for run in runs if run.sample == sample]
        keys = runs if sample == 0 else queries
        context = merged(key.tokens for key in keys if key.context)
        for pair in itertools.product(merged(query.tokens for query in queries), context):
            yield Slice(*pair)
        others = [key.tokens for key in keys if not key.context]
        for query in queries:
            if not query.context:
                before = merged(span for span in others if span[1] <= query.tokens[0])
                yield from (Slice(query.tokens, span) for span in before)
                yield Slice(query.tokens, query.tokens, 0)


def _number_samples(span: Tensor, sample: Tensor) -> Tensor:
    """Number the samples of all spans: (S,) int32."""
    _, number = (span.long() * (int(sample.max()) + 1) + sample).unique(return_inverse=True)
    return number.int()


def _zero_padding(x: Tensor, real: Tensor) -> Tensor:
    """Set padding to 0."""
    return x.int().where(real, 0)


@functools.lru_cache(maxsize=8)
def _distances(num_buckets: int, max_distance: int) -> Tensor:
    return distance_rows(num_buckets, max_distance)


def _check_row(length: int | Tensor, fields: dict[str, Tensor]) -> int:
    """Check a row's length and the shapes of its fields. Return the length. Raises ValueError."""
    shape = fields["context"].shape
    for name, x in fields.items():
        if x.dim() != 1 or x.shape != shape or x.device.type != "cpu":
            raise ValueError(
                f"{name} must be one number for each of a row's tokens, {tuple(shape)} on the "
                f"CPU, got {tuple(x.shape)} on {x.device}"
            )
    if fields["context"].dtype != torch.bool:
        raise ValueError(f"context must be bool, got {fields['context'].dtype}")
    if not 0 <= (length := int(length)) <= len(fields["context"]):
        raise ValueError(
            f"length must be at most the {len(fields['context'])} tokens of the row, got {length}"
        )
    return length


def _check_range(name: str, x: Tensor, below: int | Tensor) -> None:
    """Check 0 <= x < below. Raises ValueError."""
    wrong = (x < 0) | (x >= below)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        most = int(below[at] if isinstance(below, Tensor) else below)
        raise ValueError(f"{name} must be at least 0 and below {most}, got {int(x[at])} at {at}")
