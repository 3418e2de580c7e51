"""Text files: finding them, reading them in parts, and turning the documents of a part into
tokens.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from train.base.wording import counted
from train.data.records import (
    BadRecord,
    check_unicode,
    decode_utf8,
    guess_encoding,
    parse_json,
)
from train.data.tokenizer import open_tokenizer
from train.data.tokenizer_base import Tokenizer
from train.registry import kind_of_data, load

_PIECE = 1 << 20  # bytes of text that are tokenized at once, up to the end of a line
_LISTED = 20  # bad lines that are listed


@dataclass
class BadLines:
    """Lines that could not be used, and characters in other lines that the tokenizer left out.

    among  number of all lines that are not empty
    file   the first file with a bad line
    """

    count: int = 0
    first: list[str] = field(default_factory=list)
    left_out: int = 0
    among: int = 0
    file: Path | None = None

    def add(self, path: Path, line: int, reason: str) -> None:
        self.extend(BadLines(1, [f"{path}:{line}: {reason}"], file=path))

    def extend(self, later: BadLines) -> None:
        self.count += later.count
        self.left_out += later.left_out
        self.among += later.among
        self.first += later.first[: _LISTED - len(self.first)]
        self.file = self.file or later.file

    def check(self, most: float) -> None:
        """Raise ValueError if more than the share `most` of the lines are bad."""
        if self.count and self.count / self.among > most:
            raise ValueError(self.summary(f", more than --max-bad {most:g} of them"))

    def summary(self, too_many: str = "") -> str:
        """Return how many lines are bad, a guess of their encoding, and the first ones."""
        if self.file is None:
            return "no line is bad"
        verb = "is" if self.count == 1 else "are"
        said = [f"{self.count:,} of {counted(self.among, 'line')} {verb} bad{too_many}"]
        if guess := guess_encoding(_first_bytes(self.file)):
            said.append(f"{self.file} looks like {guess}: iconv -f {guess} -t UTF-8 converts it")
        said.append(f"The first: {'; '.join(self.first[:3])}")
        return ". ".join(said)


Reason = tuple[str, str]  # a file that is not read, described in the singular and the plural

_EMPTY = "empty file", "empty files"
_NAMED_BEFORE = "other name of a file that is read once", "other names of files that are read once"
_FOLDER_LINK = "link to a folder", "links to folders"
_UNREADABLE_FOLDER = "folder that cannot be read", "folders that cannot be read"
_OTHER_KIND = "file that is neither .txt nor .jsonl", "files that are neither .txt nor .jsonl"
_NO_FILE = "pipe, socket or device", "pipes, sockets and devices"
_DANGLING = "link to nothing", "links to nothing"
_NOT_GZIP = ".gz file that is not compressed by gzip", ".gz files that are not compressed by gzip"


class Unread:
    """Files that were found but not read: their number for each reason, and the first one of
    each.
    """

    def __init__(self):
        self._first: dict[Reason, Path] = {}
        self._count: dict[Reason, int] = {}

    def add(self, reason: Reason, path: Path) -> None:
        self._first.setdefault(reason, path)
        self._count[reason] = self._count.get(reason, 0) + 1

    def lines(self) -> list[str]:
        counts = sorted(self._count.items())
        return [
            f"{counted(count, *reason)}, such as {self._first[reason]}" for reason, count in counts
        ]


@dataclass(frozen=True)
class TextFile:
    """A file to read.

    path  the path by which it is opened and named in messages
    name  its path relative to the input in which it was found, "/" between folders; for a file that
          is itself an input, its own name. It stays the same if the input is moved
    """

    path: Path
    name: str

    @staticmethod
    def found(path: Path, source: Path) -> TextFile:
        """Return the file at `path`, which was found in the input `source` or is that input."""
        return TextFile(path, path.name if path == source else path.relative_to(source).as_posix())


@dataclass(frozen=True)
class Document:
    """A document, or the part of it that a part of its file holds. Parts of one document are equal.

    file  its file; two inputs may hold files of the same name
    line  the line of a .jsonl; None for a .txt, which is one document
    """

    file: TextFile
    line: int | None = None

    @property
    def name(self) -> str:
        """A name that stays the same if the input is moved."""
        return self.file.name if self.line is None else f"{self.file.name}:{self.line}"


@dataclass(frozen=True)
class TextLines:
    """Whole lines of a file, a few MiB at most unless one line is longer."""

    file: TextFile
    first_line: int
    lines: list[bytes]
    size: int  # bytes of the file, compressed if it is, since the piece before
    damage: str | None = None  # why nothing can be read after these lines

    @property
    def path(self) -> Path:
        return self.file.path

    def __str__(self) -> str:
        return f"{self.path}, lines {self.first_line} to {self.first_line + len(self.lines) - 1}"


@dataclass(frozen=True)
class Encoded:
    """The tokens of a part of a file: each document with its ids, or with its instance.

    A .txt file is one document in all of its parts.
    """

    documents: list[tuple[Document, Sized]]
    bad: BadLines
    size: int


class Reader(Protocol):
    """Turns records and texts of files into documents or instances, for one kind of model.

    It is made as (tokenizer, json_field). Raises BadRecord for a record that it cannot use.
    """

    def of_record(self, record: Any) -> Sized:
        """Return the document or instance in a .jsonl line."""

    def of_text(self, text: str) -> Sized:
        """Return the part of a document or instance in a part of a .txt."""


class DocumentReader:
    """Reads documents: the ids of the text in field `json_field` of a record."""

    def __init__(self, tokenizer: Tokenizer, json_field: str):
        self._tokenizer, self._json_field = tokenizer, json_field

    def of_record(self, record: Any) -> np.ndarray:
        return self.of_text(text_in(record, self._json_field))

    def of_text(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text), self._tokenizer.dtype)


def text_in(record: Any, json_field: str) -> str:
    """Return the text in a field of a record. Raises BadRecord if there is none."""
    text = record.get(json_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise BadRecord(f"no text in field {json_field!r}")
    return check_unicode(text)


def make_reader(tokenizer: Tokenizer, json_field: str) -> Reader:
    """Return the reader for the kind of model that has this tokenizer."""
    reader: Reader = load(kind_of_data(tokenizer.instances).reader)(tokenizer, json_field)
    return reader


class Encoder:
    """Turns parts of files into tokens."""

    def __init__(self, tokenizer: str, json_field: str, eos: str | None = None):
        # a single text leaves nothing to do for more threads
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.tokenizer = open_tokenizer(tokenizer, eos)
        self._reader = make_reader(self.tokenizer, json_field)

    def __call__(self, piece: TextLines) -> Encoded:
        bad = BadLines(
            among=sum(1 for line in piece.lines if line.strip()) + (piece.damage is not None)
        )
        before = self.tokenizer.left_out
        if is_records(piece.path):
            documents = list(self._records(piece, bad))
        else:
            text = plain_text(piece, bad)
            documents = [(Document(piece.file), self._reader.of_text(text))]
        if piece.damage:
            reason = f"damaged, so nothing is read from here on: {piece.damage}"
            bad.add(piece.path, piece.first_line + len(piece.lines), reason)
        bad.left_out = self.tokenizer.left_out - before
        return Encoded(documents, bad, piece.size)

    def _records(self, piece: TextLines, bad: BadLines) -> Iterator[tuple[Document, Sized]]:
        for number, line in enumerate(piece.lines, piece.first_line):
            if not line.strip():
                continue
            try:
                found = self._reader.of_record(parse_json(line))
            except BadRecord as error:
                bad.add(piece.path, number, str(error))
            else:
                yield Document(piece.file, number), found


def find_files(
    inputs: list[str], pattern: str | None, exclude: list[str]
) -> tuple[list[TextFile], Unread]:
    """Return the files that `inputs` name, and the files that were found but are not read.

    Folders are searched for names that match `pattern` (default: .txt and .jsonl, .gz or not, in
    either case). Files are sorted within a folder. A file that is named several times is read
    once. Links to files are followed. Links to folders are followed only if they are an input
    themselves.

    Raises ValueError for an input that is "", does not exist, cannot be opened or has an unknown
    suffix. Also raises it for a folder without any match.
    """
    if "" in inputs:
        raise ValueError('--input must not be ""; the current folder is .')
    files: list[TextFile] = []
    unread, seen = Unread(), set()
    for path in map(Path, inputs):
        if path.is_dir():
            found, others = _search_folder(path, pattern, exclude)
            for other, reason in others:
                unread.add(reason, other)
            if not found:
                reasons = "; ".join(unread.lines()) or "it is empty"
                raise ValueError(
                    f"folder {path} has no file that matches "
                    f"{pattern or '*.txt or *.jsonl'}: {reasons}"
                )
        else:
            _check_named(path)
            found = [path]
        for file in found:
            status = file.stat()
            if (status.st_dev, status.st_ino) in seen:
                unread.add(_NAMED_BEFORE, file)
            elif not status.st_size:
                unread.add(_EMPTY, file)
            else:
                files.append(TextFile.found(file, path))
            seen.add((status.st_dev, status.st_ino))
    if not files:
        raise ValueError(f"there is no text to read: {'; '.join(unread.lines())}")
    return files, unread


def read_pieces(file: TextFile) -> Iterator[TextLines]:
    """Yield the text of a file, without a byte-order mark of UTF-8.

    Raises ValueError if the file cannot be read. The last part reports damage to the compression.
    """
    first_line, before = 1, 0
    with open(file.path, "rb") as raw:
        text = _decompressed(raw, file.path)
        while True:
            lines, damage = _take_lines(text, file.path)
            if lines and first_line == 1:
                lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
            if lines or damage:
                yield TextLines(file, first_line, lines, raw.tell() - before, damage)
            if damage or not lines:
                return
            first_line, before = first_line + len(lines), raw.tell()


def _take_lines(text: io.BufferedReader, path: Path) -> tuple[list[bytes], str | None]:
    """Return the lines of the next part. Also return why there are no more, if that is damage."""
    lines: list[bytes] = []
    length = 0
    try:
        while length < _PIECE and (line := text.readline()):
            lines.append(line)
            length += len(line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        return lines, str(error)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return lines, None


def _first_bytes(path: Path) -> bytes:
    """Return the first part of a file. Raises OSError if it can no longer be read."""
    with open(path, "rb") as raw:
        lines, _ = _take_lines(_decompressed(raw, path), path)
    return b"".join(lines)


def _decompressed(raw: io.BufferedReader, path: Path) -> io.BufferedReader:
    """Return the text of a file. A GzipFile reads lines in Python, a BufferedReader in C."""
    return io.BufferedReader(gzip.GzipFile(fileobj=raw)) if _compressed(path) else raw


def _compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def is_records(path: Path) -> bool:
    """Whether a file has one record in each line."""
    return _kind(path) == ".jsonl"


def _kind(path: Path) -> str:
    """Return the suffix in lower case. For compressed files, return the suffix before .gz."""
    return Path(path.stem if _compressed(path) else path.name).suffix.lower()


def _check_named(path: Path) -> None:
    """Raise ValueError if a file that is itself an input cannot be read."""
    if not path.exists():
        raise ValueError(
            f"no such input: {path}" + (", a link to nothing" if path.is_symlink() else "")
        )
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    if _kind(path) not in (".txt", ".jsonl"):
        raise ValueError(
            f"{path} is neither .txt nor .jsonl, .gz or not; to read other text, give its folder "
            "and --glob"
        )
    if problem := _find_problem(path):
        raise ValueError(f"{path} is not read: it is a {problem[0]}")


def _search_folder(
    folder: Path, pattern: str | None, exclude: list[str]
) -> tuple[list[Path], list[tuple[Path, Reason]]]:
    """Return the files to read in a folder and its subfolders, sorted, and the other files with
    their reasons.
    """
    found: list[Path] = []
    others: list[tuple[Path, Reason]] = []

    def unreadable(error: OSError) -> None:
        others.append((Path(error.filename), _UNREADABLE_FOLDER))

    for place, folders, names in os.walk(folder, onerror=unreadable):
        here = Path(place)
        folders[:] = [name for name in folders if name not in exclude]
        others += [(here / name, _FOLDER_LINK) for name in folders if (here / name).is_symlink()]
        for path in (here / name for name in names if name not in exclude):
            if pattern and not path.absolute().match(pattern):
                others.append(
                    (
                        path,
                        (
                            f"file that does not match {pattern}",
                            f"files that do not match {pattern}",
                        ),
                    )
                )
            elif not pattern and _kind(path) not in (".txt", ".jsonl"):
                others.append((path, _OTHER_KIND))
            elif problem := _find_problem(path):
                others.append((path, problem))
            else:
                found.append(path)
    return sorted(found), sorted(others)


def _find_problem(path: Path) -> Reason | None:
    """Return the reason that keeps a file from being read, or None."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return _NO_FILE
        with open(path, "rb") as file:
            start = file.read(2)
    except FileNotFoundError:
        return _DANGLING
    except OSError as error:
        why = f"that cannot be read ({error.strerror})"
        return f"file {why}", f"files {why}"
    return _NOT_GZIP if _compressed(path) and start not in (b"", b"\x1f\x8b") else None


def plain_text(piece: TextLines, bad: BadLines) -> str:
    """Return the text of a part, without bad lines."""
    good = []
    for number, line in enumerate(piece.lines, piece.first_line):
        try:
            good.append(decode_utf8(line))
        except BadRecord as error:
            bad.add(piece.path, number, str(error))
    return "".join(good)
