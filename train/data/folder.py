"""Tokens on disk, and the order in which training reads them.

prepare_data.py writes a folder of tokens:

    tokens.bin      all documents, one after the other, each ended by eos; uint16 or uint32
    documents.bin   the place where each document starts: int64, rising from 0; older folders may
                    lack it
    tokenizer.*     the tokenizer, with its identity (train/run/same_tokenizer.py)
    index.json      counts, dtype, sources, and the sha256 of every other file; written last

Opening a folder compares its files with the index: all bytes of files up to 256 MiB, and size and
samples of larger ones (`sha256sum` compares the rest). The folder may be a link, but its files must
not lead out of it.

Training reads sequences of one length. Documents are kept apart (--documents mask) or not (ignore).
If they are, the mask of a sequence is cut where documents start. A sequence that starts inside a
document starts with the rest of it. Each document may get a begin token (--bos, see begin.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bmt_burst.sequence.layout import IGNORE_INDEX
from train.base import ranks
from train.base.paths import inside
from train.base.wording import counted
from train.data.begin import BegunText
from train.data.documents import Documents, DocumentsByEos, StoredDocuments
from train.data.stored import StoredNumbers, sample_digest

_CHEAP = 1 << 28  # bytes of a file that are hashed whenever it is opened


class TokenFile:
    """A folder of tokens. Raises ValueError if it is incomplete, does not match its index, or has
    files outside of itself.

    instances  the kind of model for which the folder must hold instances; None for documents
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
                "see prepare_data.py --tokenizer"
            )
        dtype = np.dtype(self.index["dtype"])
        self._check_size("tokens.bin", self.index["tokens"] * dtype.itemsize)
        if not self.index["tokens"]:
            raise ValueError(f"{self.folder / 'tokens.bin'} is empty")
        documents = inside(self.folder, "documents.bin")
        if documents.exists() and isinstance(self.index.get("documents"), int):
            self._check_size("documents.bin", self.index["documents"] * 8)
        self.tokens = StoredNumbers(self.folder / "tokens.bin", dtype)
        if "sha256" in self.index:
            self.verify(_CHEAP)
        elif ranks.rank() == 0:
            print(
                f"{self.folder} has an older index.json without sha256, so file contents are not "
                "checked",
                file=sys.stderr,
            )
        self.documents = self._open_documents(documents)

    def _open_documents(self, file: Path) -> Documents | None:
        """Return where documents start, or None if that is not known. Check all of documents.bin
        unless it is large.
        """
        if file.exists():
            stored = StoredDocuments(file, len(self.tokens))
            if file.stat().st_size <= _CHEAP:
                stored.check()
            return stored
        eos_id = self.index.get("eos_id")
        return DocumentsByEos(self.tokens, eos_id) if type(eos_id) is int else None

    @property
    def bos_id(self) -> int | None:
        """The tokenizer's begin token, which documents get by default. None in older folders."""
        return self.index.get("bos_id")

    def with_begin_token(self, bos: int) -> BegunText:
        """Return the text with token `bos` in front of each document. Raises ValueError if it is
        not known where documents start.
        """
        begun = self.index.get("begun_documents") if self.bos_id == bos else None
        return BegunText(self.tokens, self.known_documents(), bos, begun)

    def known_documents(self) -> Documents:
        """Return where documents start. Raises ValueError if that is not known."""
        if self.documents is None:
            raise ValueError(
                f"{self.folder} has no documents.bin, and its index.json has no eos_id, so it is "
                "not known where documents start; give --documents ignore"
            )
        return self.documents

    @cached_property
    def digest(self) -> str:
        """The sha256 of samples of the tokens. It tells texts of the same length apart."""
        return sample_digest(self.tokens)

    def verify(self, up_to: float = float("inf")) -> None:
        """Compare all bytes of files up to `up_to` bytes with the index, and samples of the tokens
        in any case.

        Raises ValueError with the file's name if they differ.
        """
        for name, expected in self.index["sha256"].items():
            file = inside(self.folder, name)
            if not file.is_file():
                raise ValueError(f"{self.folder} has no {name}")
            if file.stat().st_size <= up_to:
                with open(file, "rb") as opened:
                    found = hashlib.file_digest(opened, "sha256").hexdigest()
                if found != expected:
                    raise ValueError(
                        f"{file} was changed: its sha256 is {found}, index.json says {expected}"
                    )
        if self.index.get("digest") != self.digest:
            raise ValueError(
                f"{self.folder / 'tokens.bin'} was changed: its tokens differ from the "
                "tokens that index.json was written for"
            )

    def _read_index(self) -> dict:
        file = inside(self.folder, "index.json")
        if not file.is_file():
            raise ValueError(
                f"{self.folder} has no index.json: it is not a folder that prepare_data.py finished"
            )
        try:
            index = json.loads(file.read_text())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: {error}") from error
        if isinstance(index, dict) and "stream" in index:
            raise ValueError(
                f"{self.folder} is a stream, which only --data of pretrain.py reads: prepare these "
                "files without --stream"
            )
        for name, kind in (("tokens", int), ("dtype", str), ("vocab_size", int)):
            if not isinstance(index, dict) or not isinstance(index.get(name), kind):
                raise ValueError(f"{file} has no {name}, {kind.__name__}")
        if index["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"{file}: expected dtype uint16 or uint32, got {index['dtype']!r}")
        if not isinstance(index.get("sha256", {}), dict):
            raise ValueError(f"{file}: expected files in sha256, got {index['sha256']!r}")
        if (bos := index.get("bos_id")) is not None and not (
            type(bos) is int and 0 <= bos < index["vocab_size"]
        ):
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
                f"{file} has {counted(file.stat().st_size, 'byte')}, but its index says "
                f"{expected:,}"
            )


