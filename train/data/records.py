"""Lines of data as values: UTF-8, JSON and Unicode. Others are counted, as broken shards are."""

from __future__ import annotations

import codecs
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.base.wording import counted, naming
from train.data.files import TextFile

# share of zero bytes at even or at odd places that only UTF-16 and UTF-32 exceed
_ZEROS = 0.2
_LISTED = 20  # names of fields in a message, and bad lines
_DEPTH = 3  # objects around a field that is named


class BadRecord(ValueError):
    """A record that cannot be used. The message has the reason."""


def check_unicode(text: str) -> str:
    """Return the text. Raises BadRecord if it is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(f"not Unicode: {error.reason} at character {error.start}") from error
    return text


def parse_json(line: bytes) -> Any:
    """Return the value of a .jsonl line. Raises BadRecord if it is not JSON in UTF-8."""
    # a file that was joined from others may have marks inside
    text = decode_utf8(line.removeprefix(codecs.BOM_UTF8))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise BadRecord(f"not JSON: {error}") from error


def find_value(record: Any, field: str) -> Any:
    """Return field `a.b`: of this name, or else field b of the object in a. Raises KeyError."""
    if isinstance(record, dict):
        if field in record:
            return record[field]
        outer, dot, inner = field.partition(".")
        if dot and outer in record:
            return find_value(record[outer], inner)
    raise KeyError(field)


def describe_fields(record: Any) -> str:
    """Return a verb and the names of a record's fields, those of inner objects with dots."""
    if not isinstance(record, dict):
        return f"is of type {type(record).__name__}, and no object"
    names = [*itertools.islice(_field_names(record, _DEPTH), _LISTED + 1)]
    more = ", ..." if len(names) > _LISTED else ""
    return f"has the fields {', '.join(names[:_LISTED])}{more}" if names else "has no fields"


def _field_names(record: dict[str, Any], depth: int) -> Iterator[str]:
    for name, value in record.items():
        if depth and isinstance(value, dict) and value:
            yield from (f"{name}.{inner}" for inner in _field_names(value, depth - 1))
        else:
            yield name


def decode_utf8(line: bytes) -> str:
    """Return a line as text. Raises BadRecord unless it is UTF-8, or if it may be UTF-16."""
    halves = line[::2], line[1::2]  # text in ASCII has zeros in one of them
    if any(half.count(0) > _ZEROS * len(half) for half in halves):
        raise BadRecord(f"not UTF-8: {line.count(0)} of {len(line)} bytes are zero")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8: {error.reason} at byte {error.start}") from error


def read_text(path: Path) -> str:
    """Return the text of a file, with its line ends, without a byte order mark.

    Raises ValueError if it is not UTF-8, or no file. Pipes are none: each rank reads the file.
    """
    if not path.is_file():
        raise ValueError(f"expected a file, got {path}")
    with naming(path):
        return decode_utf8(path.read_bytes().removeprefix(codecs.BOM_UTF8))


@dataclass
class BadLines:
    """Lines that could not be used, `among` all that are not empty, and characters left out."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    left_out: int = 0
    among: int = 0

    def add(self, file: TextFile, line: int, reason: str) -> None:
        self.extend(BadLines(1, [f"{file}:{line}: {reason}"]))

    def extend(self, later: BadLines) -> None:
        self.count += later.count
        self.left_out += later.left_out
        self.among += later.among
        self.first += later.first[: _LISTED - len(self.first)]

    def check(self, most: float) -> None:
        """Raise ValueError if more than the share `most` of the lines are bad."""
        if self.count and self.count / self.among > most:
            raise ValueError(self.summary(f", more than --max-bad {most:g} of them"))

    def summary(self, too_many: str = "") -> str:
        """Return how many lines are bad, and the first ones."""
        if not self.count:
            return "no line is bad"
        verb = "is" if self.count == 1 else "are"
        bad = f"{self.count:,} of {counted(self.among, 'line')} {verb} bad{too_many}"
        return f"{bad}. The first: {'; '.join(self.first[:3])}"

    def report(self) -> None:
        if self.left_out:
            were = (
                f"{noun} that the vocabulary lacks {verb} left out"
                for noun, verb in (("character", "was"), ("characters", "were"))
            )
            print(counted(self.left_out, *were), file=sys.stderr)
        if self.count:
            skipped = counted(self.count, "bad line was skipped", "bad lines were skipped")
            print(f"{skipped}, the first:", *self.first[:5], sep="\n  ", file=sys.stderr)


def check_broken(found: Sequence[str], most: int) -> None:
    """Raise ValueError if more than `most` files are broken."""
    if len(found) > most:
        shards = counted(len(found), "broken shard")
        raise ValueError(f"{shards}, more than --max-bad-shards {most}: {'; '.join(found)}")


class BrokenShards:
    """Broken files, with the reasons. More than `most` raise ValueError, which names all."""

    def __init__(self, most: int):
        self.most = most
        self.found: list[str] = []

    def add(self, file: TextFile, reason: str) -> None:
        self.found.append(f"{file}: {reason}")
        check_broken(self.found, self.most)

    def report(self) -> None:
        if self.found:
            count = len(self.found)
            skipped = counted(count, "broken shard was skipped", "broken shards were skipped")
            print(f"{skipped} from the damage on:", *self.found, sep="\n  ", file=sys.stderr)
