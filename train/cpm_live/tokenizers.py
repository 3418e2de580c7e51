"""CPM-Bee's and CPM-Ant's tokenizers, over a vocabulary file.

A Bee's text may name special tokens, `<name>`, and `<name_3>` is `<name>` with a sub-id. Each run
of characters that the vocabulary lacks is `<unk>` with a sub-id. Sub-ids tell such tokens of an
instance apart. From an Ant's text such characters are left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from train.cpm_live.vocabulary import Vocabulary, bee_parts, escaped
from train.data.records import BadRecord
from train.data.tokenizer_base import Tokenizer

Piece = tuple[int, str | None]  # an id, and the text of a token that gets a sub-id


class LiveTokenizer(Tokenizer):
    """The common part. Raises ValueError for a file without `<pad>`, `<unk>`, `<s>` or `</s>`."""

    def __init__(self, file: Path):
        self.file, self.vocabulary = file, Vocabulary(file)
        self.vocab_size = len(self.vocabulary)
        names = ("<pad>", "<unk>", "<s>", "</s>")
        self.pad_id, self.unk_id, self.bos_id, self.eos_id = (
            self.vocabulary.id(name) for name in names
        )

    def id_of(self, token: str) -> int | None:
        return self.vocabulary.id(token) if token in self.vocabulary else None

    def name_of(self, token: int) -> str:
        known = token < self.vocab_size
        return self.vocabulary.pieces[token] if known else f"token {token}"

    def _rules(self) -> list[str]:
        return self.vocabulary.pieces


class SubIds:
    """The sub-ids of an instance: 0, 1, 2, ... for the texts of a token, as they appear."""

    def __init__(self):
        self._numbers: dict[int, dict[str, int]] = {}

    def of(self, token: int, text: str | None) -> int:
        if text is None:
            return 0
        numbers = self._numbers.setdefault(token, {})
        return numbers.setdefault(text, len(numbers))

    def text(self, token: int, sub: int) -> str | None:
        """Return the text that has this sub-id of a token, or None."""
        numbers = self._numbers.get(token, {})
        return next((text for text, number in numbers.items() if number == sub), None)


class BeeTokenizer(LiveTokenizer):
    """A Bee's tokenizer. Also raises ValueError for a file without `<root>` or `<ans>`."""

    instances = "cpm-bee"

    def __init__(self, file: Path):
        super().__init__(file)
        self.root_id, self.ans_id = self.vocabulary.id("<root>"), self.vocabulary.id("<ans>")

    def pieces(self, text: str) -> list[Piece]:
        """Return the tokens of a text. Raises BadRecord for unknown special tokens."""
        found: list[Piece] = []
        for part, special in bee_parts(text):
            if special:
                found.append(self._special_piece(part))
                continue
            for run, token in self.vocabulary.matched(part):
                found.append((self.unk_id, run) if token is None else (token, None))
        return found

    def encode(self, text: str) -> np.ndarray:
        """Return ids without sub-ids."""
        return np.array([token for token, _ in self.pieces(text)], dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return self.text((int(i), 0) for i in ids)

    def text(self, tokens: Iterable[tuple[int, int]], sub_ids: SubIds | None = None) -> str:
        """Return the text of tokens and sub-ids. `sub_ids` has the texts of numbered tokens."""
        sub_ids = sub_ids or SubIds()
        return "".join(
            self._write_token(token, sub, sub_ids.text(token, sub)) for token, sub in tokens
        )

    def _write_token(self, token: int, sub: int, known: str | None) -> str:
        if known is not None:
            return escaped(known) if token == self.unk_id else known
        spelled = self.vocabulary.spelled(token)
        if self.vocabulary.is_text(token):
            return escaped(spelled)
        return f"{spelled[:-1]}_{sub}>" if sub else spelled

    def _special_piece(self, name: str) -> Piece:
        if name in self.vocabulary:
            return self.vocabulary.id(name), None
        base = f"<{name[1:-1].partition('_')[0]}>"
        if "_" not in name or base not in self.vocabulary:
            raise BadRecord(
                f"{name} is not a special token of {self.vocabulary.file}; a plain < is written <<"
            )
        return self.vocabulary.id(base), name


class AntTokenizer(LiveTokenizer):
    """An Ant's tokenizer. Also raises ValueError if jieba is missing."""

    instances = "cpm-ant"

    def __init__(self, file: Path):
        super().__init__(file)
        self._words = self._make_cutter()

    def encode(self, text: str) -> np.ndarray:
        found = [piece for word in self._words(text) for piece in self.vocabulary.matched(word)]
        self.left_out += sum(len(run) for run, token in found if token is None)
        return np.array([token for _, token in found if token is not None], dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(
            self.vocabulary.spelled(int(i)) for i in ids if self.vocabulary.is_text(int(i))
        )

    def _make_cutter(self) -> Callable[[str], Iterable[str]]:
        try:
            import jieba
        except ImportError as error:
            raise ValueError(
                "the tokenizer of CPM-Ant needs the package jieba (pip install jieba); for a "
                "vocabulary that was made without it, give cpm-ant-greedy:FILE"
            ) from error
        jieba.setLogLevel("WARNING")
        return jieba.cut


class AntGreedyTokenizer(AntTokenizer):
    """Finds the longest matches in the whole text."""

    def _make_cutter(self) -> Callable[[str], Iterable[str]]:
        return lambda text: [text]
