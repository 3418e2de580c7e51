"""The values of --data and --val-data: a path, or the texts after NAME= by name."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

Named = Mapping[str, str]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def parse_sources(texts: Sequence[str]) -> str | dict[str, str]:
    """Return the values of --data or --val-data: a path, or the texts after NAME= by name.

    A single value that exists is a path. Raises ValueError for missing and duplicate names.
    """
    [first, *others] = texts
    if not others and ("=" not in first or os.path.exists(first)):
        return first
    named: dict[str, str] = {}
    for text in texts:
        name, separator, rest = text.partition("=")
        if not separator:
            raise ValueError(f"expected one path, or NAME= in front of each, got {text!r}")
        if name in named:
            raise ValueError(f"expected different names, got {name} twice")
        named[name] = rest
    return named


def parse_shares(data: Named) -> dict[str, tuple[str, Fraction]]:
    """Return folder and weight of each source of --data. Raises ValueError for wrong ones."""
    _check_names("--data", data)
    shares = {}
    for name, text in data.items():
        if (parsed := _parse_weight(text)) is None:
            raise ValueError(
                f"--data: expected {name}=PATH:WEIGHT with a positive number as weight, got "
                f"{name}={text}"
            )
        shares[name] = parsed
    return shares


def first_folder(data: str | Named) -> str:
    """Return the folder of the first source of --data, whose tokenizer all have."""
    return data if isinstance(data, str) else next(iter(parse_shares(data).values()))[0]


def validation_folders(val_data: str | Named | None) -> dict[str, str]:
    """Return the folders of --val-data by name, "" for a path. Raises ValueError for wrong ones."""
    if val_data is None or isinstance(val_data, str):
        return {} if val_data is None else {"": val_data}
    _check_names("--val-data", val_data)
    return dict(val_data)


def evaluated_folders(data: str | Named) -> dict[str, str]:
    """Return the folders of evaluate.py's --data by name, "" for a path. Weights may be missing."""
    if isinstance(data, str):
        return {"": data}
    _check_names("--data", data)
    parsed = {name: _parse_weight(text) for name, text in data.items()}
    return {name: found[0] if found else data[name] for name, found in parsed.items()}


def show_sources(value: str | Named | None) -> str:
    """Return a value of --data or --val-data for messages."""
    return "None" if value is None else " ".join(source_words(value))


def source_words(value: str | Named) -> list[str]:
    """Return a value of --data or --val-data as the words of a command line."""
    if isinstance(value, str):
        return [value]
    return [f"{name}={text}" for name, text in value.items()]


def _check_names(option: str, sources: Named) -> None:
    if not sources:
        raise ValueError(f"{option} must name at least one source, got none")
    for name, text in sources.items():
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{option}: expected a name of letters, digits, '_', '-' and '.', got {name!r}"
            )
        if not isinstance(text, str) or not text:
            raise ValueError(f"{option}: expected a path for {name}, got {text!r}")


def _parse_weight(text: str) -> tuple[str, Fraction] | None:
    """Return the path and the weight of the text PATH:WEIGHT, or None for other texts."""
    folder, _, weight = text.rpartition(":")
    try:
        number = float(weight)
    except ValueError:
        return None
    return (folder, Fraction(weight.strip())) if folder and 0 < number < math.inf else None
