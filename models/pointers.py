"""Pointers of git-lfs, which stand in the place of files that were not downloaded."""

from __future__ import annotations

from pathlib import Path

_START = b"version https://git-lfs"


def refuse_pointer(path: Path) -> None:
    """Raise ValueError if a file is a pointer of git-lfs. Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        if file.read(len(_START)) == _START:
            raise ValueError(
                f"{path} is a pointer of git-lfs, expected the file itself: run git lfs pull"
            )
