"""What a call may add to its scores: for each head a learned number, looked up in a small table of
rows.

A pair of one segment has a row by its distance, a pair of two segments of one group one by these,
all others share one row. Groups and segments are contiguous runs of a sequence. Which pairs are
visible is not said here but by the `KernelCall`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Segments:
    """The segments of a call's tokens, and the rows that go by them. Query i and key j of the call
    have the row

        other                                       if q_group[i] != kv_group[j], else
        pairs[q_base[i] + kv_segment[j]]            if that is not negative, else one by their
        distance

    q_group, q_base       (S,) int32, of the call's queries; alike in each of B
    kv_group, kv_segment  (T,) int32, of its keys
    pairs                 (P,) int32, rows or -1; P may be 0 if no groups are equal
    other                 a row

    q_base + kv_segment is in range of pairs where groups are equal, elsewhere anything. Raises
    ValueError for tensors of another dtype or shape, or not in one piece.
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
    """What is added to the scores of a call: for each pair the number of a row of a table, one for
    each head.

    Query i and key j of the call have the row that `segments` say, if there are any, else
        distances[clamp(kv_position[j] - q_position[i], -reach, reach) + reach]

    table        (R, H) fp32 (fp64 for fp64 inputs), H heads of q; any strides
    q_position   (S,) int32, of the call's queries; alike in each of B. Positions rise within a tile
    kv_position  (T,) int32, of its keys
    distances    (2 reach + 1,) int32, rows
    segments     None: all pairs go by distance
    apart        of each tile of the call, kv_position - q_position of its first tokens, if both
                 rise by 1 in all tiles and that is known
    bound        (H,), for a backward: `dscores_bound`, if it is known
    prepared     what kernels keep for calls with this table and these distances

    All are on the inputs' device. Raises ValueError for tensors of another dtype or shape, and for
    integers that do not
    lie in one piece: some kernels know their address alone. Values are not looked at, since they
    may be on a GPU.
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
            shape = tuple(self.table.shape)
            raise ValueError(
                f"a bias's table is (rows, heads) fp32 or fp64; got {shape} {self.table.dtype}"
            )
        for name in ("q_position", "kv_position", "distances"):
            _check_numbers(name, getattr(self, name))
        if len(self.distances) % 2 == 0:
            raise ValueError(
                f"a bias has 2 reach + 1 distances, an odd number; got {len(self.distances)}"
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
                raise ValueError(f"a bias has one number for each {side}; got {lengths}")
        if not 0 <= segments.other < len(self.table):
            raise ValueError(
                f"a bias's other is one of the table's {len(self.table)} rows; got {segments.other}"
            )

    @property
    def reach(self) -> int:
        """The distance from which on all are alike."""
        return len(self.distances) // 2

    def rows(self) -> Tensor:
        """(S, T) int64: the row of each pair. The host waits for no GPU."""
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
    """(H,) in lse's dtype: more than the gradients of a query's scores add up to, whichever it is.

    Of dout (B, S, H, D), v (B, T, G, D), lse and delta (B, H, S).

    A query's probabilities add up to 1 at most, so their gradients do to no more than |dP - delta|,
    and dP = dout . v is no more than the product of the norms. Not finite if any of these is not,
    or if a score was not.
    """
    dout_norm, v_norm = (
        torch.linalg.vector_norm(x, dim=3, dtype=lse.dtype).amax((0, 1)) for x in (dout, v)
    )
    v_norm = v_norm.repeat_interleave(len(dout_norm) // len(v_norm))
    return dout_norm * v_norm + delta.abs().amax((0, 2)) + lse.amax((0, 2)).clamp_min(0.0) * 0.0


def _check_numbers(name: str, x: Tensor) -> None:
    if x.dim() != 1 or x.dtype != torch.int32 or not x.is_contiguous():
        got = f"{tuple(x.shape)} {x.dtype} of strides {x.stride()}"
        raise ValueError(f"a bias's {name} is of one dimension, int32, in one piece; got {got}")
