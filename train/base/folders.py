"""Folders: a lock for one run at a time, and files that must not lead out of one."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from train.base.files import writing
from train.base.wording import naming

_LOCK = ".lock"


def lock(folder: Path) -> TextIO:
    """Lock `folder`, which is made, until the returned file is closed. Print a warning on a file
    system without locks. Raises ValueError with the owner's process id if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / _LOCK, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"{folder} is in use by {owner}: wait for it to end, or give another --output"
        ) from None
    except OSError as error:
        print(
            f"{folder} cannot be locked ({error.strerror}): make sure that no other run writes "
            "to it",
            file=sys.stderr,
        )
    with writing(file.name):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    return file


@contextmanager
def write_aside(output: Path) -> Iterator[Path]:
    """Yield a folder that becomes `output` at the end, or is removed if the work fails."""
    output = Path(os.path.abspath(output))
    partial = output.with_name(f".{output.name}.partial")
    with lock(partial) as held:
        for leftover in partial.iterdir():
            if leftover.is_dir():
                shutil.rmtree(leftover)
            elif leftover.name != Path(held.name).name:
                leftover.unlink()
        try:
            yield partial
            Path(held.name).unlink()
            partial.rename(output)
        except BaseException:
            shutil.rmtree(partial)
            raise


def inside(folder: Path, name: str) -> Path:
    """Return the path of file `name` in `folder`, which may be a link. The file need not exist.
    Raises ValueError if `name` is not a plain name, or is a link that leads out of the folder.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{folder}: expected the name of a file in this folder, got {name!r}")
    path = folder / name
    with naming(f"{path} leads nowhere", OSError, RuntimeError):  # links that point to each other
        real = path.resolve()
    if folder.resolve() not in real.parents:
        raise ValueError(f"{path} leads out of its folder, to {real}")
    return path
