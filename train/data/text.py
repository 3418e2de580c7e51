"""Text in files: reading it in parts, and turning the documents of a part into tokens."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from train.data.compressed import BrokenFile, decompressed
from train.data.files import (
    ARROW,
    MEGATRON,
    PARQUET,
    Piece,
    TextFile,
    Texts,
    compression,
    find_form,
    named,
)
from train.data.forms import ARRAY, PLAIN, split_array
from train.data.megatron import IndexedTokens
from train.data.records import (
    BadLines,
    BadRecord,
    BrokenShards,
    check_unicode,
    decode_utf8,
    describe_fields,
    find_value,
    parse_json,
)
from train.data.tables import read_texts
from train.data.tokenizer import open_tokenizer
from train.data.tokenizer_base import Tokenizer
from train.registry import kind_of_data, load

_PIECE = 1 << 20  # bytes of text that are tokenized at once, up to the end of a line
_END: Any = object()


@dataclass(frozen=True)
class Document:
    """A document, or the part of it that a part of its file holds. Parts of one document are equal.

    line  the line of JSON, the record of an array, the row of a table, or the document of tokens;
          None for plain text, which is one document
    """

    file: TextFile
    line: int | None = None

    @property
    def name(self) -> str:
        """A name that stays the same if the input is moved."""
        return self.file.name if self.line is None else f"{self.file.name}:{self.line}"


@dataclass(frozen=True)
class Encoded:
    """The tokens of a part of a file: each document with its ids, or with its instance."""

    file: TextFile
    documents: list[tuple[Document, Sized]]
    bad: BadLines
    size: int
    damage: str | None = None


class Reader(Protocol):
    """Turns records and texts of files into documents or instances, for one kind of model.

    It is made as (tokenizer, json_field). Raises BadRecord for a record that it cannot use.
    """

    @property
    def field(self) -> str | None:
        """The field of a record that it reads; None if it reads them all."""

    def of_record(self, record: Any) -> Sized:
        """Return the document or instance in a record of JSON."""

    def of_text(self, text: str) -> Sized:
        """Return the part of a document or instance in a part of a .txt."""


class DocumentReader:
    """Reads documents: the ids of the text in field `json_field` of a record."""

    def __init__(self, tokenizer: Tokenizer, json_field: str):
        self._tokenizer, self.field = tokenizer, json_field

    def of_record(self, record: Any) -> np.ndarray:
        return self.of_text(text_in(record, self.field))

    def of_text(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text), self._tokenizer.dtype)


def text_in(record: Any, json_field: str) -> str:
    """Return the text in a field of a record. Raises BadRecord if there is none."""
    try:
        text = find_value(record, json_field)
    except KeyError as error:
        fields = describe_fields(record)
        raise BadRecord(f"no text in field {json_field!r}; the record {fields}") from error
    if not isinstance(text, str):
        raise BadRecord(f"no text in field {json_field!r}, but {type(text).__name__}")
    return check_unicode(text)


def make_reader(tokenizer: Tokenizer, json_field: str) -> Reader:
    """Return the reader for the kind of model that has this tokenizer."""
    return load(kind_of_data(tokenizer.instances).reader)(tokenizer, json_field)


class Encoder:
    def __init__(self, tokenizer: Tokenizer, json_field: str):
        # a single text leaves nothing to do for more threads
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.tokenizer, self._field = tokenizer, json_field
        self._reader = make_reader(tokenizer, json_field)

    @classmethod
    def open(cls, tokenizer: str, json_field: str, eos: str | None = None) -> Encoder:
        return cls(open_tokenizer(tokenizer, eos), json_field)

    def __call__(self, piece: Piece) -> Encoded:
        bad, before = BadLines(among=sum(map(piece.counts, piece.lines))), self.tokenizer.left_out
        if piece.file.form == PLAIN:
            documents = [(Document(piece.file), self._reader.of_text(plain_text(piece, bad)))]
        else:
            documents = list(self._records(piece, bad))
        bad.left_out = self.tokenizer.left_out - before
        return Encoded(piece.file, documents, bad, piece.size, piece.damage)

    def _records(self, piece: Piece, bad: BadLines) -> Iterator[tuple[Document, Sized]]:
        """Yield the documents in records of JSON, in rows of a table, or in token ids."""
        for number, line in enumerate(piece.lines, piece.first_line):
            if not piece.counts(line):
                continue
            try:
                if piece.file.has_records:
                    found = self._reader.of_record(parse_json(line or b""))
                elif piece.file.kind == MEGATRON:
                    found = self._check_ids(number, line)
                elif line is None:
                    raise BadRecord(f"no text in field {self._field!r}")
                else:
                    found = self._reader.of_text(decode_utf8(line))
            except BadRecord as error:
                bad.add(piece.file, number, str(error))
            else:
                yield Document(piece.file, number), found

    def _check_ids(self, number: int, ids: np.ndarray) -> np.ndarray:
        """Return a document's ids without its eos. Raises ValueError for ids that no token has."""
        size = self.tokenizer.vocab_size
        for token in (int(ids.min()), int(ids.max())) if len(ids) else ():
            if not 0 <= token < size:
                raise ValueError(
                    f"document {number} has token {token}, but --tokenizer has {size} tokens"
                )
        return ids[:-1] if len(ids) and ids[-1] == self.tokenizer.eos_id else ids


