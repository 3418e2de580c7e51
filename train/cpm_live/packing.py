"""Packing of instances into rows: best fit among the open rows, with instances in random order."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

_OPEN = 64  # rows that may still be filled


@dataclass(frozen=True)
class Packed:
    """Rows of items: row r has items[starts[r] : starts[r + 1]], in this order. Both are int64."""

    starts: np.ndarray
    items: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> list[int]:
        return self.items[self.starts[row] : self.starts[row + 1]].tolist()


def pack_rows(
    lengths: np.ndarray, slices: np.ndarray, size: int, most_slices: int, seed: int
) -> Packed:
    """Pack items of these lengths and slices (N,) into rows of at most these sizes, by the seed."""
    rows: list[list[int]] = []
    left: list[int] = []  # slices that each row has room for
    spare: list[tuple[int, int]] = []  # room and number of each open row, rising
    order = np.random.default_rng((seed, 0)).permutation(len(lengths))
    for item, length, cost in zip(
        order.tolist(), lengths[order].tolist(), slices[order].tolist(), strict=True
    ):
        fitting = range(bisect.bisect_left(spare, (length, -1)), len(spare))
        at = next((at for at in fitting if left[spare[at][1]] >= cost), len(spare))
        if at < len(spare):
            room, row = spare.pop(at)
        else:
            room, row = size, len(rows)
            rows.append([])
            left.append(most_slices)
            if len(spare) == _OPEN:
                # close the fullest row
                spare.remove(
                    min(spare, key=lambda at: min(at[0] / size, left[at[1]] / most_slices))
                )
        rows[row].append(item)
        left[row] -= cost
        if room > length:
            bisect.insort(spare, (room - length, row))
    counts = np.cumsum([0, *map(len, rows)])
    return Packed(counts, np.array([item for row in rows for item in row], dtype=np.int64))
