"""The families with a learned bias of their scores: CPM1 and CPM3."""

from __future__ import annotations

import bisect
import functools
from typing import Any

import torch
from model_center.layer import SegmentPositionEmbedding
from torch import Tensor, nn

from ...scores import BY_DISTANCE, Scores
from ...sequence.mask import Mask
from ..batch import Batch, Row, Runs
from .models import _Model

_MOST_SCORES = 16  # of rows and of what is seen of them that are kept


class _Biased(_Model):
    """One that adds a learned bias of relative positions to its scores, and sees a context as a
    whole.

    Subclasses have _rows, the table in the model's dtype, and _scores, which of its rows a
    sequence's pairs have.
    """

    of_tokens = ("input_ids", "inputs_embeds")
    pos_bias_types = ("relative",)

    def _marks(self, given: dict[str, Any]) -> dict[str, Tensor | None]:
        return {name: given[name] for name in ("context", "span", "position_ids")}

    def _masking(self, batch: Batch, device: torch.device) -> dict[str, Any]:
        def scores(row: Row, mask: Mask) -> Scores:
            _check_distances(row, mask)
            return self._scores(row, mask, device)

        return batch.scoring(self.causal, self.padding_sees, scores)

    def _table(self, device: torch.device) -> Tensor:
        """In fp32, so that its gradient is not rounded to 16 bits in each layer."""
        table = self._rows(device)
        return table.to(torch.promote_types(table.dtype, torch.float32))


class _CPM1(_Biased):
    """The table has a row for each distance, up to where all are alike: what the model itself looks
    up for it.
    """

    @property
    def _reach(self) -> int:
        return max(self.position_bias.max_distance, self.position_bias.num_buckets)

    def _scores(self, _row: Row, mask: Mask, _device: torch.device) -> Scores:
        return _by_distance(mask, self._reach)

    def _rows(self, device: torch.device) -> Tensor:
        queries = torch.arange(self._reach, -self._reach - 1, -1, device=device)
        return (
            self.position_bias(queries, torch.zeros(1, dtype=torch.int64, device=device))
            .squeeze(2)
            .T
        )


class _CPM3(_Biased):
    """The table is the model's: rows of distances within a segment, then one for each pair of
    segments.
    """

    @staticmethod
    def check(model: nn.Module) -> None:
        exact = model.position_bias.num_buckets // 4
        if model.position_bias.max_distance <= exact:
            raise ValueError(
                f"position_bias_max_distance must be beyond the {exact} distances that have buckets of their own, got "
                f"{model.position_bias.max_distance}"
            )

    def _marks(self, given: dict[str, Any]) -> dict[str, Tensor | None]:
        return super()._marks(given) | {"token_type_ids": given["token_type_ids"]}

    def _scores(self, row: Row, mask: Mask, device: torch.device) -> Scores:
        bias = self.position_bias
        segments = (((0, mask.seq_len), 0),) if row.segments is None else row.segments
        for (start, _), number in segments:
            if not 0 <= number < bias.num_segments:
                raise ValueError(
                    f"token_type_ids are segments below {bias.num_segments}, token {start} of a row has {number}"
                )
        distances = bias.num_buckets, bias.max_distance, bias.bidirectional, device
        return _by_segment(
            mask, segments, bias.num_segments, bias.absolute_inner_segment, distances
        )

    def _rows(self, _device: torch.device) -> Tensor:
        return self.position_bias.relative_attention_bias

    def _embed(self, given: dict[str, Any], batch: Batch) -> Tensor:
        """The first tokens of a sequence are prompts, which have embeddings of their own."""
        ids = given["input_ids"]
        if given["inputs_embeds"] is not None:
            return given["inputs_embeds"]
        places = batch.cut(torch.arange(row.layout.seq_len) for row in batch.rows).to(ids.device)
        is_prompt = (places < self.config.prompt_length).expand(ids.shape)
        prompts, others = (
            embedding(ids.where(chosen, 0))
            for embedding, chosen in (
                (self.prompt_embedding, is_prompt),
                (self.input_embedding, ~is_prompt),
            )
        )
        return prompts.where(is_prompt.unsqueeze(-1), others)


def _check_distances(row: Row, mask: Mask) -> None:
    """Raises ValueError if tokens that see each other are not as far apart by position_ids as they
    are.
    """
    jumps = [start for (start, _), _ in row.shifts[1:]] if row.shifts else []
    # where parts begin that are more than padding
    seeing = {min(s.q[0], s.kv[0]) for s in mask.slices}
    for start, stop in mask.parts if jumps else ():
        first = bisect.bisect_right(jumps, start)
        if start in seeing and first < len(jumps) and jumps[first] < stop:
            raise ValueError(
                f"position_ids do not go on by one at token {jumps[first]} of a row, which tokens before it see or "
                "are seen by: leave them out, or give span or mask if sequences are packed"
            )


@functools.lru_cache(maxsize=_MOST_SCORES)
def _by_distance(mask: Mask, reach: int) -> Scores:
    return Scores.by_distance(mask, torch.arange(2 * reach + 1, dtype=torch.int32))


@functools.lru_cache(maxsize=_MOST_SCORES)
def _by_segment(
    mask: Mask,
    segments: Runs,
    count: int,
    by_distance: bool,
    distances: tuple[int, int, bool, torch.device],
) -> Scores:
    """Of `count` segments; pairs of one segment have rows by their distance, or one for each
    segment.
    """
    segment = torch.cat(
        [torch.full((stop - start,), number) for (start, stop), number in segments]
    ).int()
    pairs = distances[0] + torch.arange(count**2, dtype=torch.int32)
    if by_distance:
        pairs[:: count + 1] = BY_DISTANCE
    return Scores(
        mask,
        torch.zeros_like(segment),
        segment * count,
        segment,
        pairs,
        _distance_rows(*distances),
        0,
    )


@functools.cache
def _distance_rows(
    num_buckets: int, max_distance: int, bidirectional: bool, device: torch.device
) -> Tensor:
    """Of the distances from -max_distance on: (2 max_distance + 1,) int32 on the CPU, as models
    round on `device`.
    """
    ahead = torch.arange(-max_distance, max_distance + 1, device=device)
    bucket_of = SegmentPositionEmbedding._absolute_position_bucket
    return bucket_of(None, ahead, bidirectional, num_buckets, max_distance).int().cpu()
