"""Tokens on disk, in a folder that prepare_data.py writes:

tokens.bin      all documents, one after the other, each ended by eos; uint16 or uint32
documents.bin   the place where each document starts: int64
tokenizer.*     the tokenizer, with its identity (train/data/same_tokenizer.py)
index.json      counts, dtype, sources, and the sha256 of every other file; written last
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np

from models.json_files import read_json
from train.base.files import hash_file
from train.base.folders import inside
from train.base.wording import counted
from train.data.documents import BegunText, StoredDocuments
from train.data.stored import StoredNumbers, sample_digest

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
