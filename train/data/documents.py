"""The places where documents start in a folder of tokens.

With --bos, a begin token in front of each document is a token of its row. A document that is cut at
a row's end continues in the next row without one.
"""

from __future__ import annotations

import bisect
from pathlib import Path

import numpy as np

from train.data.stored import StoredNumbers

_CHECKED = 1 << 20  # documents at once
_SCANNED = 1 << 20  # tokens at once


class StoredDocuments:
    """Documents by documents.bin. Raises ValueError unless `starts` rise from 0."""

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
        """Return the starts of documents among tokens start to stop - 1: rising, int64."""
        first, last = (_count_below(self.starts, token) for token in (start, stop))
        return self._check(self.starts[first:last], start, stop)

    def _check(self, starts: np.ndarray, lowest: int, end: int) -> np.ndarray:
        if len(starts) and (
            starts[0] < lowest or starts[-1] >= end or (np.diff(starts) <= 0).any()
        ):
            raise ValueError(
                f"{self._file}: documents must start at rising places in the {self._tokens} tokens"
            )
        return starts


class BegunText:
    """Tokens and documents with token `bos` in front of each document that does not start with it.

    Places count the added tokens. The constructor reads all of documents.bin and all tokens, unless
    `begun`, the number of documents that start with `bos`, is known to be none or all.
    """

    def __init__(
        self, tokens: StoredNumbers, documents: StoredDocuments, bos: int, begun: int | None
    ):
        self._tokens, self._documents, self._bos = tokens, documents, bos
        # places in the file; in this text, the n-th added token is n tokens later
        self._added = _documents_without(tokens, documents, bos, begun)

    def __len__(self) -> int:
        return len(self._tokens) + len(self._added)

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(len(self))
        assert step == 1
        first, last = self._added_before(start), self._added_before(max(start, stop))
        tokens = self._tokens[start - first : max(start, stop) - last]
        return np.insert(tokens, self._added[first:last] - (start - first), self._bos)

    def between(self, start: int, stop: int) -> np.ndarray:
        first, last = self._added_before(start), self._added_before(stop)
        added, place, end = self._added[first:last], start - first, stop - last
        own = self._documents.between(place, end) if place < end else added[:0]
        # drop the documents that start with an added token
        own = own[~np.isin(own, self._added[max(first - 1, 0) : last])]
        starts = np.sort(np.concatenate([added, own]))
        return starts + first + np.searchsorted(added, starts)

    def _added_before(self, place: int) -> int:
        """Count the added tokens before a place, which counts them, too."""
        return _count_below(self._added, place, each=1)


def _count_below(numbers: StoredNumbers | np.ndarray, limit: int, each: int = 0) -> int:
    """Count the rising numbers below a limit. The i-th one is made `each` times i larger."""
    return bisect.bisect_left(
        range(len(numbers)), limit, key=lambda i: int(numbers[i : i + 1][0]) + each * i
    )


def _documents_without(
    tokens: StoredNumbers, documents: StoredDocuments, bos: int, begun: int | None
) -> StoredNumbers | np.ndarray:
    """Return the places of the documents that do not start with token `bos`: rising, int64."""
    documents.check()
    stored = documents.starts
    if begun in (0, len(stored)):
        return stored if begun == 0 else np.empty(0, np.int64)
    without = []
    for place in range(0, len(tokens), _SCANNED):
        scanned = tokens[place : place + _SCANNED]
        starts = documents.between(place, place + len(scanned))
        without.append(starts[scanned[starts - place] != bos])
    found = np.concatenate(without)
    return stored if len(found) == len(stored) else found
