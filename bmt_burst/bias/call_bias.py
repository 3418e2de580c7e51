"""The learned bias of one kernel call: `Scores` of its queries and keys, on their device. The
`KernelCall` has the visible pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class SegmentIds:
    """The segments of a call's tokens. Query i and key j of the call have this row:

        other                              if q_group[i] != kv_group[j], otherwise
        pairs[q_base[i] + kv_segment[j]]   if that is not negative, otherwise
        the row of their distance

    q_group, q_base       (S,) int32, of the call's queries; the same for each of B
    kv_group, kv_segment  (T,) int32, of its keys
    pairs                 (P,) int32, rows or -1; P may be 0 if no groups are equal
    other                 a row

    Tensors are contiguous. q_base + kv_segment is an index of pairs only where groups are equal.
    """

    q_group: Tensor
    q_base: Tensor
    kv_group: Tensor
    kv_segment: Tensor
    pairs: Tensor
    other: int


@dataclass(frozen=True)
class CallBias:
    """A bias that is added to the scores of a call: a row of a table for each pair.

    Query i and key j of the call have the row that `segments` give, if there are any, otherwise
    distances[clamp(kv_position[j] - q_position[i], -reach, reach) + reach].

    table        (R, H) fp32 (fp64 for fp64 inputs), H heads of q; any strides
    q_position   (S,) int32, of the call's queries; the same for each of B
    kv_position  (T,) int32, of its keys
    distances    (2 reach + 1,) int32, rows
    segments     None if the distance gives the row of all pairs. Then positions rise by 1 in each
                 tile
    apart        kv_position - q_position of each tile's first tokens, if segments is None
    prepared     what kernels cache for calls with this table and these distances

    All tensors are on the inputs' device. Integers are contiguous.
    """

    table: Tensor
    q_position: Tensor
    kv_position: Tensor
    distances: Tensor
    segments: SegmentIds | None = None
    apart: tuple[int, ...] | None = None
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def reach(self) -> int:
        """The distance beyond which all distances have the same row."""
        return len(self.distances) // 2

    def rows(self) -> Tensor:
        """Compute the row of each pair, (S, T) int64. The host waits for no GPU."""
        ahead = (self.kv_position - self.q_position.unsqueeze(1)).clamp(-self.reach, self.reach)
        by_distance, of = self.distances[ahead.long() + self.reach].long(), self.segments
        if of is None:
            return by_distance
        entries = (of.q_base.unsqueeze(1) + of.kv_segment).long()
        entries = entries.where(of.q_group.unsqueeze(1) == of.kv_group, len(of.pairs))
        by_segments = functional.pad(of.pairs, (0, 1), value=of.other)[entries].long()
        return by_segments.where(by_segments >= 0, by_distance)
