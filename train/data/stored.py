"""Tokens in a folder: written once from start to end, and read in slices (token_file.py)."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from train.base.files import hash_file, writing
from train.base.wording import counted
from train.data.tokenizer_base import Tokenizer
from train.registry import kind_of_data, load

_SAMPLED = 1 << 15  # tokens in a row
_COPIED = 1 << 20  # tokens at once


class HashedFile:
    """A new file, and the sha256 of the bytes that were written to it."""

    def __init__(self, path: Path):
        self._file, self._hash = open(path, "xb"), hashlib.sha256()

    def write(self, data: bytes) -> None:
        with writing(self._file.name):
            self._file.write(data)
        self._hash.update(data)

    def close(self) -> str:
        """Sync the file to disk. Return its sha256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()


Part = TypeVar("Part")


class DataWriter(ABC, Generic[Part]):
    """Writes one data folder, the index last. `fewest` units make training and validation data."""

    unit: ClassVar[str]
    fewest: ClassVar[tuple[int, int]]

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self.folder, self.tokenizer = folder, tokenizer
        folder.mkdir(parents=True)
        self.tokens = self.documents = 0
        self._token_file = HashedFile(folder / "tokens.bin")
        self._document_file = HashedFile(folder / "documents.bin")

    @property
    def units(self) -> int:
        """The number of units so far."""
        return self.documents

    @abstractmethod
    def write(self, document: Iterable[Part]) -> None:
        """Append a document or an instance, given in parts. Skip one without tokens."""

    @abstractmethod
    def copy(self, other: DataWriter[Part], start: int, end: int) -> None:
        """Append units `start` to `end` of another writer that is closed."""

    @abstractmethod
    def _notes(self) -> dict[str, Any]:
        """Return facts of this kind of data for the index."""

    def close(self) -> dict[str, str]:
        """Close the files of tokens. Return the sha256 of each."""
        return {
            "tokens.bin": self._token_file.close(),
            "documents.bin": self._document_file.close(),
        }

    def finish(self, **notes: object) -> None:
        """Complete the folder. The index also gets `notes`, such as the sources of the text."""
        hashes = self.close()
        self.tokenizer.save(self.folder)
        for file in sorted(self.folder.glob("tokenizer.*")):
            hashes[file.name] = hash_file(file)
        index = {
            "tokens": self.tokens,
            "documents": self.documents,
            "dtype": self.tokenizer.dtype.name,
            "vocab_size": self.tokenizer.vocab_size,
            "eos_id": self.tokenizer.eos_id,
            "sha256": hashes,
            "digest": sample_digest(
                StoredNumbers(self.folder / "tokens.bin", self.tokenizer.dtype)
            ),
            **self._notes(),
            **notes,
        }
        with open(self.folder / "index.json", "w") as opened:
            opened.write(json.dumps(index, indent=1) + "\n")
            opened.flush()
            os.fsync(opened.fileno())

    def _append(self, ids: Sequence[int] | np.ndarray) -> None:
        self._token_file.write(np.asarray(ids, dtype=self.tokenizer.dtype).tobytes())
        self.tokens += len(ids)

    def _note_documents(self, starts: np.ndarray) -> None:
        self._document_file.write(starts.astype(np.int64).tobytes())
        self.documents += len(starts)


class TokenWriter(DataWriter[np.ndarray]):
    """Writes documents, given as ids, and eos after each. `begun` of them start with bos."""

    unit, fewest = "tokens", (1, 2)

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        super().__init__(folder, tokenizer)
        self.begun = 0

    @property
    def units(self) -> int:
        return self.tokens

    def write(self, document: Iterable[np.ndarray]) -> None:
        start = self.tokens
        for ids in document:
            if len(ids) and self.tokens == start:
                self.begun += int(ids[0] == self.tokenizer.bos_id)
            self._append(ids)
        if self.tokens > start:
            self._append([self.tokenizer.eos_id])
            self._note_documents(np.array([start]))

    def copy(self, other: DataWriter[np.ndarray], start: int, end: int) -> None:
        """Append tokens `start` to `end` of a closed writer. A document that is cut gets an eos."""
        tokens = StoredNumbers(other.folder / "tokens.bin", self.tokenizer.dtype)
        documents = np.fromfile(other.folder / "documents.bin", dtype=np.int64)
        inside = documents[(documents > start) & (documents < end)].tolist()
        for first, last in itertools.pairwise([start, *inside, end]):
            ended = int(tokens[last - 1 : last][0]) == self.tokenizer.eos_id
            stop = last - int(ended)  # `write` adds an eos
            self.write(tokens[at : min(at + _COPIED, stop)] for at in range(first, stop, _COPIED))

    def _notes(self) -> dict[str, Any]:
        return {"bos_id": self.tokenizer.bos_id, "begun_documents": self.begun}


def make_writer(folder: Path, tokenizer: Tokenizer) -> DataWriter[Any]:
    """Return the writer of a new folder for the kind of model that has this tokenizer."""
    return load(kind_of_data(tokenizer.instances).writer)(folder, tokenizer)


class StoredNumbers:
    """Numbers of a file, which a slice reads. Raises ValueError if the file was changed.

    It is not mapped, since a mapped file that is truncated ends the process with SIGBUS.
    """

    def __init__(self, file: Path, dtype: np.dtype):
        self._file, self._dtype = file, dtype
        self._descriptor = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._opened = os.fstat(self._descriptor)

    def __len__(self) -> int:
        return self._opened.st_size // self._dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(len(self))
        assert step == 1
        position, end = (place * self._dtype.itemsize for place in (start, max(start, stop)))
        read = bytearray()
        try:
            # a call reads 2 GiB at most
            while position < end and (more := os.pread(self._descriptor, end - position, position)):
                read += more
                position += len(more)
            now = os.stat(self._file)
        except OSError as error:
            raise ValueError(
                f"{self._file} cannot be read at byte {position}: {error.strerror}"
            ) from error
        if position < end or _state(now) != _state(self._opened):
            raise ValueError(
                f"{self._file} was changed, truncated or replaced since it was opened: it had "
                f"{counted(self._opened.st_size, 'byte')}, and now has {now.st_size:,}"
            )
        return np.frombuffer(read, dtype=self._dtype)


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def sample_digest(tokens: StoredNumbers) -> str:
    """Return the sha256 of 16 evenly spaced stretches of the tokens."""
    starts = np.linspace(0, max(len(tokens) - _SAMPLED, 0), 16, dtype=np.int64)
    return hashlib.sha256(b"".join(tokens[i : i + _SAMPLED].tobytes() for i in starts)).hexdigest()
