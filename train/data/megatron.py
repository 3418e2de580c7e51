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
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from train.data.files import Piece, TextFile
from train.data.stored import StoredNumbers

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_PIECE = 1 << 19  # tokens that are read at once, up to the end of a document


class IndexedTokens:
    """The documents of a .bin and its .idx. Raises ValueError if they break the format."""

    def __init__(self, file: TextFile):
        self._file = file
        index = file.path.with_suffix(".idx")
        dtype, lengths, places, firsts = _read_index(index)
        self._tokens = StoredNumbers(file.path, dtype)
        ends = np.cumsum(lengths, dtype=np.int64)
        if (lengths < 0).any() or (places != (ends - lengths) * dtype.itemsize).any():
            raise ValueError(f"{index}: sequences do not follow one another in the .bin")
        self._ends = np.concatenate([[0], ends])
        size, expected = file.path.stat().st_size, int(self._ends[-1]) * dtype.itemsize
        if size != expected:
            raise ValueError(f"{file.path} has {size:,} bytes, but {index.name} lists {expected:,}")
        self._firsts = firsts
        if len(firsts) and (firsts[0] != 0 or (np.diff(firsts) < 0).any()):
            raise ValueError(f"{index}: documents must start at rising sequences, from 0")
        if not len(firsts) or firsts[-1] != len(lengths):
            end = int(firsts[-1]) if len(firsts) else 0
            raise ValueError(
                f"{index}: documents end at sequence {end:,}, but there are {len(lengths):,} "
                "sequences"
            )

    def pieces(self) -> Iterator[Piece]:
        number, documents, size = 1, list[np.ndarray](), 0
        for start, stop in itertools.pairwise(map(int, self._ends[self._firsts])):
            documents.append(self._tokens[start:stop])
            size += stop - start
            if size >= _PIECE:
                yield self._piece(number, documents)
                number, documents, size = number + len(documents), [], 0
        if documents:
            yield self._piece(number, documents)

    def _piece(self, number: int, documents: list[np.ndarray]) -> Piece:
        return Piece(self._file, number, documents, sum(ids.nbytes for ids in documents))


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Return the dtype of the tokens and the tables of an .idx. Raises ValueError."""
    content = path.read_bytes()
    if not content.startswith(_MAGIC):
        raise ValueError(f"{path} is no index of Megatron-LM, which starts with {_MAGIC!r}")
    if len(content) < _HEADER.size:
        raise ValueError(f"{path} is truncated: it has {len(content)} bytes")
    _, version, code, sequences, entries = _HEADER.unpack_from(content)
    if version != 1:
        raise ValueError(f"{path}: expected version 1, got {version}")
    dtype = np.dtype(_DTYPES.get(code, "V"))
    if dtype.kind not in "iu":
        raise ValueError(f"{path}: expected a dtype of whole numbers, got code {code}")
    expected = _HEADER.size + 12 * sequences + 8 * entries
    if len(content) == expected + sequences:
        raise ValueError(f"{path} has modes: data of several modalities is not read")
    if len(content) != expected:
        raise ValueError(
            f"{path} has {len(content):,} bytes, expected {expected:,} for {sequences:,} sequences "
            f"and {entries:,} entries of documents"
        )
    lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size)
    places = np.frombuffer(content, "<i8", sequences, _HEADER.size + 4 * sequences)
    return dtype, lengths, places, np.frombuffer(content, "<i8", entries, expected - 8 * entries)
