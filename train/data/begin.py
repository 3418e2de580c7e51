"""The text of a data folder with a begin token in front of each document.

Rows are cut from this text (pretrain.py --bos). So a begin token is a token of its row. A document
that is cut at a row's end continues in the next row without a begin token.
"""

from __future__ import annotations

import bisect

import numpy as np

from train.data.documents import Documents, StoredDocuments
from train.data.stored import StoredNumbers

_SCANNED = 1 << 20  # tokens at once


class BegunText(Documents):
    """Tokens and documents with token `bos` in front of each document that does not start with it.

    Places count the added tokens. A slice has the dtype of `tokens`.

    The constructor reads all of documents.bin. It also reads all tokens, unless `begun`, the number
    of documents that start with `bos`, is known to be none or all. Raises ValueError if documents
    do not start at rising places.
    """

    def __init__(
        self, tokens: StoredNumbers, documents: Documents, bos: int, begun: int | None = None
    ):
        self.how = documents.how
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
        """Count the added tokens before a place."""
        return bisect.bisect_left(
            range(len(self._added)), place, key=lambda i: int(self._added[i : i + 1][0]) + i
        )


def _documents_without(
    tokens: StoredNumbers, documents: Documents, bos: int, begun: int | None
) -> StoredNumbers | np.ndarray:
    """Return the places of the documents that do not start with token `bos`: rising, int64."""
    stored = None
    if isinstance(documents, StoredDocuments):
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
    return stored if stored is not None and len(found) == len(stored) else found