class StoredRows(ABC):
    """The rows of a data folder (train.data.source.Stored), in another order in each epoch."""

    file: TokenFile
    seed: int

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def folder(self) -> Path:
        return self.file.folder

    @property
    def vocab_size(self) -> int:
        found: int = self.file.index["vocab_size"]
        return found

    @property
    def kind(self) -> str | None:
        return self.file.instances

    @property
    def finds_documents(self) -> bool:
        return self.file.documents is not None

    @property
    def bos_id(self) -> int | None:
        return self.file.bos_id

    @property
    def epoch(self) -> int:
        return len(self)

    def order(self, sample: int) -> int:
        """Return the row that is sample number `sample` of the run."""
        epoch, place = divmod(sample, len(self))
        return int(self._orders(epoch)[place])

    @cached_property
    def _orders(self) -> Any:
        """A function that returns the order of an epoch. A step may be at the end of one."""
        return lru_cache(maxsize=2)(lambda epoch: permutation(self.seed, epoch, len(self)))

    def state(self, samples: int) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        assert not state


@dataclass(frozen=True)
class Row:
    """One sequence.

    tokens     (seq_len,) int64
    labels     (seq_len,) int64, the next tokens; IGNORE_INDEX where there is no target
    documents  (0, ..., seq_len): the start of each document, and the end, as Mask.documents takes
               them; (0, seq_len) if documents are not kept apart
    """

    tokens: Tensor
    labels: Tensor
    documents: tuple[int, ...]


