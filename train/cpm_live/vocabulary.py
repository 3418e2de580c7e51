"""Vocabularies of CPM-Live's models, and text as pieces of them.

A file is UTF-8 with one piece a line. A piece's id is its line number, from 0. `</n>` stands for a
newline, `</_>` for a space. Pieces like `<name>` are special. Text becomes them only where
a Bee's text names them this way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from train.data.records import BadRecord

LONGEST = 32  # most characters of a piece of text
WRITTEN = {"\n": "</n>", " ": "</_>"}  # their spelling in the file

_BEE = re.compile(r"<<|<([^<>]*)>|<|[^<]+")


class Vocabulary:
    """A vocabulary file. Raises ValueError if it is not UTF-8, or for empty or double lines."""

    def __init__(self, file: Path):
        self.file = file
        self.pieces = _read_lines(file)
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}
        for i, piece in enumerate(self.pieces):
            if not piece or self._ids[piece] != i:
                raise ValueError(
                    f"{file}: expected a piece of text that no other line has, got {piece!r} in "
                    f"line {i + 1}"
                )
        read = {written: character for character, written in WRITTEN.items()}
        self._text = {
            read.get(p, p): i for p, i in self._ids.items() if p in read or not is_special(p)
        }
        self._longest: dict[str, int] = {}
        for piece in self._text:
            self._longest[piece[0]] = min(max(self._longest.get(piece[0], 0), len(piece)), LONGEST)
        self._spelled = dict(enumerate(self.pieces)) | {i: piece for piece, i in self._text.items()}

    def __len__(self) -> int:
        return len(self.pieces)

    def __contains__(self, piece: str) -> bool:
        return piece in self._ids

    def id(self, special: str) -> int:
        """Return the id of a special piece. Raises ValueError if it is missing."""
        if special not in self._ids:
            raise ValueError(f"{self.file} has no line {special}")
        return self._ids[special]

    def is_text(self, i: int) -> bool:
        return self._text.get(self._spelled[i]) == i

    def spelled(self, i: int) -> str:
        """Return the text of a piece. Special pieces are spelled as in the file."""
        return self._spelled[i]

    def matched(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yield the longest piece at each place with its id, and unknown characters with None."""
        at = unknown = 0
        while at < len(text):
            for length in range(self._longest.get(text[at], 0), 0, -1):
                if (found := self._text.get(text[at : at + length])) is not None:
                    break
            else:
                at += 1
                continue
            if unknown < at:
                yield text[unknown:at], None
            yield text[at : at + length], found
            at += length
            unknown = at
        if unknown < at:
            yield text[unknown:], None


def is_special(piece: str) -> bool:
    return len(piece) > 2 and piece.startswith("<") and piece.endswith(">")


def bee_parts(text: str) -> Iterator[tuple[str, bool]]:
    """Yield a Bee's plain text, with `<<` as `<`, and each `<name>`, with whether it is special.

    Raises BadRecord for a `<` that is neither doubled nor begins a special token.
    """
    plain = ""
    for match in _BEE.finditer(text):
        part = match[0]
        if match[1] is None:
            if part == "<":
                shown = text[match.start() : match.start() + 20]
                raise BadRecord(
                    f"{shown!r} begins with < but is not a special token <name>; a plain < is "
                    "written <<"
                )
            plain += "<" if part == "<<" else part
            continue
        if not match[1].strip():
            raise BadRecord(
                f"{part!r} is not a special token: it has no name; a plain < is written <<"
            )
        if plain:
            yield plain, False
        plain = ""
        yield part, True
    if plain:
        yield plain, False


def escaped(text: str) -> str:
    """Return plain text as a Bee's data has it."""
    return text.replace("<", "<<")


def _read_lines(file: Path) -> list[str]:
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from error
    return text.removesuffix("\n").split("\n")
