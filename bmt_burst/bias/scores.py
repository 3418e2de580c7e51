"""Scores: learned numbers that attention adds to scale q k^T.

For each pair of tokens a few integers of both choose a row of a table, which has a number for each
head. CPM-Live's models have such a bias, and masks that fit it. T5's relative positions are
another.

A token has a group, a segment of the group, and a position. Groups and segments are runs of the
sequence. Tokens of one segment have a row by their distance, those of one group a row by their
segments, and all pairs of two groups have one row. So nearly all pairs of a long sequence lie in
large areas of one row each: `terms`.

Nothing here knows ranks, layouts or GPUs. All of it is O(sequence), and the same on every rank.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.arguments import as_int, check_tensor
from ..sequence.mask import Mask
from .areas import BY_DISTANCE, Areas, Term
from .call_bias import CallBias, SegmentIds


class _Numbers(NamedTuple):
    """The tensors of `Scores`, without a copy. Nothing writes to them."""

    group: Tensor
    base: Tensor
    segment: Tensor
    pairs: Tensor
    distances: Tensor


class _CopiedTensor:
    """A field (N,) int32 that nobody can change: it is copied when it is set and when it is read.

    The tensor itself is in the object's __dict__.
    """

    def __init__(self, name: str):
        self.name = name

    def __get__(self, scores: Any, owner: type) -> Any:
        return self if scores is None else vars(scores)[self.name].clone()

    def __set__(self, scores: Any, x: Tensor) -> None:
        check_tensor(self.name, x)
        if x.dim() != 1 or x.dtype != torch.int32 or x.device.type != "cpu":
            raise TypeError(
                f"{self.name} must be int32 of one dimension on the CPU, "
                f"got {tuple(x.shape)} {x.dtype} on {x.device}"
            )
        vars(scores)[self.name] = x.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)
class Scores:
    """The visible pairs of a sequence, and the row of a table (rows, H) that each pair adds.

    Query i and key j have the row
        other                                     if group[i] != group[j], otherwise
        pairs[base[i] + segment[j]]               if it is not BY_DISTANCE (-1), otherwise
        distances[clamp(j - i, -reach, reach) + reach]

    mask       the visible pairs
    group      (seq_len,) int32 on the CPU, as all tensors here: the group of each token
    base       (seq_len,) int32: the index in `pairs` at which a query's segment begins
    segment    (seq_len,) int32: the number of a key's segment in its group
    pairs      (P,) int32: rows, or BY_DISTANCE
    distances  (2 reach + 1,) int32: rows
    other      a row

    Tensors are copied when they are passed and when they are read, so nothing can change the
    Scores. Raises TypeError for tensors of another kind, ValueError for tensors of another length
    or indices out of range.
    """

    mask: Mask
    group: Tensor
    base: Tensor
    segment: Tensor
    pairs: Tensor
    distances: Tensor
    other: int

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise TypeError(f"mask must be a Mask, got {type(self.mask).__name__}")
        self.mask.check_one_length("scores of a bias")
        for name, x in zip(_Numbers._fields[:3], self._numbers[:3], strict=True):
            if (tokens := len(x)) != self.seq_len:
                raise ValueError(f"{name} has {tokens} numbers for a mask of {self.seq_len} tokens")
        object.__setattr__(self, "other", as_int("other", self.other))
        if (count := len(self._numbers.distances)) % 2 == 0:
            raise ValueError(f"distances must be 2 reach + 1 rows, an odd number, got {count}")
        self._check_rows()
        self._check_entries()

    @staticmethod
    def by_distance(mask: Mask, distances: Tensor) -> Scores:
        """Return scores with rows by distance alone, as in T5."""
        same = torch.zeros(mask.seq_len, dtype=torch.int32)
        pairs = torch.tensor([BY_DISTANCE], dtype=torch.int32)
        return Scores(mask, same, same, same, pairs, distances, 0)

    @staticmethod
    def stacked(scores: Sequence[Scores]) -> Scores:
        """Return the scores of several sequences as one sequence.

        No token sees another sequence. Raises ValueError for no scores or if their `distances` or
        `other` differ, TypeError for anything but Scores.
        """
        for each in scores:
            if not isinstance(each, Scores):
                raise TypeError(
                    f"scores of several sequences must be Scores, got {type(each).__name__}"
                )
        mask = Mask.stacked([each.mask for each in scores])
        distances, other = scores[0]._numbers.distances, scores[0].other
        groups = pairs = 0
        parts: list[tuple[Tensor, ...]] = []
        for each in scores:
            own = each._numbers
            if not own.distances.equal(distances) or each.other != other:
                both = "the same distances and the same other row"
                raise ValueError(f"scores of several sequences must have {both}")
            start, stop, group, _, _ = each._runs
            # groups of two sequences must differ, whatever their numbers are
            numbers, index = group.unique(return_inverse=True)
            group = (index + groups).int().repeat_interleave(stop - start)
            parts.append((group, own.base + pairs, own.segment, own.pairs))
            groups, pairs = groups + len(numbers), pairs + len(own.pairs)
        group, base, segment, pairs_of_all = (torch.cat(same) for same in zip(*parts, strict=True))
        return Scores(mask, group, base, segment, pairs_of_all, distances, other)

    @functools.cached_property
    def _numbers(self) -> _Numbers:
        return _Numbers(*(vars(self)[name] for name in _Numbers._fields))

    @property
    def seq_len(self) -> int:
        """The length of the sequence."""
        return self.mask.seq_len

    @functools.cached_property
    def num_rows(self) -> int:
        """The number of rows that a table must have at least."""
        rows = torch.cat((self._numbers.pairs, self._numbers.distances))
        return max(int(rows.max()), self.other) + 1

    @functools.cached_property
    def digest(self) -> str:
        """A string that is equal for equal scores, in every process."""
        numbers = self._runs, self._numbers.pairs, self._numbers.distances
        sizes = [x.numel() for x in numbers]
        found = hashlib.blake2b(f"{self.mask.digest} {self.other} {sizes}".encode(), digest_size=16)
        for x in numbers:
            found.update(x.contiguous().numpy().data)
        return found.hexdigest()

    def tokens(self, positions: Tensor) -> Tensor:
        """Return group, base, segment and position of the tokens at `positions` (T,), for kernels.

        The result is (4, T) int32.
        """
        chosen = (x[positions] for x in self._numbers[:3])
        return torch.stack((*chosen, positions.int()))

    def dense(self) -> Tensor:
        """Return (seq_len, seq_len) int64, the table's row of each query (row) and key (column).

        Pairs that are not visible have one too. For tests: it takes O(n^2) memory.
        """
        group, base, segment, position = self.tokens(torch.arange(self.seq_len))
        pairs, distances = self._numbers[3:]
        segments = SegmentIds(group, base, group, segment, pairs, self.other)
        return CallBias(torch.empty(0, 0), position, position, distances, segments).rows()

    @functools.cached_property
    def terms(self) -> tuple[Term, ...]:
        """The visible pairs in parts. The part without a row, if any, is the first."""
        return Areas(self.mask, self._runs, *self._numbers[3:], self.other).terms()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scores) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        segments = self._runs.shape[1]
        return f"<scores of {self.seq_len} tokens in {segments} segments, {self.num_rows} rows>"

    def _check_rows(self) -> None:
        """Raise ValueError unless all rows can be rows of a table."""
        pairs = self._numbers.pairs
        rows = torch.cat((pairs[pairs != BY_DISTANCE], self._numbers.distances))
        if (least := min(int(rows.min()), self.other)) < 0:
            raise ValueError(
                f"pairs, distances and other must be rows of a table, 0 or more, got {least}"
            )
        if self.other >= 1 << 31:
            raise ValueError(
                "other must be a row of a table, below 2^31; "
                f"got a number of {self.other.bit_length()} bits"
            )

    def _check_entries(self) -> None:
        """Raise ValueError if a pair of segments has no entry in `pairs`."""
        _, _, group, base, segment = self._runs
        groups, index = group.unique(return_inverse=True)

        def bound(x: Tensor, reduce: str) -> Tensor:
            """Return the least or largest x of each group."""
            return torch.zeros_like(groups).scatter_reduce(0, index, x, reduce, include_self=False)

        lowest = int((bound(base, "amin") + bound(segment, "amin")).min())
        highest = int((bound(base, "amax") + bound(segment, "amax")).max())
        if lowest < 0 or highest >= len(self._numbers.pairs):
            raise ValueError(
                f"pairs must have entries {lowest} to {highest}, for each base + segment, "
                f"got {len(self._numbers.pairs)} entries"
            )

    @functools.cached_property
    def _runs(self) -> Tensor:
        """(5, runs) int64: start, stop, group, base and segment of each run of equal tokens.

        There are far fewer runs than tokens, so other methods use these.
        """
        numbers = torch.stack(self._numbers[:3])
        ends = (numbers[:, 1:] != numbers[:, :-1]).any(0).nonzero().flatten() + 1
        bounds = torch.cat((torch.tensor([0]), ends, torch.tensor([self.seq_len])))
        return torch.cat((torch.stack((bounds[:-1], bounds[1:])), numbers[:, bounds[:-1]]))


# Not in the class: a descriptor there would be the default of its field.
for _name in _Numbers._fields:
    setattr(Scores, _name, _CopiedTensor(_name))


def distance_rows(num_buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance, key - query, from -reach to reach.

    The result is (2 reach + 1,) int32, for `Scores.distances`. These are T5's bidirectional buckets
    (arXiv 1910.10683), as CPM-Live has them. With half = num_buckets // 2, exact = half // 2 and
    a = |key - query|, the bucket is g(a), plus half where the key is ahead of the query:

        g(a) = a                                                                  if a < exact
        g(a) = min(half - 1, exact + trunc(ln(a / exact) / ln(max_distance / exact) (half - exact)))

    From reach on g is half - 1. Logarithm and quotient are fp32, as when the models were trained.

    Raises ValueError for fewer than 4 buckets or a max_distance of at most exact, TypeError for
    anything but whole numbers.
    """
    num_buckets = as_int("num_buckets", num_buckets)
    max_distance = as_int("max_distance", max_distance)
    half = num_buckets // 2
    exact = half // 2
    if num_buckets < 4 or max_distance <= exact:
        raise ValueError(
            f"expected 4 buckets or more and a max_distance above {exact}, "
            f"got {num_buckets} and {max_distance}"
        )
    away = torch.arange(max_distance + 1)
    logs = torch.log(away.clamp(min=1).float() / exact)
    quotient = logs / math.log(max_distance / exact) * (half - exact)
    bucket = torch.where(away < exact, away, (exact + quotient.long()).clamp(max=half - 1))
    reach = int((bucket == half - 1).nonzero()[0])
    bucket = bucket[: reach + 1].int()
    return torch.cat((bucket.flip(0), bucket[1:] + half))
