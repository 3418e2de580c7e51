"""The process that hashes and writes one rank's file of a checkpoint while the rank trains on.

    python writer.py DESCRIPTOR BYTES FILE PARENT

The bytes are in memory that this process shares with its parent, by a file descriptor. It prints
the sha256 of the file, or why there is none. It needs only the standard library, so that it starts
in milliseconds. Linux kills it when its parent dies.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train.base.signals import die_with

FAILED = 2  # exit code if the file could not be written


def main(descriptor: int, size: int, file: str) -> int:
    hashes: list[str] = []
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as memory, memoryview(memory) as content:
        # hashlib releases the interpreter's lock
        hashing = threading.Thread(target=lambda: hashes.append(_sha256(content)))
        hashing.start()
        try:
            _write(Path(file), content)
        except OSError as error:
            print(error)
            return FAILED
        finally:
            hashing.join()
    print(*hashes)
    return 0


def _sha256(content: memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(file: Path, content: memoryview) -> None:
    """Write a file and make it survive a power failure. Raises OSError that names the file."""
    at = 0
    with open(file, "wb", buffering=0) as stream:
        while at < len(content):
            try:
                at += stream.write(content[at:])
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(file)) from error
        os.fsync(stream.fileno())


if __name__ == "__main__":
    die_with(int(sys.argv[4]))
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
