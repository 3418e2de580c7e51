"""A lock on a folder: one run at a time may write to it."""

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
    """Lock `folder`, which is made, until the returned file is closed. Print a warning on a file
    system without locks. Raises ValueError with the owner's process id if another process holds it.
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
