"""Files of text and tokens: their kinds, and the form of their text."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from train.data.compressed import decompressed, read_ahead
from train.data.forms import ARRAY, AUTO, LINES, OBJECT, PEEKED, PLAIN, recognize
from train.data.remote import is_remote, open_remote

TEXT = ".txt"  # this and the next ones may also be compressed
RECORDS = (".jsonl", ".ndjson", ".jsonlines")  # a record a line
JSON = ".json"  # lines, or one array of records
PARQUET, ARROW = ".parquet", ".arrow"  # tables; .arrow only as a shard of a datasets folder
MEGATRON = ".bin"  # tokens, with an .idx
NO_TEXT = (PARQUET, ARROW, MEGATRON)
_COMPRESSED = {".gz": ".gz", ".zst": ".zst", ".zstd": ".zst"}


@dataclass(frozen=True)
class TextFile:
    """A file to read.

    path  by which it is opened and named in messages
    name  relative to the input in which it was found, so that it stays if the input is moved
    url   its address, by which it is opened and named instead; `path` then only says its kind
    form  LINES, ARRAY or PLAIN. None for tables and tokens, and until `find_form` looks
    """

    path: Path
    name: str
    url: str | None = None
    form: str | None = None

    @staticmethod
    def found(path: Path, source: Path) -> TextFile:
        """Return the file at `path`, which was found in the input `source` or is that input."""
        return TextFile(path, path.name if path == source else path.relative_to(source).as_posix())

    @staticmethod
    def at(name: str) -> TextFile:
        path = Path(urlsplit(name).path if is_remote(name) else name)
        return TextFile(path, path.name, name if is_remote(name) else None)

    def in_form(self, asked: str) -> TextFile:
        """Return the file in the form that --format names, unless it is AUTO or this is no text."""
        if asked == AUTO or self.kind in NO_TEXT:
            return self
        return replace(self, form=asked)

    def __str__(self) -> str:
        return self.url or str(self.path)

    @property
    def kind(self) -> str:
        return kind_of(self.path)

    @property
    def has_records(self) -> bool:
        """Whether the file has a known form with records of JSON."""
        return self.form in (LINES, ARRAY)

    def open(self) -> io.BufferedReader:
        return open_remote(self.url) if self.url else open(self.path, "rb")


Texts = list[Any]  # bytes; None for a row without text; arrays of token ids


@dataclass(frozen=True)
class Piece:
    """Consecutive lines, records or documents of a file: a few MiB at most unless one is longer.

    file        the file, with its form
    first_line  the number of the first one, from 1
    lines       lines, records as JSON, texts of rows, or token ids of documents
    size        bytes of the file, compressed if it is, since the piece before
    damage      the reason that nothing can be read after these lines
    """

    file: TextFile
    first_line: int
    lines: Texts
    size: int
    damage: str | None = None

    def counts(self, line: Any) -> bool:
        """Whether a line is one of those that must not be bad. All rows of a table are."""
        return self.file.form is None or bool(line and line.strip())

    def __str__(self) -> str:
        return f"{self.file}, lines {self.first_line} to {self.first_line + len(self.lines) - 1}"


def compression(path: Path) -> str | None:
    """Return ".gz" or ".zst" for a compressed file, else None."""
    return _COMPRESSED.get(path.suffix.lower())


def kind_of(path: Path) -> str:
    """Return the suffix of a file in lower case. For a compressed file, it is the one before .gz or
    .zst. Files that are not PARQUET, ARROW or MEGATRON are read as text, in a form of forms.py.
    """
    return Path(path.stem if compression(path) else path.name).suffix.lower()


@contextmanager
def named(file: TextFile) -> Iterator[None]:
    """Make errors name the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


class NotInLines(ValueError):
    """A file with a JSON object over several lines, where records are expected."""


def find_form(file: TextFile, raw: io.BufferedReader) -> TextFile:
    """Return a file of text in the form of its content, `raw`. Raises NotInLines or ValueError."""
    if file.form:
        return file
    start, end = read_ahead(decompressed(raw, compression(file.path)), PEEKED)
    raw.seek(0)
    form = recognize(start, whole=end is not None, by_line=file.kind in RECORDS)
    named_json = file.kind in (*RECORDS, JSON)
    if file.kind == TEXT and form != PLAIN:
        held = {LINES: "lines of JSON", ARRAY: "a JSON array", OBJECT: "a JSON object"}[form]
        records = "" if form == OBJECT else f"--format {form} reads its records, and "
        raise ValueError(
            f"expected plain text in a .txt, got {held}: {records}--format {PLAIN} reads it as it "
            "is. In a folder, --exclude leaves it out"
        )
    if form == OBJECT:
        raise NotInLines(
            "expected a JSON record a line, or one JSON array of records, got an object over "
            f"several lines: `jq -c . {file} > NEW.jsonl` writes an object a line, and `jq -c "
            f"'.NAME[]'` the records of a list in it. --format {PLAIN} reads it as plain text"
        )
    if form == PLAIN and named_json:
        form = LINES  # which are bad
    return replace(file, form=form)