def find_broken(
    files: Sequence[TextFile], field: str | None, broken: BrokenShards
) -> list[TextFile]:
    """Return files that open. `broken` gets damaged tables. Raises ValueError for wrong ones."""
    whole = []
    for file in files:
        try:
            if file.kind == MEGATRON:
                with named(file):
                    IndexedTokens(file)
            elif file.kind in (PARQUET, ARROW):
                with named(file), file.open() as opened:
                    next(read_texts(opened, file.kind, field or ""), None)
            else:
                _check_records(file, field)
        except BrokenFile as error:
            broken.add(file, str(error))
        else:
            whole.append(file)
    return whole


def _check_records(file: TextFile, field: str | None) -> None:
    """Read the first part of a text. Raise ValueError if it has records, and all lack the field."""
    if field is None or file.form == PLAIN:
        return
    piece = next(read_pieces(file), None)
    if piece is None or not piece.file.has_records:
        return
    first = None
    for line in piece.lines:
        try:
            record = parse_json(line or b"")
            value = find_value(record, field)
        except BadRecord:
            continue  # it is counted when all lines are read
        except KeyError:
            held = describe_fields(record)
            if isinstance(record, list):
                held += f"; --format {ARRAY} reads a list of records"
        else:
            if isinstance(value, str | None):
                return
            held = f"has {type(value).__name__} there"
        first = first or held
    if first:
        raise ValueError(
            f"{file}: expected text in field {field!r}, see --field; the first record {first}. In "
            "a folder, --exclude leaves a file out"
        )


def read_pieces(file: TextFile, field: str = "") -> Iterator[Piece]:
    """Yield a file's lines, records of an array, texts of column `field` or documents of a .bin.
    Raises ValueError if it cannot be read, and as `find_form`. The last piece reports damage.
    """
    with named(file), file.open() as raw:
        if file.kind == MEGATRON:
            yield from IndexedTokens(file).pieces()
        elif file.kind in (PARQUET, ARROW):
            place = [0]  # in the file, where the rows so far end
            found = read_texts(raw, file.kind, field)
            yield from _cut(file, (x for rows, place[0] in found for x in rows), lambda: place[0])
        else:
            file = find_form(file, raw)
            text = decompressed(raw, compression(file.path))
            records = split_array(text) if file.form == ARRAY else iter(text.readline, b"")
            yield from _cut(file, _without_mark(records), raw.tell)


def _cut(file: TextFile, lines: Iterator[bytes | None], tell: Callable[[], int]) -> Iterator[Piece]:
    """Yield lines or rows in pieces. `tell` returns the place in the file."""
    damage, first_line, before = None, 1, 0
    while damage is None:
        taken: Texts = []
        length = 0
        try:
            while length < _PIECE and (line := next(lines, _END)) is not _END:
                taken.append(line)
                length += len(line or b"")
        except BrokenFile as error:
            damage = str(error)
        if not taken and damage is None:
            return
        place = tell()
        yield Piece(file, first_line, taken, place - before, damage)
        first_line, before = first_line + len(taken), place


def _without_mark(lines: Iterator[bytes]) -> Iterator[bytes]:
    if (first := next(lines, None)) is not None:
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from lines


def plain_text(piece: Piece, bad: BadLines) -> str:
    """Return the text of a part, without bad lines."""
    good = []
    for number, line in enumerate(piece.lines, piece.first_line):
        try:
            good.append(decode_utf8(line or b""))
        except BadRecord as error:
            bad.add(piece.file, number, str(error))
    return "".join(good)
