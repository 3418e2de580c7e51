"""The order in which training reads tokens on disk: sequences of one length.

If documents are kept apart, a sequence's mask is cut where they start, also in front of the rest of
a document. Each may get a begin token (token_file.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bmt_burst import IGNORE_INDEX
from train.data.source import Stored
from train.data.stored import StoredNumbers
from train.data.token_file import BegunText, StoredDocuments, TokenFile


@dataclass(frozen=True)
class Row:
    """One sequence.

    tokens     (seq_len,) int64
    labels     (seq_len,) int64, the next tokens; IGNORE_INDEX where there is no target
    documents  (0, ..., seq_len): the start of each document that is kept apart, and the end
    """

    tokens: Tensor
    labels: Tensor
    documents: tuple[int, ...]


def make_row(window: np.ndarray, starts: np.ndarray | None, seq_len: int) -> Row:
    """Return the row of consecutive tokens, of which the last is only a target, with padding.
    `starts` are the places in `window` above 0 where documents start, None to keep none apart.
    """
    filled = len(window) - 1
    tokens = torch.zeros(seq_len, dtype=torch.int64)
    labels = torch.full((seq_len,), IGNORE_INDEX)
    tokens[:filled], labels[:filled] = torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])
    bounds = {0, seq_len}
    if starts is not None:
        labels[torch.from_numpy(starts - 1)] = IGNORE_INDEX
        bounds |= {*starts[starts < filled].tolist(), filled}
    return Row(tokens, labels, tuple(sorted(bounds)))


class Sequences(Stored):
    """Tokens as sequences of `seq_len` inputs and their next tokens, each a target once an epoch.

    Sequence i starts at token i * seq_len. The last one may be short, and is then padded. With
    `documents`, these are kept apart, and the last token of one has no target. With `bos`, this
    token stands in front of each document that does not start with it, and counts as a token.

    Raises ValueError for fewer than two tokens, and for `bos` without `documents` or outside of the
    vocabulary.
    """

    def __init__(
        self,
        file: TokenFile,
        seq_len: int,
        seed: int,
        documents: bool = False,
        bos: int | None = None,
    ):
        super().__init__(file, seed)
        self.seq_len, self.documents, self.bos = seq_len, documents, bos
        if bos is not None and not documents:
            raise ValueError(
                "--bos needs documents that are kept apart: give --documents mask, or --bos none"
            )
        if bos is not None and bos >= self.vocab_size:
            raise ValueError(
                f"{self.folder}: expected a begin token below {self.vocab_size}, the size of the "
                f"vocabulary, got {bos}"
            )
        self._starts: StoredDocuments | BegunText | None = file.documents if documents else None
        self._text: StoredNumbers | BegunText = file.tokens
        if bos is not None:
            self._text = self._starts = file.with_begin_token(bos)
        if len(self._text) < 2:
            raise ValueError(f"{self.folder} has fewer than two tokens")

    @classmethod
    def open(cls, folder: str, _model: object, seq_len: int, seed: int) -> Self:
        return cls(TokenFile(folder), seq_len, seed)

    def keep_documents_apart(self, apart: bool, bos: int | None) -> Self:
        return type(self)(self.file, self.seq_len, self.seed, apart, bos)

    def __len__(self) -> int:
        return -(-(len(self._text) - 1) // self.seq_len)

    @property
    def description(self) -> str:
        if self._starts is None:
            return "documents not kept apart"
        begin = f", each after begin token {self.bos}" if self.bos is not None else ""
        return f"documents kept apart{begin}"

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "tokens": len(self.file.tokens),
            "digest": self.file.digest,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "documents": "mask" if self.documents else "ignore",
            "bos": self.bos,
        }

    def of_sample(self, sample: int) -> Row:
        return self.read(self.order(sample))

    def read(self, index: int | None) -> Row:
        """Return sequence `index`, for None one without targets, or raise ValueError."""
        if index is None:
            return make_row(np.zeros(1, np.int64), None, self.seq_len)
        start, window = index * self.seq_len, self._read_window(index)
        if self._starts is None:
            return make_row(window, None, self.seq_len)
        starts = self._starts.between(start + 1, start + len(window)) - start
        return make_row(window, starts, self.seq_len)

    def _read_window(self, index: int) -> np.ndarray:
        """Return the tokens of sequence `index` and the next one, up to the last token: int64."""
        start = index * self.seq_len
        window = self._text[start : start + self.seq_len + 1].astype(np.int64)
        if window.max() >= self.vocab_size:
            raise ValueError(
                f"{self.folder}: expected tokens below {self.vocab_size}, the size of the "
                f"vocabulary, got {int(window.max())} in sequence {index} of {self.seq_len} tokens"
            )
        return window
