"""Megatron-LM's indexed datasets, version 1: tokens in PREFIX.bin, and their places in PREFIX.idx.

The .idx is little-endian:

    9 bytes    MMIDIDX\\0\\0
    uint64     version, 1
    uint8      dtype of the tokens, see _DTYPES
    uint64     number of sequences S
    uint64     number of entries of the last table D
    int32[S]   tokens of each sequence
    int64[S]   place of each sequence in the .bin, in bytes
    int64[D]   the sequence with which each document starts, from 0, and at the end S

A document is usually one sequence. With --split-sentences it has one for each sentence.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train.data.files import TextFile
from train.data.stored import StoredNumbers

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CHECKED = 1 << 20  # numbers at once
_DOCUMENTS = 1 << 16  # documents whose places are read at once
_PIECE = 1 << 19  # tokens that are read at once, up to the end of a document


@dataclass(frozen=True)
class TokenPiece:
    """Some documents of a .bin, as token ids.

    first_document  the number of the first one, from 1
    size            bytes of the .bin
    """

    file: TextFile
    first_document: int
    documents: list[np.ndarray]
    size: int

    def __str__(self) -> str:
        last = self.first_document + len(self.documents) - 1
        return f"{self.file.path}, documents {self.first_document} to {last}"


@dataclass(frozen=True)
class _Index:
    """The header of an .idx, and its tables. Raises ValueError if it is not one, or not whole."""

    path: Path
    dtype: np.dtype
    sequences: int
    entries: int

    @classmethod
    def open(cls, path: Path) -> _Index:
        with open(path, "rb") as opened:
            header = opened.read(_HEADER.size)
            size = os.fstat(opened.fileno()).st_size
        if not header.startswith(_MAGIC):
            raise ValueError(f"{path} is no index of Megatron-LM, which starts with {_MAGIC!r}")
        if len(header) < _HEADER.size:
            raise ValueError(f"{path} is truncated: it has {size} bytes")
        _, version, code, sequences, entries = _HEADER.unpack(header)
        if version != 1:
            raise ValueError(f"{path}: expected version 1, got {version}")
        dtype = np.dtype(_DTYPES.get(code, "V"))
        if dtype.kind not in "iu":
            raise ValueError(f"{path}: expected a dtype of whole numbers, got code {code}")
        expected = _HEADER.size + 12 * sequences + 8 * entries
        if size == expected + sequences:
            raise ValueError(f"{path} has modes: data of several modalities is not read")
        if size != expected:
            raise ValueError(
                f"{path} has {size:,} bytes, expected {expected:,} for {sequences:,} sequences and "
                f"{entries:,} entries of documents"
            )
        return cls(path, dtype, sequences, entries)

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens of sequences `start` to `stop` - 1: int64."""
        return self._read("<i4", 0, start, stop).astype(np.int64)

    def places(self, start: int, stop: int) -> np.ndarray:
        """Return the places of sequences `start` to `stop` - 1 in the .bin, in bytes."""
        return self._read("<i8", 4 * self.sequences, start, stop)

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Return the first sequences of documents: entries `start` to `stop` - 1."""
        return self._read("<i8", 12 * self.sequences, start, stop)

    def _read(self, kind: str, table: int, start: int, stop: int) -> np.ndarray:
        place = _HEADER.size + table + start * np.dtype(kind).itemsize
        numbers = np.fromfile(self.path, kind, stop - start, offset=place)
        if len(numbers) < stop - start:
            raise ValueError(f"{self.path} was truncated while it was read")
        return numbers


class IndexedTokens:
    """The documents of a .bin and its .idx.

    Raises ValueError if one of them is not what the format says, or does not fit the other.
    """

    def __init__(self, file: TextFile):
        self._file, self._index = file, _Index.open(file.path.with_suffix(".idx"))
        self._check_sequences()
        self._check_documents()

    def pieces(self) -> Iterator[TokenPiece]:
        """Yield all documents, some at a time."""
        tokens = StoredNumbers(self._file.path, self._index.dtype)
        number, documents, size = 1, list[np.ndarray](), 0
        for start, stop in self._bounds():
            documents.append(tokens[start:stop])
            size += stop - start
            if size >= _PIECE:
                yield self._piece(number, documents)
                number, documents, size = number + len(documents), [], 0
        if documents:
            yield self._piece(number, documents)

    def _piece(self, number: int, documents: list[np.ndarray]) -> TokenPiece:
        return TokenPiece(self._file, number, documents, sum(ids.nbytes for ids in documents))

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """Yield the first token of each document, and the one after its last."""
        before = 0
        for first in range(0, self._index.entries - 1, _DOCUMENTS):
            last = min(first + _DOCUMENTS, self._index.entries - 1)
            sequences = self._index.starts(first, last + 1)
            lengths = self._index.lengths(int(sequences[0]), int(sequences[-1]))
            tokens = before + np.concatenate([[0], np.cumsum(lengths)])
            bounds = tokens[sequences - sequences[0]].tolist()
            yield from itertools.pairwise(bounds)
            before = bounds[-1]

    def _check_sequences(self) -> None:
        """Raise ValueError unless sequences follow one another and fill the .bin."""
        index, end = self._index, 0
        for first in range(0, index.sequences, _CHECKED):
            last = min(first + _CHECKED, index.sequences)
            lengths = index.lengths(first, last) * index.dtype.itemsize
            ends = end + np.cumsum(lengths)
            if (lengths < 0).any() or (index.places(first, last) != ends - lengths).any():
                raise ValueError(f"{index.path}: sequences do not follow one another in the .bin")
            end = int(ends[-1])
        if (size := self._file.path.stat().st_size) != end:
            raise ValueError(
                f"{self._file.path} has {size:,} bytes, but {index.path.name} lists {end:,}"
            )

    def _check_documents(self) -> None:
        """Raise ValueError unless documents have all sequences, in their order."""
        index, before = self._index, 0
        for first in range(0, index.entries, _CHECKED):
            starts = index.starts(first, min(first + _CHECKED, index.entries))
            rising = np.diff(starts, prepend=before) >= 0
            if (first == 0 and starts[0] != 0) or not rising.all():
                raise ValueError(f"{index.path}: documents must start at rising sequences, from 0")
            before = int(starts[-1])
        if not index.entries or before != index.sequences:
            raise ValueError(
                f"{index.path}: documents end at sequence {before:,}, but there are "
                f"{index.sequences:,} sequences"
            )
