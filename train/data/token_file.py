"""Tokens on disk, in a folder that prepare_data.py writes:

tokens.bin      all documents, one after the other, each ended by eos; uint16 or uint32
documents.bin   the place where each document starts: int64
tokenizer.*     the tokenizer, with its identity (train/data/same_tokenizer.py)
index.json      counts, dtype, sources, and the sha256 of every other file; written last

With --bos, a begin token in front of each document is a token of its row. A document that is cut at
a row's end continues in the next row without one.
"""

from __future__ import annotations

import bisect
from functools import cached_property
from pathlib import Path

import numpy as np

from models.json_files import read_json
from train.base.files import hash_file
from train.base.folders import inside
from train.base.wording import counted
from train.data.stored import StoredNumbers, sample_digest

_CHECKED = 1 << 20  # documents at once
_SCANNED = 1 << 20  # tokens at once
_CHEAP = 1 << 28  # bytes of a file that are hashed whenever it is opened
_FACTS = {  # of an index, with their types
    **dict.fromkeys(("tokens", "documents", "vocab_size", "eos_id"), int),
    **dict.fromkeys(("dtype", "digest"), str),
    "sha256": dict,
}


class TokenFile:
    """A folder of tokens, or of `instances` for a kind of model. Raises ValueError if it is
    incomplete, does not match its index, or has files outside of itself.
    """

    instances: str | None = None

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.index = self._read_index()
        if (found := self.index.get("instances")) != self.instances:
            held, wanted = (
                f"instances of {x}" if x else "plain text" for x in (found, self.instances)
            )
            raise ValueError(
                f"{self.folder} holds {held}, but this model reads {wanted}: "
                "give a --model that reads them, or other data (prepare_data.py --tokenizer)"
            )
        dtype = np.dtype(self.index["dtype"])
        self._check_size("tokens.bin", self.index["tokens"] * dtype.itemsize)
        if not self.index["tokens"]:
            raise ValueError(f"{self.folder / 'tokens.bin'} is empty")
        self._check_size("documents.bin", self.index["documents"] * 8)
        self.tokens = StoredNumbers(self.folder / "tokens.bin", dtype)
        self._verify()
        file = self.folder / "documents.bin"
        self.documents = StoredDocuments(file, len(self.tokens))
        if file.stat().st_size <= _CHEAP:
            self.documents.check()

    @property
    def bos_id(self) -> int | None:
        """The tokenizer's begin token, which documents get by default. None for instances."""
        return self.index.get("bos_id")

    def with_begin_token(self, bos: int) -> BegunText:
        """Return the text with token `bos` in front of each document, or raise ValueError."""
        begun = self.index.get("begun_documents") if self.bos_id == bos else None
        return BegunText(self.tokens, self.documents, bos, begun)

    @cached_property
    def digest(self) -> str:
        """The sha256 of samples of the tokens. It tells texts of the same length apart."""
        return sample_digest(self.tokens)

    def _verify(self) -> None:
        """Compare files with the index, large ones by samples. Raises ValueError."""
        for name, expected in self.index["sha256"].items():
            file = inside(self.folder, name)
            if not file.is_file():
                raise ValueError(f"{self.folder} has no {name}")
            if file.stat().st_size <= _CHEAP and (found := hash_file(file)) != expected:
                raise ValueError(f"{file} was changed: its sha256 is {found}, expected {expected}")
        if self.index.get("digest") != self.digest:
            raise ValueError(
                f"{self.folder / 'tokens.bin'} was changed: its tokens differ from the index's"
            )

    def _read_index(self) -> dict:
        file = inside(self.folder, "index.json")
        if not file.is_file():
            raise ValueError(
                f"{self.folder} has no index.json: it is not a folder that prepare_data.py finished"
            )
        index = read_json(file)
        if "stream" in index:
            raise ValueError(
                f"{self.folder} is a stream, which only --data of pretrain.py reads: prepare these "
                "files without --stream"
            )
        for name, kind in _FACTS.items():
            if not isinstance(index.get(name), kind):
                raise ValueError(
                    f"{file} has no {name}, {kind.__name__}: prepare the data again, unless it is "
                    "damaged"
                )
        if index["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"{file}: expected dtype uint16 or uint32, got {index['dtype']!r}")
        bos = index.get("bos_id")
        if "instances" not in index and not (type(bos) is int and 0 <= bos < index["vocab_size"]):
            raise ValueError(
                f"{file}: expected a bos_id among {index['vocab_size']} tokens, got {bos!r}"
            )
        return index

    def _check_size(self, name: str, expected: int) -> None:
        file = inside(self.folder, name)
        if not file.is_file():
            raise ValueError(f"{self.folder} has no {name}")
        if file.stat().st_size != expected:
            raise ValueError(
                f"{file} has {counted(file.stat().st_size, 'byte')}, but its index has {expected:,}"
            )


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
