"""Rows that are appended one after the other, as in decoding."""

from __future__ import annotations

from torch import Tensor


class Growing:
    """A tensor that grows along its first dimension, in memory that doubles.

    count  the number of rows so far
    """

    def __init__(self, first: Tensor):
        self.count, self._memory = 0, first[:0]
        self.add(first)

    def add(self, rows: Tensor) -> None:
        """Append rows."""
        stop = self.count + len(rows)
        if stop > len(self._memory):
            # the first rows are often many, and then few are added
            grown = self._memory.new_empty(max(stop, 2 * self.count), *rows.shape[1:])
            grown[: self.count] = self.rows
            self._memory = grown
        self._memory[self.count : stop] = rows
        self.count = stop

    @property
    def rows(self) -> Tensor:
        """All rows so far, a view."""
        return self._memory[: self.count]
