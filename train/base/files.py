"""Writing that may fail: errors name what was written to, and a terminal that is gone ends no run."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def writing(file: str | Path) -> Iterator[None]:
    """Lets an OSError of a write name `file`, as that of an open does."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


@contextmanager
def printing() -> Iterator[None]:
    """For what goes to stdout and stderr: lost if the terminal is gone, else an OSError that names
    them.
    """
    try:
        with writing("stdout"):
            yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        leave_terminal((1, 2))


def print_error(text: str) -> None:
    """Prints to stderr, if that can still be written to: what is about to end anyway ends all the
    same.
    """
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def terminals() -> list[int]:
    """Those of stdout and stderr that are a terminal."""
    return [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]


def leave_terminal(descriptors: Iterable[int]) -> None:
    """Lets nothing more be written to a terminal that was hung up, where every write fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
