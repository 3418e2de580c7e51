"""Writes documents of mixed lengths as JSON lines, to measure training on packed sequences.

    python bench/mixed.py --output mixed.jsonl
    python train/prepare_data.py --input mixed.jsonl --output data/mixed

Then run bench/steps.py with `--data data/mixed/train --documents mask`.

Each document is text of torch's sources. prepare_data.py makes a token of each byte by default.
Lengths in tokens have MagiAttention's shares (bench/masks.py), without those above --longest.
Documents below 100 tokens become 100 tokens long. With the same torch, every call writes the same
text.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.masks import draw_document
from bench.options import at_least, make_parser

_LEAST = 100  # tokens of a document
_MARKS = 2  # tokens that a document gets in training: its begin and its end


def documents(tokens: int, longest: int) -> Iterator[str]:
    """Yield texts until they and their marks are `tokens` tokens, or slightly more."""
    sources = sorted(Path(torch.__path__[0]).rglob("*.py"))
    text = "".join(file.read_bytes().decode("ascii", "ignore") for file in sources)
    rng, at, left = random.Random(2026), 0, tokens
    while left > 0:
        length = max(draw_document(longest, rng), _LEAST)
        if at + length > len(text):
            at = 0
        yield text[at : at + length - _MARKS]
        at, left = at + length, left - length


def main() -> None:
    parser = make_parser(__doc__, "file of JSON lines to write")
    parser.add_argument("--tokens", type=int, default=36 << 17, help="of all documents")
    parser.add_argument("--longest", type=at_least(_LEAST), default=1 << 17, help="in tokens")
    args = parser.parse_args()
    found = documents(args.tokens, args.longest)
    with args.output.open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in found)


if __name__ == "__main__":
    main()
