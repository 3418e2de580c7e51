"""Vocabularies of CPM-Live's models, and text as pieces of them.

A file is UTF-8, a piece a line, its id the number of the line from 0; `</n>` stands for a newline,
`</_>` for a space. Pieces like `<name>` are special: no text becomes them, a Bee's only where it
names them so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

LONGEST = 32  # characters that a piece of text has at most
WRITTEN = {"\n": "</n>", " ": "</_>"}  # what stands in the file for them

_BEE = re.compile(r"<<|<([^<>]*)>|<|[^<]+")


class BadRecord(ValueError):
    """What stands in data cannot be used; says why."""


class Vocabulary:
    """A vocabulary file. Raises ValueError if it is not UTF-8, or has empty lines or the same line
    twice.
    """

    def __init__(self, file: Path):
        self.file = file
        self.pieces = _lines(file)
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}
        for i, piece in enumerate(self.pieces):
            if not piece or self._ids[piece] != i:
                raise ValueError(
                    f"{file}: line {i + 1} is {piece!r}, expected a piece of text that no other line has"
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
        """Raises ValueError if it is not there."""
        if special not in self._ids:
            raise ValueError(f"{self.file} has no line {special}")
        return self._ids[special]

    def is_text(self, i: int) -> bool:
        return self._text.get(self._spelled[i]) == i

    def spelled(self, i: int) -> str:
        """The text of a piece; special ones as the file spells them."""
        return self._spelled[i]

    def matched(self, text: str) -> Iterator[tuple[str, int | None]]:
        """The longest piece from the left on, and its id, again and again; what is unknown
        together, with None.
        """
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
    """A Bee's text in parts, each with whether it is a special token: plain text, `<<` read as `<`,
    or `<name>`.

    Raises BadRecord for a `<` that is neither doubled nor begins a special token.
    """
    plain = ""
    for match in _BEE.finditer(text):
        part = match[0]
        if match[1] is None:
            if part == "<":
                shown = text[match.start() : match.start() + 20]
                raise BadRecord(
                    f"{shown!r} begins with < but is no special token <name>; a plain < is written <<"
                )
            plain += "<" if part == "<<" else part
            continue
        if not match[1].strip():
            raise BadRecord(
                f"{part!r} is no special token: it has no name; a plain < is written <<"
            )
        if plain:
            yield plain, False
        plain = ""
        yield part, True
    if plain:
        yield plain, False


def escaped(text: str) -> str:
    """Plain text as it is written in a Bee's data."""
    return text.replace("<", "<<")


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from error
    return text.removesuffix("\n").split("\n")
