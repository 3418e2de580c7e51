"""Wording that messages share: places of errors, counts with their nouns, settings as options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FEW_TARGETS = 100  # token losses differ by about 3 from each other, so their mean by 0.3


@contextmanager
def naming(place: str | Path, *others: type[Exception]) -> Iterator[None]:
    """Make a ValueError, or one of `others`, a ValueError whose message begins with `place`."""
    kinds: tuple[type[Exception], ...] = (ValueError, *others)
    try:
        yield
    except kinds as error:
        raise ValueError(f"{place}: {error}") from error


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return "1 token" or "2,000 tokens"; `plural` is the noun's, by default with an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def remark_few(targets: float) -> str:
    """Return a remark on a mean over so few targets that chance decides it, else nothing."""
    return f" (of only {counted(int(targets), 'target')})" if targets < _FEW_TARGETS else ""


def parse_pair(text: str) -> tuple[int, int] | None:
    """Return the numbers of FROM:TO, or None for other texts."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def flag(name: str) -> str:
    """Return the name of a setting as the command line spells it, "--seq-len" for "seq_len"."""
    return "--" + name.replace("_", "-")


def show_options(options: Mapping[str, Any]) -> str:
    """Return options as on a command line, "--chunk 100 and no --offload"."""
    return " and ".join(_show_option(name, value) for name, value in options.items())


def _show_option(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {','.join(map(str, value)) if isinstance(value, tuple) else value}"
