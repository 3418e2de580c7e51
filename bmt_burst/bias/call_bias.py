"""A learned bias of one call's scores: one number for each pair and head, from a small table.

The row of a pair depends on its distance if both tokens are of one segment, on the two segments if
both are of one group; all other pairs share one row. Groups and segments are contiguous runs of a
sequence. The `KernelCall` says which pairs are visible.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Segments:
    """The segments of a call's tokens, and the rows of pairs of segments.

    Query i and key j of the call have this row:

        other                              if q_group[i] != kv_group[j], otherwise
        pairs[q_base[i] + kv_segment[j]]   if that is not negative, otherwise
        the row of their distance

    q_group, q_base       (S,) int32, of the call's queries; the same for each of B
    kv_group, kv_segment  (T,) int32, of its keys
    pairs                 (P,) int32, rows or -1; P may be 0 if no groups are equal
    other                 a row

    q_base + kv_segment must be a valid index of pairs only where groups are equal. Raises
    ValueError for tensors that are not contiguous, or of another dtype or shape.
    """

    q_group: Tensor
    q_base: Tensor
    kv_group: Tensor
    kv_segment: Tensor
    pairs: Tensor
    other: int

    def __post_init__(self):
        for name in ("q_group", "q_base", "kv_group", "kv_segment", "pairs"):
            _check_numbers(name, getattr(self, name))


@dataclass(frozen=True)
class CallBias:
    """A bias that is added to the scores of a call: a row of a table for each pair.

    Query i and key j of the call have the row that `segments` give, if there are any, otherwise
    distances[clamp(kv_position[j] - q_position[i], -reach, reach) + reach].

    table        (R, H) fp32 (fp64 for fp64 inputs), H heads of q; any strides
    q_position   (S,) int32, of the call's queries; the same for each of B. Positions rise in a tile
    kv_position  (T,) int32, of its keys
    distances    (2 reach + 1,) int32, rows
    segments     None if all pairs go by distance
    apart        kv_position - q_position of each tile's first tokens, if it is known that both
                 rise by 1 in all tiles, otherwise None
    bound        (H,) `dscores_bound` for a backward, or None if it is not known
    prepared     what kernels cache for calls with this table and these distances

    All tensors are on the inputs' device. Raises ValueError for tensors of another dtype or shape,
    and for integers that are not contiguous, because some kernels get only their address. Values
    are not checked, since they may be on a GPU.
    """

    table: Tensor
    q_position: Tensor
    kv_position: Tensor
    distances: Tensor
    segments: Segments | None = None
    apart: tuple[int, ...] | None = None
    bound: Tensor | None = None
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        if self.table.dim() != 2 or self.table.dtype not in (torch.float32, torch.float64):
            got = f"{tuple(self.table.shape)} {self.table.dtype}"
            raise ValueError(f"expected a bias's table (rows, heads), fp32 or fp64, got {got}")
        for name in ("q_position", "kv_position", "distances"):
            _check_numbers(name, getattr(self, name))
        if len(self.distances) % 2 == 0:
            raise ValueError(
                f"expected 2 reach + 1 distances, an odd number, got {len(self.distances)}"
            )
        if self.segments:
            self._check_segments(self.segments)

    def _check_segments(self, segments: Segments) -> None:
        for side, names in (("query", ("q_group", "q_base")), ("key", ("kv_group", "kv_segment"))):
            position = "q_position" if side == "query" else "kv_position"
            lengths = {name: len(getattr(segments, name)) for name in names} | {
                position: len(getattr(self, position))
            }
            if len(set(lengths.values())) != 1:
                raise ValueError(f"expected one number of a bias for each {side}, got {lengths}")
        if not 0 <= segments.other < len(self.table):
            raise ValueError(
                f"expected other to be one of the table's {len(self.table)} rows, "
                f"got {segments.other}"
            )

    @property
    def reach(self) -> int:
        """The distance beyond which all distances have the same row."""
        return len(self.distances) // 2

    def rows(self) -> Tensor:
        """Compute the row of each pair, (S, T) int64. The host waits for no GPU."""
        ahead = (
            (self.kv_position - self.q_position.unsqueeze(1)).clamp(-self.reach, self.reach).long()
        )
        by_distance, segments = self.distances[ahead + self.reach].long(), self.segments
        if segments is None:
            return by_distance
        same = segments.q_group.unsqueeze(1) == segments.kv_group
        entries = (segments.q_base.unsqueeze(1) + segments.kv_segment).where(
            same, len(segments.pairs)
        )
        by_segments = functional.pad(segments.pairs, (0, 1), value=segments.other)[
            entries.long()
        ].long()
        return by_segments.where(by_segments >= 0, by_distance)


def dscores_bound(dout: Tensor, v: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Bound the sum of |dS| of any query: (H,) in lse's dtype.

    The inputs are dout (B, S, H, D), v (B, T, G, D), lse and delta (B, H, S). A query's
    probabilities sum to 1 at most, so its |dS| sum to max |dP - delta| at most. |dP| = |dout . v|
    is at most the product of the norms. The bound is not finite if an input or a score is not.
    """
    dout_norm, v_norm = (
        torch.linalg.vector_norm(x, dim=3, dtype=lse.dtype).amax((0, 1)) for x in (dout, v)
    )
    v_norm = v_norm.repeat_interleave(len(dout_norm) // len(v_norm))
    return dout_norm * v_norm + delta.abs().amax((0, 2)) + lse.amax((0, 2)).clamp_min(0.0) * 0.0


def _check_numbers(name: str, x: Tensor) -> None:
    if x.dim() != 1 or x.dtype != torch.int32 or not x.is_contiguous():
        got = f"{tuple(x.shape)} {x.dtype} of strides {x.stride()}"
        raise ValueError(f"expected a bias's {name} of one dimension, int32, contiguous, got {got}")
