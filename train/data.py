"""Tokens on disk, and the order in which training reads them.

A folder of tokens (written by prepare_data.py):

    tokens.bin      all documents one after the other, each ended by eos; uint16 or uint32
    documents.bin   where each document starts: int64; for readers that want documents apart, training does not
    tokenizer.*     the tokenizer
    index.json      counts, dtype, where the text came from, the sha256 of every other file; written last

Files are compared with the index when they are opened: all bytes of files up to 256 MiB, else the
size and samples of the tokens (`sha256sum` compares the rest). The folder may be a link, its files may not lead out.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bmt_burst.layout import IGNORE_INDEX
from train import ranks
from train.paths import inside
from train.stored import StoredTokens, sample_digest

_CHEAP = 1 << 28  # bytes of a file that are hashed whenever it is opened


class TokenFile:
    """A folder of tokens. Raises ValueError if it is not whole, not what its index says, or leads out of itself."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.index = self._read_index()
        dtype = np.dtype(self.index["dtype"])
        self._check_size("tokens.bin", self.index["tokens"] * dtype.itemsize)
        if inside(self.folder, "documents.bin").exists() and isinstance(self.index.get("documents"), int):
            self._check_size("documents.bin", self.index["documents"] * 8)
        if not self.index["tokens"]:
            raise ValueError(f"{self.folder / 'tokens.bin'} is empty")
        self.tokens = StoredTokens(self.folder / "tokens.bin", dtype)
        if "sha256" in self.index:
            self.verify(_CHEAP)
        elif ranks.rank() == 0:
            print(f"{self.folder}: an older index.json without sha256, file contents are not checked", file=sys.stderr)

    @cached_property
    def digest(self) -> str:
        """The sha256 of some of the tokens, from all over the file: tells other text of the same length."""
        return sample_digest(self.tokens)

    def verify(self, up_to: float = float("inf")) -> None:
        """Compares all bytes of the files of `up_to` bytes with the index, and samples of the tokens in any case.

        Raises ValueError, with the file's name, if they differ.
        """
        for name, expected in self.index["sha256"].items():
            file = inside(self.folder, name)
            if not file.is_file():
                raise ValueError(f"{self.folder} has no {name}")
            if file.stat().st_size <= up_to:
                with open(file, "rb") as opened:
                    found = hashlib.file_digest(opened, "sha256").hexdigest()
                if found != expected:
                    raise ValueError(f"{file} was changed: its sha256 is {found}, index.json says {expected}")
        if self.index.get("digest") != self.digest:
            raise ValueError(f"{self.folder / 'tokens.bin'} was changed: it has other tokens than index.json says")

    def _read_index(self) -> dict:
        file = inside(self.folder, "index.json")
        if not file.is_file():
            raise ValueError(f"{self.folder} has no index.json: not a folder that prepare_data.py finished")
        try:
            index = json.loads(file.read_text())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: {error}") from error
        for name, kind in (("tokens", int), ("dtype", str), ("vocab_size", int)):
            if not isinstance(index, dict) or not isinstance(index.get(name), kind):
                raise ValueError(f"{file} has no {name}, {kind.__name__}")
        if index["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"{file} names dtype {index['dtype']!r}, not uint16 or uint32")
        if not isinstance(index.get("sha256", {}), dict):
            raise ValueError(f"{file} names no files in sha256, but {index['sha256']!r}")
        return index

    def _check_size(self, name: str, expected: int) -> None:
        file = inside(self.folder, name)
        if not file.is_file():
            raise ValueError(f"{self.folder} has no {name}")
        if file.stat().st_size != expected:
            raise ValueError(f"{file} has {file.stat().st_size} bytes, its index says {expected}")


@dataclass(frozen=True)
class Sequences:
    """The tokens as sequences of `seq_len` inputs and their next tokens, each token a target once an epoch.

    Sequence i covers tokens i * seq_len onwards; the last may be short and is filled up with positions that have no
    target. `order` says which sequence is the n-th sample of the run: a new permutation every epoch.
    """

    file: TokenFile
    seq_len: int
    seed: int

    def __post_init__(self):
        if len(self.file.tokens) < 2:
            raise ValueError(f"{self.file.folder} has fewer than two tokens")

    def __len__(self) -> int:
        return -(-(len(self.file.tokens) - 1) // self.seq_len)

    @property
    def padding(self) -> float:
        """The share of an epoch's positions that have no target: large where there is less text than `seq_len`."""
        return 1 - (len(self.file.tokens) - 1) / (len(self) * self.seq_len)

    def order(self, sample: int) -> int:
        epoch, place = divmod(sample, len(self))
        return int(_permutation(self.seed, epoch, len(self))[place])

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of sequence `index`: two (seq_len,) int64 tensors. Raises ValueError for unknown tokens."""
        start = index * self.seq_len
        window = torch.from_numpy(self.file.tokens[start : start + self.seq_len + 1].astype(np.int64))
        if window.max() >= self.file.index["vocab_size"]:
            raise ValueError(
                f"{self.file.folder}: token {int(window.max())} in tokens {start} to {start + len(window) - 1}, "
                f"of a vocabulary of {self.file.index['vocab_size']}"
            )
        inputs = torch.zeros(self.seq_len, dtype=torch.int64)
        labels = torch.full((self.seq_len,), IGNORE_INDEX)
        inputs[: len(window) - 1], labels[: len(window) - 1] = window[:-1], window[1:]
        return inputs, labels

    def batch(self, indices: list[int | None]) -> tuple[Tensor, Tensor]:
        """Inputs and labels (len(indices), seq_len); None stands for a sequence without any target."""
        blank = torch.zeros(self.seq_len, dtype=torch.int64), torch.full((self.seq_len,), IGNORE_INDEX)
        rows = [blank if index is None else self.read(index) for index in indices]
        return torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(length)
