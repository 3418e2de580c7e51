r"""Make a vocabulary for CPM-Bee or CPM-Ant from text: special tokens, characters and frequent
words.

    python train/make_vocabulary.py --model cpm-bee --input corpus.jsonl --size 4000 \
        --output vocabulary.txt
    python train/prepare_data.py --tokenizer cpm-bee:vocabulary.txt --input corpus.jsonl \
        --output data/corpus

Up to half of it are the most frequent characters, the rest the words that save the most tokens. For
real training, use the vocabulary that belongs to a model's weights.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# As a script, Python puts this folder first in the path. Put the repository there instead.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from train.base.command_line import ArgumentParser
from train.base.files import replacing
from train.base.wording import counted
from train.cpm_live.vocabulary import LONGEST, WRITTEN, bee_parts, is_special
from train.data.files import Piece, TextFile
from train.data.find import add_inputs, check_holds_text, find_files
from train.data.records import BadLines, BadRecord, check_unicode, parse_json
from train.data.text import plain_text, read_pieces

_COMMON = ("<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>")
SPECIAL = {
    "cpm-bee": (*_COMMON, "<root>", "<ans>", "<option>"),
    "cpm-ant": (*_COMMON, "<d>", "</d>"),
}
_WORD = re.compile(r"[^\W\d_]{2,}|\d{2,}|[^\w\s]{2,}|\s{2,}|_{2,}")
_NOT_A_LINE = re.compile(r"[\r\n]")  # readers may treat them as the end of a line


def pieces_of(texts: Iterator[str], special: Sequence[str], size: int) -> list[str]:
    """Return up to `size` lines of a vocabulary. Raises ValueError if `size` is too small."""
    characters, words = Counter[str](), Counter[str]()
    for text in texts:
        characters.update(text)
        words.update(
            word
            for word in _WORD.findall(text)
            if len(word) <= LONGEST and not _NOT_A_LINE.search(word)
        )
    room = size - len(special)
    if room < 2:
        raise ValueError(
            f"--size must leave room for more than the {len(special)} special tokens, got {size}"
        )
    known = {*WRITTEN, "\r"}
    single = _take_best({c: n for c, n in characters.items() if c not in known}, room // 2)
    scores = {
        word: count * (len(word) - 1) for word, count in words.items() if not is_special(word)
    }
    return [*special, *single, *_take_best(scores, room - len(single))]


def _take_best(scores: dict[str, int], count: int) -> list[str]:
    """Return the pieces with the highest scores. Equal scores are ordered by characters."""
    return sorted(scores, key=lambda piece: (-scores[piece], piece))[:count]


def texts_of(file: TextFile, model: str, bad: BadLines) -> Iterator[str]:
    """Yield a file's text without special tokens. Raises ValueError if it is broken."""
    for piece in read_pieces(file):
        if piece.file.has_records:
            yield from _texts_of_records(piece, model, bad)
        else:
            yield plain_text(piece, bad)
        if piece.damage:
            raise ValueError(f"{file} is broken: {piece.damage}")


def _texts_of_records(piece: Piece, model: str, bad: BadLines) -> Iterator[str]:
    for number, line in enumerate(piece.lines, piece.first_line):
        if not piece.counts(line):
            continue
        try:
            for text in _find_strings(parse_json(line or b"")):
                parts = bee_parts(text) if model == "cpm-bee" else [(text, False)]
                yield from (part for part, is_special_token in parts if not is_special_token)
        except BadRecord as error:
            bad.add(piece.file, number, str(error))


def _find_strings(value: Any) -> Iterator[str]:
    """Yield keys and texts of a JSON value. Raises BadRecord for text that is not Unicode."""
    if isinstance(value, str):
        yield check_unicode(value)
    elif isinstance(value, dict):
        for inner in itertools.chain.from_iterable(value.items()):
            yield from _find_strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _find_strings(inner)


def make(args: argparse.Namespace) -> None:
    if Path(args.output).exists():
        raise ValueError(f"{args.output} exists and is not replaced")
    files, unread = find_files(args.input, args.glob, args.exclude, args.format)
    check_holds_text(files, "a vocabulary")
    special = [check_unicode(name) for name in (*SPECIAL[args.model], *args.special)]
    if not all(map(is_special, args.special)) or len({*special}) < len(special):
        raise ValueError(f"--special expects different names like <name>, got {special}")
    bad = BadLines()
    texts = itertools.chain.from_iterable(texts_of(file, args.model, bad) for file in files)
    pieces = pieces_of(texts, special, args.size)
    text = "".join(f"{piece}\n" for piece in pieces)
    with replacing(Path(args.output)) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")
    made, read = counted(len(pieces), "piece"), counted(len(files), "file")
    print(f"{args.output}: {made}, {len(special)} of them special, from {read}")
    unread.report()
    bad.report()


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser("make_vocabulary.py", __doc__)
    parser.add_argument(
        "--model",
        choices=tuple(SPECIAL),
        required=True,
        help="the model; its special tokens begin the vocabulary",
    )
    add_inputs(parser, "no tables")
    parser.add_argument("--output", required=True, help="file to write; must not exist")
    parser.add_argument("--size", type=int, default=4000, help="most lines (default: 4000)")
    parser.add_argument(
        "--special",
        nargs="*",
        default=[],
        help="further special tokens that the data names, such as '<mask_0>'",
    )
    args = parser.parse_args(argv)
    try:
        make(args)
    except (ValueError, OSError) as error:
        parser.fail(error)


if __name__ == "__main__":
    main()
