"""Tokens on disk, and the order in which training reads them.

A folder of tokens (written by prepare_data.py):

    tokens.bin      all documents one after the other, each ended by eos; uint16 or uint32
    documents.bin   where each document starts: int64; for readers that want documents apart, training does not
    index.json      counts, dtype, where the text came from; written last
    tokenizer.*     the tokenizer
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bmt_burst.layout import IGNORE_INDEX

_SAMPLED = 1 << 15  # tokens in a row


class TokenFile:
    """Memory-mapped tokens. Raises ValueError if the folder is not whole."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        index_file = self.folder / "index.json"
        if not index_file.is_file():
            raise ValueError(f"{self.folder} has no index.json: not a folder that prepare_data.py finished")
        try:
            self.index = json.loads(index_file.read_text())
        except ValueError as error:
            raise ValueError(f"{index_file}: {error}") from error
        for name, kind in (("tokens", int), ("dtype", str), ("vocab_size", int)):
            if not isinstance(self.index, dict) or not isinstance(self.index.get(name), kind):
                raise ValueError(f"{index_file} has no {name}, {kind.__name__}")
        if self.index["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"{index_file} names dtype {self.index['dtype']!r}, not uint16 or uint32")
        file = self.folder / "tokens.bin"
        if not file.is_file():
            raise ValueError(f"{self.folder} has no tokens.bin")
        expected = self.index["tokens"] * np.dtype(self.index["dtype"]).itemsize
        if file.stat().st_size != expected:
            raise ValueError(f"{file} has {file.stat().st_size} bytes, its index says {expected}")
        if not expected:
            raise ValueError(f"{file} is empty")
        self.tokens = np.memmap(file, dtype=self.index["dtype"], mode="r")

    @cached_property
    def digest(self) -> str:
        """The sha256 of some of the tokens, from all over the file: tells other text of the same length."""
        starts = np.linspace(0, max(len(self.tokens) - _SAMPLED, 0), 16, dtype=np.int64)
        return hashlib.sha256(b"".join(self.tokens[i : i + _SAMPLED].tobytes() for i in starts)).hexdigest()


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
        """Share of the positions of an epoch that have no target."""
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
