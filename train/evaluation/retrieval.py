"""Retrieval from long texts: something is hidden in a text, and the text ends with a question.

The answer's tokens follow the question in the same row, so one pass scores them and nothing is
generated. An answer is found if each of its tokens is the most likely one.

    needle      "The code of the red fox is 48213." at some depth. The question is "The code of the
                red fox is". Further needles have other keys, and are at random depths
    variables   variable tracking as in RULER (arXiv 2404.06654): "VAR ABC = 48213.", and then "VAR
                DEF = VAR ABC." for each hop. The question is which variables have the value. An
                example stands in front of the text. Further chains have other names and values
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from bmt_burst import IGNORE_INDEX
from train.base.wording import counted
from train.data.batches import Batches
from train.data.folder import Row
from train.data.tokenizer_base import Tokenizer
from train.engine import Engine

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
_COLORS = ("red", "blue", "green", "black", "white", "brown", "golden", "silver")
_ANIMALS = "fox owl bear wolf hare goose otter badger raven trout moose lynx crab swan toad mole"
KEYS = [f"{color} {animal}" for color in _COLORS for animal in _ANIMALS.split()]
_LETTERS = np.array(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
_NAME = 3  # letters of a variable
MOST_HIDDEN = len(KEYS)


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


@dataclass(frozen=True)
class Sample:
    """A text with something hidden in it.

    intro     the text's beginning
    hidden    sentences, and the share of the text that stands before each: rising
    question  the text's end
    answer    its continuation
    """

    intro: str
    hidden: Sequence[tuple[float, str]]
    question: str
    answer: str


@dataclass(frozen=True)
class Needle:
    """A needle at each of some depths between 0 and 1, `levels`, among `count` needles."""

    levels: tuple[float, ...]
    count: int = 1
    digits: int = 5
    name, level = "needle", "depth"

    def sample(self, level: float, rng: np.random.Generator) -> Sample:
        asked, *others = (KEYS[i] for i in rng.choice(len(KEYS), self.count, replace=False))
        answer, *values = _numbers(self.count, self.digits, rng)
        hidden = [(level, f"{_about(asked)} {answer}.")]
        hidden += [
            (float(rng.random()), f"{_about(key)} {value}.")
            for key, value in zip(others, values, strict=True)
        ]
        return Sample("", sorted(hidden), _about(asked), f" {answer}")


@dataclass(frozen=True)
class Variables:
    """A chain for each number of hops, `levels`, among `count` chains."""

    levels: tuple[int, ...]
    count: int = 1
    digits: int = 5
    name, level = "variables", "hops"

    def sample(self, level: float, rng: np.random.Generator) -> Sample:
        length = int(level) + 1
        names = _names((self.count + 1) * length, rng)
        values = _numbers(self.count + 1, self.digits, rng)
        chains = [names[i : i + length] for i in range(0, len(names), length)]
        hidden = []
        for chain, value in zip(chains[1:], values[1:], strict=True):
            depths = np.sort(rng.random(length))
            hidden += list(zip(depths.tolist(), _assign(chain, value), strict=True))
        example = "".join(_assign(chains[0], values[0])) + _ask(values[0])
        return Sample(
            f"{example} {' '.join(chains[0])}.",
            sorted(hidden, key=lambda x: x[0]),
            _ask(values[1]),
            f" {' '.join(chains[1])}",
        )


# `levels` are one axis of a heat map, and the length of a text is the other
Task = Needle | Variables


def _about(key: str) -> str:
    return f" The code of the {key} is"


def _numbers(count: int, digits: int, rng: np.random.Generator) -> list[int]:
    """Return different numbers of so many digits."""
    first = 10 ** (digits - 1)
    return [int(n) + first for n in rng.choice(9 * first, count, replace=False)]


def _names(count: int, rng: np.random.Generator) -> list[str]:
    """Return different names of variables."""
    numbers = rng.choice(26**_NAME, count, replace=False)
    digits = numbers[:, None] // 26 ** np.arange(_NAME) % 26
    return ["".join(_LETTERS[row]) for row in digits]


def _assign(chain: Sequence[str], value: int) -> list[str]:
    first = f" VAR {chain[0]} = {value}."
    return [first, *(f" VAR {b} = VAR {a}." for a, b in itertools.pairwise(chain))]


def _ask(value: int) -> str:
    return f" The variables with the value {value} are:"


@dataclass(frozen=True)
class RetrievalRows:
    """Rows of `length` tokens, `samples` for each level of a task, for Batches.of_rows.

    Row i belongs to level i // samples. It depends on the seed, the length and i only. `bos` stands
    in front of each text, unless it is None. Raises ValueError if the length is too short.
    """

    task: Task
    haystack: Haystack
    length: int
    samples: int
    seed: int
    bos: int | None = None
    documents = False

    def __post_init__(self) -> None:
        for number in range(0, len(self), self.samples):  # so that an error is not raised later
            self.read(number)

    def __len__(self) -> int:
        return len(self.task.levels) * self.samples

    def read(self, index: int | None) -> Row:
        """Return row `index`. Only the answer's tokens are targets."""
        tokens = torch.zeros(self.length, dtype=torch.int64)
        labels = torch.full((self.length,), IGNORE_INDEX)
        if index is not None:
            text, answer = self._write(index)
            tokens, labels[-answer:] = text[:-1], text[-answer:]
        return Row(tokens, labels, (0, self.length))

    def _write(self, index: int) -> tuple[torch.Tensor, int]:
        """Return the tokens of a row and the last one of its answer, and the answer's length."""
        rng = np.random.default_rng((self.seed, self.length, index))
        encode = self.haystack.encode
        sample = self.task.sample(self.task.levels[index // self.samples], rng)
        begin = np.array([] if self.bos is None else [self.bos], dtype=np.int64)
        intro, hidden = encode(sample.intro), [encode(text) for _, text in sample.hidden]
        question, answer = self._ask(sample)
        parts = [begin, intro, *hidden, question, answer]
        room = self.length + 1 - sum(map(len, parts))
        if room < 0:
            raise ValueError(
                f"a text of {counted(self.length, 'token')} is too short for the task "
                f"{self.task.name}, which needs {self.length - room}: give longer --lengths"
            )
        text, starts = self.haystack.cut(room, rng)
        wanted = np.array([depth * room for depth, _ in sample.hidden])
        places = starts[np.abs(starts - wanted[:, None]).argmin(1)]
        cuts = np.split(text, places)
        mixed = [part for pair in zip(cuts, hidden, strict=False) for part in pair]
        whole = np.concatenate([begin, intro, *mixed, cuts[-1], question, answer])
        return torch.from_numpy(whole), len(answer)

    def _ask(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of the question and of the answer, tokenized together: the answer
        begins where they differ from the question alone. Raises ValueError if it has none.
        """
        alone = self.haystack.encode(sample.question)
        both = self.haystack.encode(sample.question + sample.answer)
        least = min(len(alone), len(both))
        same = np.cumprod(alone[:least] == both[:least]).sum()
        if same == len(both):
            raise ValueError(f"the tokenizer has no tokens for the answer {sample.answer!r}")
        return both[:same], both[same:]


@dataclass(frozen=True)
class Cell:
    """The share of samples that was found for a length and level, and the answers' mean loss."""

    length: int
    level: float
    found: float
    loss: float


@torch.no_grad()
def score_rows(
    rows: RetrievalRows, batches: Batches, engine: Engine, alive: Callable[[], None]
) -> list[Cell]:
    """Return a cell for each level. Every rank must call this."""
    wrong, losses, targets = ([0.0] * len(rows) for _ in range(3))
    for numbers, batch in batches.of_rows(rows):
        alive()
        loss, likely = batch.score_tokens(engine.model)
        is_target = batch.labels != IGNORE_INDEX
        missed = is_target & (likely != batch.labels)
        sums = torch.stack([x.double().sum(1) for x in (missed, loss, is_target)], 1).tolist()
        for number, row in zip(numbers, sums, strict=True):
            if number is not None:
                wrong[number], losses[number], targets[number] = row
    sums = engine.sum(wrong + losses + targets)
    by_level = np.array(sums).reshape(3, len(rows.task.levels), rows.samples)
    return [
        Cell(rows.length, level, float((missed == 0).mean()), float(loss.sum() / count.sum()))
        for level, missed, loss, count in zip(rows.task.levels, *by_level, strict=True)
    ]
