"""Writes that may fail. An error names its file, and a closed terminal does not end a run."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def writing(file: str | Path) -> Iterator[None]:
    """Make an OSError of a write name `file`, as an OSError of `open` does."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


@contextmanager
def printing() -> Iterator[None]:
    """Ignore that the terminal is closed. Let other failures to print name stdout."""
    try:
        with writing("stdout"):
            yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        leave_terminal((1, 2))


def print_error(text: str) -> None:
    """Print to stderr if that is still possible. The caller is about to end the process anyway."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def terminals() -> list[int]:
    """Return the descriptors of stdout and stderr that are terminals."""
    return [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]


def leave_terminal(descriptors: Iterable[int]) -> None:
    """Redirect descriptors to /dev/null, because every write to a closed terminal fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
