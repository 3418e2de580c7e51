"""Folding: rows that share prefixes, such as the completions of a prompt, as one sequence of trees.

    folded = fold_prefixes(rows)
    batch = sp.sequence(folded.mask)
    hidden = model(batch.shard(folded.tokens), batch.positions(), cache=batch)
    logprobs = token_logprobs(hidden, head, batch.shard(folded.targets))
    of_rows = folded.unfold(batch.unshard(logprobs))  # a tensor for each row

A token is computed once for all rows that share it and what precedes it. Rows differ in what
follows the last token that they share, and a token has one target. So that token stands once for
each branch, with the same position and the same visible tokens. Results equal those of separate
rows up to rounding. Gradients of shared tokens add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from .base.arguments import as_int
from .sequence.layout import IGNORE_INDEX
from .sequence.mask import Mask


@dataclass(frozen=True, eq=False)
class Folded:
    """Rows as one sequence of S tokens.

    tokens   (1, S) int64
    targets  (1, S) int64: the next token, IGNORE_INDEX (-100) at the ends of rows
    counts   (1, S) int64: how many rows have this target here. It is the weight of a token in a sum
             over rows, 0 without a target
    mask     a tree for each group of rows that share tokens, and each row that shares none
    places   for each row the places of its tokens in the sequence, (L,) int64
    """

    tokens: Tensor
    targets: Tensor
    counts: Tensor
    mask: Mask
    places: tuple[Tensor, ...]

    @property
    def seq_len(self) -> int:
        """The number of tokens, S."""
        return self.mask.seq_len

    @property
    def positions(self) -> Tensor:
        """The position of each token in its row, for RoPE: (S,) int64."""
        return self.mask.positions()

    def unfold(self, x: Tensor) -> list[Tensor]:
        """Return the values of each row: (L, ...) of x (1, S, ...), which is of the whole sequence.
        Gradients of x are sums over the rows.

        The last value of a row is that of a target which other rows have, if its row ends within
        theirs. Raises ValueError for another shape.
        """
        if x.dim() < 2 or x.shape[:2] != self.tokens.shape:
            raise ValueError(
                f"expected values of the whole sequence, (1, {self.seq_len}, ...), got shape "
                f"{tuple(x.shape)}: gather a shard by unshard first"
            )
        return [x[0].index_select(0, places.to(x.device)) for places in self.places]


# rows that share tokens from an index on, and the node before them
_Branch: TypeAlias = tuple[list[int], int, int | None]


def fold_prefixes(rows: Sequence[Tensor | Sequence[int]], least: int = 1) -> Folded:
    """Fold rows into one sequence.

    rows   the tokens of each row, whole: (L,) integers on the CPU or a list, of any lengths
    least  the fewest tokens that are folded. Rows that share fewer after a branch stay separate
           from there on

    Raises ValueError without rows, for an empty row, a row that is not on the CPU, and `least`
    below 1. Raises TypeError for anything but whole numbers.
    """
    if as_int("least", least) < 1:
        raise ValueError(f"least must be at least 1, got {least}")
    texts = [_read_row(i, row) for i, row in enumerate(rows)]
    if not texts:
        raise ValueError("expected at least one row to fold, got none")
    return _Folding(texts, least).fold()


def _read_row(number: int, row: Tensor | Sequence[int]) -> Tensor:
    name = f"rows[{number}]"
    if isinstance(row, Tensor):
        if row.dim() != 1 or row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
            got = f"shape {tuple(row.shape)} and {row.dtype}"
            raise TypeError(f"{name} must be a tensor of integers of one dimension, got {got}")
        if row.device.type != "cpu":
            raise ValueError(
                f"{name} must be on the CPU, where rows are compared, got {row.device}"
            )
        found = row.to(torch.int64)
    else:
        found = torch.tensor([as_int(name, x) for x in row], dtype=torch.int64)
    if not len(found):
        raise ValueError(f"{name} must have at least one token, got none")
    return found


class _Folding:
    """Nodes of trees, as they are found: each is followed by its descendants."""

    def __init__(self, rows: list[Tensor], least: int):
        self.rows, self.least = rows, least
        self.parents: list[int | None] = []
        self.tokens: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.counts: list[Tensor] = []
        self.count = 0
        self.places: list[list[Tensor]] = [[] for _ in rows]

    def fold(self) -> Folded:
        waiting = self._branches(list(range(len(self.rows))), 0, None)
        while waiting:
            waiting += self._add(waiting.pop())
        lengths = [len(x) for x in self.tokens]
        parts = self.tokens, self.targets, self.counts
        tokens, targets, counts = (torch.cat(x).unsqueeze(0) for x in parts)
        places = tuple(torch.cat(x) for x in self.places)
        return Folded(tokens, targets, counts, Mask.tree(lengths, self.parents), places)

    def _branches(self, rows: list[int], start: int, parent: int | None) -> list[_Branch]:
        """Return the branches of rows that have a token `start`, the last one first. If there are
        several, each begins with a copy of the token before.
        """
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(int(self.rows[row][start]), []).append(row)
        found: list[list[int]] = []
        for group in groups.values():
            shares = self._count_shared(group, start) >= self.least
            found += [group] if shares else [[row] for row in group]
        begin = start - 1 if start > 0 and len(found) > 1 else start
        return [(group, begin, parent) for group in reversed(found)]

    def _count_shared(self, rows: list[int], start: int) -> int:
        """Return how many tokens from `start` on all rows have."""
        first, *others = (self.rows[row][start:] for row in rows)
        shared = len(first)
        for other in others:
            shared = min(shared, len(other))
            differ = (first[:shared] != other[:shared]).nonzero()
            shared = int(differ[0]) if len(differ) else shared
        return shared

    def _add(self, branch: _Branch) -> list[_Branch]:
        """Add the node that a branch begins with. Return the branches after it."""
        rows, begin, parent = branch
        text, stop = self.rows[rows[0]], begin + self._count_shared(rows, begin)
        longer = [row for row in rows if len(self.rows[row]) > stop]
        found = self._branches(longer, stop, len(self.parents)) if longer else []
        splits = len(found) > 1
        end = stop - splits  # the last shared token stands in each branch
        at = self.count + torch.arange(end - begin)
        for row in rows:
            self.places[row].append(at)
            if splits and len(self.rows[row]) == stop:  # it ends at the first branch's copy
                self.places[row].append(torch.tensor([self.count + end - begin]))
        if begin == end:  # nothing is left of it
            return [(others, start, parent) for others, start, _ in found]
        targets = torch.full((end - begin,), IGNORE_INDEX)
        counts = torch.full((end - begin,), len(rows))
        known = text[begin + 1 : min(end + 1, stop)]
        targets[: len(known)] = known
        if end == stop:  # no branch, or one
            counts[-1] = len(longer)
            if longer:
                targets[-1] = self.rows[longer[0]][stop]
        self.tokens.append(text[begin:end])
        self.targets.append(targets)
        self.counts.append(counts)
        self.parents.append(parent)
        self.count += end - begin
        return found
