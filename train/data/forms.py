"""The form in which a file holds text, by its first bytes: lines, an array or plain text."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator
from typing import Any

from train.data.compressed import BrokenFile, read_ahead

AUTO = "auto"  # the value of --format that leaves the choice to endings and content
LINES, ARRAY, PLAIN = "lines", "array", "text"  # its other values
FORMATS = (AUTO, LINES, ARRAY, PLAIN)
OBJECT = "object"  # a JSON object over several lines, which is not read
PEEKED = 1 << 16  # bytes of text that decide on the form

_BLANK = b" \t\r\n"  # between values of JSON
_COMPARED = 20  # lines
_OBJECT = re.compile(rb'\{\s*"[^"\n]*"\s*:')
_ARRAY = re.compile(rb'\[\s*(\]\s*\Z|(\[\s*)?\{\s*"[^"\n]*"\s*:)')
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_MARKS = re.compile(_STRING + rb'|[\[\]{},"]', re.DOTALL)
_READ = 1 << 16  # bytes of an array at once, at least


def recognize(start: bytes, whole: bool, by_line: bool) -> str:
    """Return LINES, ARRAY, OBJECT or PLAIN for a file whose text begins with `start`.

    whole    whether this is all of its text
    by_line  whether a list that may be the only line is a record. Otherwise it is an ARRAY
    """
    text = start.removeprefix(codecs.BOM_UTF8).lstrip(_BLANK)
    line, newline, rest = text.partition(b"\n")
    if b"\0" in text[:4]:  # UTF-16 or UTF-32
        return PLAIN
    if not newline and not whole:  # the first line is longer
        if _ARRAY.match(text):
            return LINES if by_line else ARRAY
        return LINES if _OBJECT.match(text) else PLAIN
    lines = [line for line in text.split(b"\n")[: None if whole else -1] if line.strip(_BLANK)]
    values = [_parse(line) for line in lines[:_COMPARED]]
    if 2 * sum(map(_is_record, values)) > len(values):
        alone = isinstance(values[0], list) and not rest.strip(_BLANK)
        return ARRAY if alone and not by_line else LINES
    if _ARRAY.match(text):
        return ARRAY
    return OBJECT if _OBJECT.match(text) and _is_open(line) else PLAIN


def split_array(text: io.BufferedReader) -> Iterator[bytes]:
    """Yield the elements of a JSON array, each as its bytes, without blank ones.

    Their quotes and brackets must be balanced. Raises BrokenFile if the text ends before the
    array, and ValueError if the text is no array or continues after it.
    """
    buffer, damage = read_ahead(text, PEEKED)
    buffer = buffer.removeprefix(codecs.BOM_UTF8).lstrip(_BLANK)
    if not buffer.startswith(b"["):
        raise ValueError(f"expected one JSON array, which begins with [, got {_show(buffer)}")
    first, at, depth = 1, 1, 1  # the start of the element, and the place and depth of the scan
    while True:
        for mark in _MARKS.finditer(buffer, at):
            at = mark.start()
            if (sign := mark[0]) == b'"':
                break  # the string ends behind the buffer
            at = mark.end()
            depth += (sign in (b"[", b"{")) - (sign in (b"]", b"}"))
            if depth == 0 or (depth == 1 and sign == b","):
                if (element := buffer[first : mark.start()]).strip(_BLANK):
                    yield element
                first = at
            if depth == 0:
                return _check_end(buffer[at:], damage, text)
        else:
            at = len(buffer)
        if damage is not None:
            raise BrokenFile(damage or "the file ends before the end of its JSON array")
        buffer, at, first = buffer[first:], at - first, 0
        more, damage = read_ahead(text, max(_READ, len(buffer)))  # since a string is scanned again
        buffer += more


def _check_end(rest: bytes, damage: str | None, text: io.BufferedReader) -> None:
    """Raise ValueError if anything but blanks is left, and BrokenFile for damage."""
    while not rest.strip(_BLANK):
        if damage is not None:
            if damage:
                raise BrokenFile(damage)
            return
        rest, damage = read_ahead(text, _READ)
    raise ValueError(
        f"expected one JSON array and nothing after it, got {_show(rest.lstrip(_BLANK))}; "
        f"--format {LINES} reads a record a line, which may be a list"
    )


def _show(text: bytes) -> str:
    return repr(text[:20].decode(errors="replace"))


def _parse(line: bytes) -> Any:
    """Return the value of a line, or None if it is not JSON."""
    try:
        return json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None


def _is_record(value: Any) -> bool:
    """Whether a value is an object, or a list of objects."""
    return isinstance(value[0] if isinstance(value, list) and value else value, dict)


def _is_open(line: bytes) -> bool:
    """Whether a line leaves brackets open, and ends outside a string."""
    signs = re.sub(_STRING, b"", line)
    opened, closed = (sum(map(signs.count, pair)) for pair in ((b"{", b"["), (b"}", b"]")))
    return b'"' not in signs and opened > closed
