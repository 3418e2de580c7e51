"""The places where documents start in a folder of tokens, from documents.bin or after each eos."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from train.data.stored import StoredNumbers

_CHECKED = 1 << 20  # documents at once


class Documents(ABC):
    """The documents of `tokens` tokens, which follow one another without gaps.

    how  the source of the places, for messages
    """

    how: str

    @abstractmethod
    def between(self, start: int, stop: int) -> np.ndarray:
        """Return the starts of documents among tokens start to stop - 1: rising, int64."""


class StoredDocuments(Documents):
    """Documents by documents.bin. Raises ValueError if its places do not begin at 0, do not rise
    where they are read, or exceed `tokens`.

    starts  the places, as the file has them
    """

    how = "documents.bin"

    def __init__(self, file: Path, tokens: int):
        self._file, self._tokens = file, tokens
        self.starts = StoredNumbers(file, np.dtype(np.int64))
        first = self.starts[:1]
        if len(first) == 0 or first[0] != 0:
            raise ValueError(f"{file} must start with a document at token 0, got {first.tolist()}")
        self._check(self.starts[len(self.starts) - 1 :], 0, tokens)

    def check(self) -> None:
        """Read and check the whole file. Raises ValueError as above."""
        for place in range(0, len(self.starts), _CHECKED):
            self._check(self.starts[max(place - 1, 0) : place + _CHECKED], 0, self._tokens)

    def between(self, start: int, stop: int) -> np.ndarray:
        first, last = self._index(start), self._index(stop)
        return self._check(self.starts[first:last], start, stop)

    def _index(self, token: int) -> int:
        """Count the documents that start before a token."""
        return bisect.bisect_left(
            range(len(self.starts)), token, key=lambda i: int(self.starts[i : i + 1][0])
        )

    def _check(self, starts: np.ndarray, lowest: int, end: int) -> np.ndarray:
        if len(starts) and (
            starts[0] < lowest or starts[-1] >= end or (np.diff(starts) <= 0).any()
        ):
            raise ValueError(
                f"{self._file}: documents must start at rising places in the {self._tokens} tokens"
            )
        return starts


class DocumentsByEos(Documents):
    """Documents of a folder without documents.bin. One starts after each eos."""

    how = "eos"

    def __init__(self, tokens: StoredNumbers, eos_id: int):
        self._tokens, self._eos_id = tokens, eos_id

    def between(self, start: int, stop: int) -> np.ndarray:
        before = max(start - 1, 0)
        starts = np.flatnonzero(self._tokens[before : stop - 1] == self._eos_id) + before + 1
        return np.concatenate([[0], starts]) if start <= 0 < stop else starts