@dataclass(frozen=True)
class Sequences(StoredRows):
    """Tokens as sequences of `seq_len` inputs and their next tokens. Each token is a target once an
    epoch.

    Sequence i starts at token i * seq_len. The last sequence may be short: it is padded with
    positions that have no target. `order` maps samples of the run to sequences, with a new
    permutation every epoch.

    With `documents`, documents are kept apart. The last token of a document has no target, since
    the next token begins another document. The padding of the last sequence is a document itself.
    With `bos`, this token stands in front of each document that does not start with it, and counts
    as a token.

    Raises ValueError for fewer than two tokens, for `documents` if their starts are not known, and
    for `bos` without `documents` or outside of the vocabulary.
    """

    file: TokenFile
    seq_len: int
    seed: int
    documents: bool = False
    bos: int | None = None

    def __post_init__(self):
        if self.bos is not None and not self.documents:
            raise ValueError(
                "--bos needs documents that are kept apart: give --documents mask, or --bos none"
            )
        if self.bos is not None and self.bos >= (known := self.file.index["vocab_size"]):
            raise ValueError(
                f"{self.file.folder}: expected a begin token below {known}, the size of the "
                f"vocabulary, got {self.bos}"
            )
        if self.documents:
            self.file.known_documents()
        if len(self.text) < 2:
            raise ValueError(f"{self.file.folder} has fewer than two tokens")

    @classmethod
    def open(cls, folder: str, _model: object, seq_len: int, seed: int) -> Self:
        return cls(TokenFile(folder), seq_len, seed)

    def keep_documents_apart(self, apart: bool, bos: int | None) -> Self:
        return dataclasses.replace(self, documents=apart, bos=bos)

    @property
    def example_scores(self) -> None:
        """Nothing, because these models add no learned bias."""
        return None

    @cached_property
    def text(self) -> StoredNumbers | BegunText:
        """The tokens from which sequences are cut."""
        return self.file.tokens if self.bos is None else self.file.with_begin_token(self.bos)

    def __len__(self) -> int:
        return -(-(len(self.text) - 1) // self.seq_len)

    @property
    def description(self) -> str:
        said = (
            f"documents kept apart by {self.file.known_documents().how}"
            if self.documents
            else "documents not kept apart"
        )
        return said + (f", each after begin token {self.bos}" if self.bos is not None else "")

    @property
    def padding(self) -> float:
        """The share of an epoch's positions that are padding. It is large if there is less text
        than `seq_len`.
        """
        return 1 - (len(self.text) - 1) / (len(self) * self.seq_len)

    @property
    def identity(self) -> dict[str, Any]:
        """The facts that must stay the same, so that a sample number means the same sample."""
        order = {
            "seq_len": self.seq_len,
            "seed": self.seed,
            "documents": "mask" if self.documents else "ignore",
        }
        return {
            "tokens": len(self.file.tokens),
            "digest": self.file.digest,
            **order,
            "bos": self.bos,
        }

    def of_sample(self, sample: int) -> Row:
        return self.read(self.order(sample))

    def read(self, index: int | None) -> Row:
        """Return sequence `index`. None stands for one without any target. Raises ValueError for
        unknown tokens.
        """
        tokens = torch.zeros(self.seq_len, dtype=torch.int64)
        labels = torch.full((self.seq_len,), IGNORE_INDEX)
        bounds = [0]
        if index is not None:
            start = index * self.seq_len
            window = self._read_window(index)
            filled = len(window) - 1
            tokens[:filled], labels[:filled] = window[:-1], window[1:]
            if self.documents:
                documents = (
                    self.text if isinstance(self.text, Documents) else self.file.known_documents()
                )
                after = torch.from_numpy(documents.between(start + 1, start + filled + 1)) - start
                labels[after - 1] = IGNORE_INDEX
                bounds += [*after[after < filled].tolist(), filled]
        if bounds[-1] < self.seq_len:
            bounds.append(self.seq_len)
        return Row(tokens, labels, tuple(bounds))

    def _read_window(self, index: int) -> Tensor:
        """Return the tokens of sequence `index` and the next one, as far as there are any:
        int64.
        """
        start = index * self.seq_len
        window = torch.from_numpy(self.text[start : start + self.seq_len + 1].astype(np.int64))
        if window.max() >= self.file.index["vocab_size"]:
            raise ValueError(
                f"{self.file.folder}: expected tokens below {self.file.index['vocab_size']}, the "
                f"size of the vocabulary, got {int(window.max())} in sequence {index} of "
                f"{self.seq_len} tokens"
            )
        return window


def permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    """Return the order of `length` rows in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(length)
