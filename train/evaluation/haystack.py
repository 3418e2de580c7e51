"""The text in which retrieval tasks hide something, as tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from train.data.tokenizer_base import Tokenizer

# no sentence mentions codes, variables or numbers
SENTENCES = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    "A river runs past the old mill. The baker opens the shop at dawn. Rain falls on the roof. "
    "Two children walk along the shore. The train leaves the station. Snow covers the hills. "
    "A boat waits at the pier. The garden smells of roses. Clouds drift over the valley. "
    "The clock in the tower is slow. A teacher reads a story. The market is busy today. "
    "Leaves fall from the trees. The road leads to the sea. A candle burns in the window."
)
_ENDS = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")


@dataclass(frozen=True)
class Haystack:
    """A text as tokens, sentence by sentence. Raises ValueError if it has no sentence."""

    tokenizer: Tokenizer
    text: str = SENTENCES

    def __post_init__(self):
        if not len(self._lengths):
            raise ValueError("the text of --text has no words")

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text: (tokens,) int64."""
        return np.asarray(self.tokenizer.encode(text), dtype=np.int64)

    @cached_property
    def _sentences(self) -> list[np.ndarray]:
        """The sentences, each after a space."""
        encoded = [self.encode(f" {x.strip()}") for x in _ENDS.split(self.text) if x.strip()]
        return [tokens for tokens in encoded if len(tokens)]

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self._sentences], dtype=np.int64)

    def cut(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return `count` tokens, and the places where sentences start in them, both int64."""
        if not count:
            return np.empty(0, np.int64), np.zeros(1, np.int64)
        most = -(-count // int(self._lengths.min()))
        if self.text is SENTENCES:
            order = rng.integers(len(self._sentences), size=most)
        else:
            order = (int(rng.integers(len(self._sentences))) + np.arange(most)) % len(self._lengths)
        ends = self._lengths[order].cumsum()
        needed = int(np.searchsorted(ends, count)) + 1
        tokens = np.concatenate([self._sentences[i] for i in order[:needed]])[:count]
        return tokens, np.concatenate([[0], ends[: needed - 1]])
