"""Writes that may fail, to files and terminals, and the file of torchrun for the reason."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_LATER = 5  # seconds; torchrun checks its ranks more often


def hash_file(file: Path) -> str:
    """Return the sha256 of a file."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def writing(file: str | Path) -> Iterator[None]:
    """Make an OSError of a write name `file`, as an OSError of `open` does."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield the path of a hidden file, which becomes `file` at the end if the work succeeds."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        with writing(partial):
            yield partial
            partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def drawing(file: Path) -> Iterator[tuple[Any, Any]]:
    """Yield a figure of matplotlib and its axes, which are drawn into `file` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    try:
        yield figure, axes
        with replacing(file) as partial:
            figure.savefig(partial, dpi=120, format="png")
    finally:
        plt.close(figure)


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


def leave_reason(sentence: str, cause: bool = True) -> None:
    """Write why this process fails to torchrun's file, if there is one. Ignore a full disk.

    Only the first reason is kept: later ones follow from it. The file is written whole or not at
    all, since torchrun fails on half a file. It takes the earliest failure for the root cause, so
    a rank that fails because another one did passes `cause=False`, and is dated seconds later.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None or os.path.exists(file):
        return
    failed = int(time.time()) + (0 if cause else _LATER)
    reason = {"message": {"message": sentence, "extraInfo": {"timestamp": str(failed)}}}
    partial = Path(f"{file}.partial")
    with suppress(OSError):
        partial.write_text(json.dumps(reason))
        partial.replace(file)
