"""One run at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from pathlib import Path
from typing import TextIO

from train.base.files import writing

_NAME = ".lock"


def lock(folder: Path) -> TextIO:
    """Takes `folder`, which is made if need be, for as long as the file returned is open: until
    this process ends.

    Raises ValueError, with the process that has it, if another one has. Where the file system knows
    no locks it says so and goes on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / _NAME, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"{folder} is in use by {owner}: wait for it, or give another --output"
        ) from None
    except OSError as error:
        print(
            f"{folder} cannot be locked ({error.strerror}): let no other run write to it",
            file=sys.stderr,
        )
    with writing(file.name):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    return file
