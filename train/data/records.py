"""Lines of data as values: UTF-8, JSON and Unicode. Other lines are bad records."""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # listed first, since it begins like the mark of UTF-16
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# share of zero bytes at even or at odd places that only UTF-16 and UTF-32 exceed
_ZEROS = 0.2
_LISTED, _DEPTH = 20, 3  # names of fields in a message, and objects around them
_NOT_ASCII = re.compile(rb"[\x80-\xff]+")


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
    text = decode_utf8(
        line.removeprefix(codecs.BOM_UTF8)
    )  # also inside a file that was joined from others
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise BadRecord(f"not JSON: {error}") from error


def find_value(record: Any, field: str) -> Any:
    """Return the value of a field. `a.b` is the field of this very name, or else field b of the
    object in field a. Raises KeyError if there is none.
    """
    if isinstance(record, dict):
        if field in record:
            return record[field]
        outer, dot, inner = field.partition(".")
        if dot and outer in record:
            return find_value(record[outer], inner)
    raise KeyError(field)


def describe_fields(record: Any) -> str:
    """Return a verb and the names of a record's fields for a message, those of inner objects with
    dots.
    """
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
    """Return a line as text. Raises BadRecord if it is not UTF-8, or has as many zero bytes as
    UTF-16.
    """
    if any(_many_zeros(line)):
        raise BadRecord(f"not UTF-8: {line.count(0)} of {len(line)} bytes are zero")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8: {error.reason} at byte {error.start}") from error


def guess_encoding(start: bytes) -> str | None:
    """Guess the encoding of a file from its first bytes. Return a name that iconv knows, or None
    for UTF-8 and unclear cases.
    """
    if marked := next((name for mark, name in _MARKS.items() if start.startswith(mark)), None):
        return marked
    even, odd = _many_zeros(start)
    if even or odd:
        return "UTF-32" if even and odd else "UTF-16BE" if even else "UTF-16LE"
    if _readable(start, "UTF-8"):
        return None
    if _has_pairs(start) and _readable(start, "GB18030"):
        return "GB18030"
    return "WINDOWS-1252" if _readable(start, "WINDOWS-1252") else None


def _many_zeros(text: bytes) -> tuple[bool, bool]:
    """Whether bytes at even and at odd places are zero as often as in UTF-16. Such bytes may be
    valid UTF-8.
    """
    even, odd = text[::2], text[1::2]
    return even.count(0) > _ZEROS * len(even), odd.count(0) > _ZEROS * len(odd)


def _has_pairs(text: bytes) -> bool:
    """Whether most bytes above ASCII have another one beside them, as in Chinese. Accented letters
    stand alone.
    """
    runs = [len(run) for run in _NOT_ASCII.findall(text)]
    return sum(length for length in runs if length > 1) > sum(runs) / 2


def _readable(start: bytes, encoding: str) -> bool:
    """Whether bytes are text in an encoding. They may end inside a character."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(start)
    except UnicodeDecodeError:
        return False
    return True
