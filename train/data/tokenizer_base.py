"""The contract of a tokenizer, and how a folder stores one."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from train.base.folders import inside

SPEC = "tokenizer.spec.json"


class Tokenizer(ABC):
    """Text to ids and back. `eos_id` ends a document. Ids are below `vocab_size`.

    bos_id     the begin token, which pretraining puts in front of a document; `eos_id` if there is
               none
    eos        the name by which a file's end-of-text token was chosen; None for the tokenizer's own
    instances  the kind of model that reads its data folders; None if they hold documents
    left_out   number of characters so far for which `encode` had no ids
    """

    vocab_size: int
    eos_id: int
    bos_id: int
    file: Path | None = None
    eos: str | None = None
    instances: str | None = None
    left_out: int = 0

    @abstractmethod
    def encode(self, text: str) -> Sequence[int] | np.ndarray:
        """Return the ids of `text`, without any special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens."""

    def special_names(self) -> Collection[str]:
        """Return the names of special tokens, which `encode` reads as letters."""
        return ()

    def encode_special(self, text: str) -> Sequence[int] | np.ndarray:
        """Return the ids of `text`, in which names of special tokens are these tokens."""
        names = sorted(self.special_names(), key=len, reverse=True)  # a name may begin another one
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]:
            token = self.id_of(part) if part in names else None
            ids += [int(i) for i in self.encode(part)] if token is None else [token]
        return ids

    def decode_special(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with the names of special tokens."""
        special = {self.id_of(name) for name in self.special_names()}
        runs = itertools.groupby(ids, lambda token: token in special)
        return "".join(
            "".join(map(self.name_of, run)) if named else self.decode([*run]) for named, run in runs
        )

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name, or None if there is no such token."""

    @abstractmethod
    def name_of(self, token: int) -> str:
        """Return the name of a token by its id, by which `id_of` finds it if it is special. Other
        ids also have a name, since a checkpoint or a config.json may be of another tokenizer.
        """

    @abstractmethod
    def _rules(self) -> Any:
        """Return, as JSON values, the vocabulary and all rules by which text becomes ids."""

    @cached_property
    def identity(self) -> str:
        """The sha256 of vocabulary, rules and end-of-text token, equal if all ids are."""
        facts = json.dumps([type(self).__name__, self.eos_id, self._rules()], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype:
        """The narrowest unsigned dtype for the ids."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def save(self, folder: Path, **notes: Any) -> None:
        """Write the files that `load_tokenizer` reads. `notes` are stored with its name."""
        folder.mkdir(parents=True, exist_ok=True)
        name = None
        if self.file is not None:
            name = f"tokenizer{self.file.suffix}"
            if self.file.resolve() != (folder / name).resolve():
                shutil.copyfile(self.file, inside(folder, name))
        spec = {
            "kind": type(self).__name__,
            "file": name,
            "eos": self.eos,
            "identity": self.identity,
            **notes,
        }
        inside(folder, SPEC).write_text(json.dumps(spec) + "\n")
