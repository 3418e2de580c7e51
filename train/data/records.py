"""Lines of data as values: UTF-8, JSON and Unicode. Other lines are bad records."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Iterator
from typing import Any

# share of zero bytes at even or at odd places that only UTF-16 and UTF-32 exceed
_ZEROS = 0.2
_LISTED, _DEPTH = 20, 3  # names of fields in a message, and objects around them


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
