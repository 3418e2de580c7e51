"""What tokens of CPM-Live's rows see of each other, and which row of the bias table each pair adds
to its scores.

A row is packed with spans, which see nothing of each other; padding follows. Of a span some tokens
are context, which all see, and the others are to be predicted: they are seen by those that are to
be predicted too and come later, and by themselves. In a Bee's span there may be samples beside the
main one, which see only themselves and are seen by it.

Letters: S tokens of a whole row.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmt_burst import Mask, Scores, Slice
from bmt_burst.scores import BY_DISTANCE, distance_rows
from bmt_burst.sequence.span import Span

from .config import AntConfig, BeeConfig

# of what tokens to be predicted see of each other in a row; planning takes minutes then
MOST_SLICES = 1 << 18


class _Run(NamedTuple):
    """Neighbouring tokens alike in what they see and are seen by."""

    span: int
    sample: int
    context: bool
    tokens: Span


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
    """The scores of one row of CPM-Bee, whole; all tensors are on the CPU, integers of any dtype
    but for `context`.

    length              tokens of the row before its padding
    context             (S,) bool: seen by all of the span (of the sample, by other samples than 0),
                        sees only those
    sample_ids          (S,), below S: 0 is the span's main sample, which sees the others; these see
                        only themselves
    num_segments        (S,): segments of the token's tree, n
    segment             (S,): the token's own of these
    segment_rel_offset  (S,): where the tree's n x n entries begin in segment_rel
    segment_rel         (R,): for each tree and its segments [query, key] 0 for one segment, else 2
                        or more
    span                (S,): tokens of other spans are not seen

    Pairs of one segment have a row by distance, those of two samples row N, those of two segments
    of one tree row N - 1 + segment_rel, with N buckets of distances. Linear in S but for the slices
    of the mask, of which a span with p separate runs of tokens that are not context has some p^2 /
    2. Raises ValueError for tensors of other lengths, for entries that are out of range, and if
       there would be more than 2^18 slices.
    """
    fields = {
        "context": context,
        "sample_ids": sample_ids,
        "num_segments": num_segments,
        "segment": segment,
    }
    fields |= {"segment_rel_offset": segment_rel_offset, "span": span}
    length, seq_len = _checked(length, fields), len(context)
    real = torch.arange(seq_len) < length
    buckets, segment_rows = (
        config.position_bias_num_buckets,
        config.position_bias_num_segment_buckets,
    )
    pairs = (segment_rel.int() + (buckets - 1)).where(segment_rel != 0, BY_DISTANCE)
    _check_range("segment_rel", segment_rel, segment_rows + 1)
    _check_range("segment", segment[:length], num_segments[:length])
    _check_range("sample_ids", sample_ids, seq_len)
    return Scores(
        mask=_mask(seq_len, span[:length], sample_ids[:length], context[:length]),
        group=_numbered(span, sample_ids).where(real, -1),
        base=_padded(segment.long() * num_segments + segment_rel_offset, real),
        segment=_padded(segment, real),
        pairs=pairs if len(pairs) else torch.tensor([BY_DISTANCE], dtype=torch.int32),
        distances=_distances(buckets, config.position_bias_max_distance),
        other=buckets,
    )


def ant_scores(
    config: AntConfig, length: int | Tensor, context: Tensor, segment: Tensor, span: Tensor
) -> Scores:
    """The scores of one row of CPM-Ant, whole; all tensors are on the CPU, integers of any dtype
    but for `context`.

    length   tokens of the row before its padding
    context  (S,) bool: seen by all of the span, sees only those
    segment  (S,): the type of the token's segment
    span     (S,): tokens of other spans are not seen

    Pairs of one type have a row by distance, others row N + segment_types * type of the query +
    type of the key, with N buckets of distances. Costs and errors as of `bee_scores`; where single
    tokens all over a span are hidden, as in masked language modelling, slices are many.
    """
    length, seq_len = (
        _checked(length, {"context": context, "segment": segment, "span": span}),
        len(context),
    )
    real = torch.arange(seq_len) < length
    buckets, types = config.position_bias_num_buckets, config.segment_types
    _check_range("segment", segment[:length], types)
    pairs = torch.arange(buckets, buckets + types**2, dtype=torch.int32).view(types, types)
    return Scores(
        mask=_mask(seq_len, span[:length], torch.zeros_like(span[:length]), context[:length]),
        group=torch.zeros(seq_len, dtype=torch.int32),
        base=_padded(segment * types, real),
        segment=_padded(segment, real),
        pairs=pairs.fill_diagonal_(BY_DISTANCE).flatten(),
        distances=_distances(buckets, config.position_bias_max_distance),
        other=0,  # there are no others
    )


def slices_of(runs: Any) -> Any:
    """What a span takes of MOST_SLICES, by its separate runs of tokens to be predicted: numbers,
    also in arrays.
    """
    return runs * (runs + 1) // 2


def _mask(seq_len: int, span: Tensor, sample: Tensor, context: Tensor) -> Mask:
    """What is visible in a row of `seq_len` tokens; the tensors are of those before the padding."""
    by_span: dict[int, list[_Run]] = defaultdict(list)
    for run in _runs(span, sample, context):
        by_span[run.span].append(run)
    predicted = [sum(not run.context for run in runs) for runs in by_span.values()]
    if sum(map(slices_of, predicted)) > MOST_SLICES:
        raise ValueError(
            f"there are {sum(predicted)} runs of tokens to be predicted, up to {max(predicted)} in a span: what they "
            f"see would make more than {MOST_SLICES} slices. Predict fewer and longer runs, or cut shorter spans"
        )
    return Mask(
        seq_len, tuple(itertools.chain.from_iterable(map(_slices_of_span, by_span.values())))
    )


def _runs(*numbers: Tensor) -> Iterator[_Run]:
    """The runs of tokens with these numbers (span, sample, context)."""
    if not len(numbers[0]):
        return
    stacked = torch.stack([x.long() for x in numbers])
    starts = (stacked[:, 1:] != stacked[:, :-1]).any(0).nonzero().flatten() + 1
    starts = torch.cat((starts.new_zeros(1), starts))
    bounds = [*starts.tolist(), stacked.shape[1]]
    for (span, sample, context), tokens in zip(
        stacked[:, starts].T.tolist(), itertools.pairwise(bounds), strict=True
    ):
        yield _Run(span, sample, bool(context), tokens)


def _slices_of_span(runs: list[_Run]) -> Iterator[Slice]:
    """Context is seen by all of its sample and by sample 0; the others by others that come later,
    and themselves.
    """
    for sample in {run.sample for run in runs}:
        queries = [run for run in runs if run.sample == sample]
        keys = runs if sample == 0 else queries
        asking = _join_spans(run.tokens for run in queries)
        yield from itertools.starmap(
            Slice, itertools.product(asking, _join_spans(k.tokens for k in keys if k.context))
        )
        for query in queries:
            if not query.context:
                before = _join_spans(
                    k.tokens for k in keys if not k.context and k.tokens[1] <= query.tokens[0]
                )
                yield from (Slice(query.tokens, kv) for kv in before)
                yield Slice(query.tokens, query.tokens, 0)


def _join_spans(spans: Iterable[Span]) -> list[Span]:
    """Rising ranges, those that touch as one."""
    found: list[Span] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def _numbered(span: Tensor, sample: Tensor) -> Tensor:
    """A number for each sample of each span: (S,) int32."""
    _, number = (span.long() * (int(sample.max()) + 1) + sample).unique(return_inverse=True)
    return number.int()


def _padded(x: Tensor, real: Tensor) -> Tensor:
    """0 for padding, whatever stands there."""
    return x.int().where(real, 0)


@functools.lru_cache(maxsize=8)
def _distances(num_buckets: int, max_distance: int) -> Tensor:
    return distance_rows(num_buckets, max_distance)


def _checked(length: int | Tensor, fields: dict[str, Tensor]) -> int:
    """The length, which is that of the row at most. Raises ValueError for that, and for fields of
    another shape.
    """
    shape = fields["context"].shape
    for name, x in fields.items():
        if x.dim() != 1 or x.shape != shape or x.device.type != "cpu":
            raise ValueError(
                f"{name} must be one number for each of a row's tokens, {tuple(shape)} on the CPU; got "
                f"{tuple(x.shape)} on {x.device}"
            )
    if fields["context"].dtype != torch.bool:
        raise ValueError(f"context must be bool, got {fields['context'].dtype}")
    if not 0 <= (length := int(length)) <= len(fields["context"]):
        raise ValueError(
            f"length must be at most the {len(fields['context'])} tokens of the row, got {length}"
        )
    return length


def _check_range(name: str, x: Tensor, below: int | Tensor) -> None:
    wrong = (x < 0) | (x >= below)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        most = int(below[at] if isinstance(below, Tensor) else below)
        raise ValueError(f"{name} must be at least 0 and below {most}, got {int(x[at])} at {at}")
