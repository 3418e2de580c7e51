"""Texts with a hidden code, from which a tiny model learns to find it, for docs/tutorial.md.

    python examples/needles.py --output data/story

A document is a part of a short story. Some of its sentences are replaced by one code: "The code of
the red fox is 48." The folder gets short.jsonl and long.jsonl with documents, text.txt with the
story, and tokenizer.json with all words.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

# As a script, Python puts this folder first in the path. Put the repository there instead.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from train.evaluation.retrieval import KEYS, SENTENCES

_STORY = [f"{sentence.strip('.')}." for sentence in SENTENCES.split(". ")]


@dataclass(frozen=True)
class Part:
    """One file: its number of documents, the most tokens in one, and the share of their sentences
    that state the code.
    """

    documents: int
    tokens: int
    share: float


PARTS = {"short": Part(4000, 64, 0.4), "long": Part(2000, 256, 0.1)}


def write_document(rng: np.random.Generator, tokenizer: Tokenizer, part: Part) -> str:
    """Return a document that states a code at least once."""
    fact = f"The code of the {rng.choice(KEYS)} is {rng.integers(10, 100)}."
    length, place = rng.integers(part.tokens // 2, part.tokens + 1), rng.integers(len(_STORY))
    text, tokens = fact, len(tokenizer.encode(fact).ids)
    while True:
        sentence = fact if rng.random() < part.share else _STORY[place % len(_STORY)]
        tokens += len(tokenizer.encode(sentence).ids)
        if tokens > length:
            return text
        text, place = f"{text} {sentence}", place + 1


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer of words, digits and full stops."""
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    text = " ".join([*_STORY, *KEYS, "The code of the is 0123456789"])
    words = dict.fromkeys(["[UNK]", "</s>", *(word for word, _ in split.pre_tokenize_str(text))])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = split
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    folder = parser.parse_args().output
    rng, tokenizer = np.random.default_rng(0), make_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        with open(folder / f"{name}.jsonl", "w") as file:
            for _ in range(part.documents):
                text = write_document(rng, tokenizer, part)
                file.write(json.dumps({"text": text}) + "\n")
    (folder / "text.txt").write_text(" ".join(_STORY) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
