"""The families with a learned bias of scores: CPM1 and CPM3."""

from __future__ import annotations

import bisect
import functools
import itertools
from typing import Any

import torch
from model_center.layer import SegmentPositionEmbedding
from torch import Tensor

from ...scores import BY_DISTANCE, Scores
from ...sequence.mask import Mask
from ...sequence.span import Span
from ..batch import Batch, Row
from .models import EnabledModel

_MOST_SCORES = 16  # scores of rows that are kept


class BiasedModel(EnabledModel):
    """A model with a learned bias of relative positions. All tokens see those of a context."""

    of_tokens = ("input_ids", "inputs_embeds")
    marks: tuple[str, ...] = ("attention_mask", "context", "span", "position_ids")
    pos_bias_types = ("relative",)

    def _mask_options(self, batch: Batch, device: torch.device) -> dict[str, Any]:
        def scores(row: Row) -> Scores:
            mask = row.visible(self.causal, self.padding_sees)
            _check_distances(row, mask)
            return self._scores(row, mask, device)

        return batch.options("scores", scores)

    def _bias_table(self, device: torch.device) -> Tensor:
        """Return the table in fp32. In 16 bits each layer would round its gradient."""
        table = self._rows(device)
        return table.to(torch.promote_types(table.dtype, torch.float32))

    def _scores(self, row: Row, mask: Mask, device: torch.device) -> Scores:
        """Return the row of the table that each pair of tokens adds."""
        raise NotImplementedError

    def _rows(self, device: torch.device) -> Tensor:
        """Return the table (R, H) in the model's dtype."""
        raise NotImplementedError


class CPM1(BiasedModel):
    """CPM1. Its table has a row for each distance, up to the distance from which all rows are
    equal. The model's own embedding computes the rows.
    """

    @property
    def _reach(self) -> int:
        return max(self.position_bias.max_distance, self.position_bias.num_buckets)

    def _scores(self, row: Row, mask: Mask, device: torch.device) -> Scores:
        return _by_distance(mask, self._reach)

    def _rows(self, device: torch.device) -> Tensor:
        queries = torch.arange(self._reach, -self._reach - 1, -1, device=device)
        keys = torch.zeros(1, dtype=torch.int64, device=device)
        return self.position_bias(queries, keys).squeeze(2).T


class CPM3(BiasedModel):
    """CPM3. Its table has rows for distances within a segment, then one for each two segments."""

    marks = (*BiasedModel.marks, "token_type_ids")

    @staticmethod
    def check(model: Any) -> None:
        exact = model.position_bias.num_buckets // 4
        if model.position_bias.max_distance <= exact:
            raise ValueError(
                f"position_bias_max_distance must be above {exact}, since so many distances have "
                f"their own buckets, got {model.position_bias.max_distance}"
            )

    def _scores(self, row: Row, mask: Mask, device: torch.device) -> Scores:
        bias = self.position_bias
        segments = tuple((kind.where, kind.segment) for kind in row.kinds)
        for (start, _), number in segments:
            if not 0 <= number < bias.num_segments:
                raise ValueError(
                    f"token_type_ids must be segments from 0 to {bias.num_segments - 1}, got "
                    f"{number} at token {start} of a row"
                )
        distances = bias.num_buckets, bias.max_distance, bias.bidirectional, device
        return _by_segment(
            mask, segments, bias.num_segments, bias.absolute_inner_segment, distances
        )

    def _rows(self, device: torch.device) -> Tensor:
        return self.position_bias.relative_attention_bias

    def _embed(self, given: dict[str, Any], batch: Batch) -> Tensor:
        """Embed tokens. The first tokens of a sequence are prompts, with their own embeddings."""
        ids = given["input_ids"]
        if given["inputs_embeds"] is not None:
            return given["inputs_embeds"]
        places = batch.shard(torch.arange(row.layout.seq_len) for row in batch.rows).to(ids.device)
        is_prompt = (places < self.config.prompt_length).expand(ids.shape)
        prompts = self.prompt_embedding(ids.where(is_prompt, 0))
        others = self.input_embedding(ids.where(~is_prompt, 0))
        return prompts.where(is_prompt.unsqueeze(-1), others)


def _check_distances(row: Row, mask: Mask) -> None:
    """Raise ValueError if visible pairs have another distance in position_ids."""
    pairs = itertools.pairwise(row.kinds)
    jumps = [kind.where[0] for before, kind in pairs if kind.shift != before.shift]
    # the starts of parts that are more than padding
    seeing = {min(s.q[0], s.kv[0]) for s in mask.slices}
    for start, stop in mask.parts if jumps else ():
        first = bisect.bisect_right(jumps, start)
        if start in seeing and first < len(jumps) and jumps[first] < stop:
            raise ValueError(
                f"position_ids do not rise by one at token {jumps[first]} of a row, and tokens "
                "before it see it or are seen by it: leave them out, or pass span or mask if "
                "sequences are packed"
            )


@functools.lru_cache(maxsize=_MOST_SCORES)
def _by_distance(mask: Mask, reach: int) -> Scores:
    return Scores.by_distance(mask, torch.arange(2 * reach + 1, dtype=torch.int32))


@functools.lru_cache(maxsize=_MOST_SCORES)
def _by_segment(
    mask: Mask,
    segments: tuple[tuple[Span, int], ...],
    count: int,
    by_distance: bool,
    distances: tuple[int, int, bool, torch.device],
) -> Scores:
    """Return the scores of a row. Pairs within a segment have rows by distance, or one row."""
    segment = torch.cat(
        [torch.full((stop - start,), number) for (start, stop), number in segments]
    ).int()
    pairs = distances[0] + torch.arange(count**2, dtype=torch.int32)
    if by_distance:
        pairs[:: count + 1] = BY_DISTANCE
    group, rows = torch.zeros_like(segment), _distance_rows(*distances)
    return Scores(mask, group, segment * count, segment, pairs, rows, 0)


@functools.cache
def _distance_rows(
    num_buckets: int, max_distance: int, bidirectional: bool, device: torch.device
) -> Tensor:
    """Return the rows of the distances from -max_distance to max_distance, (2 max_distance + 1,)
    int32 on the CPU. They are rounded as models round on `device`.
    """
    ahead = torch.arange(-max_distance, max_distance + 1, device=device)
    bucket_of = SegmentPositionEmbedding._absolute_position_bucket
    return bucket_of(None, ahead, bidirectional, num_buckets, max_distance).int().cpu()
