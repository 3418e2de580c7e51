"""JSON files, and pointers of git-lfs, which stand in the place of files not downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_START = b"version https://git-lfs"


def refuse_pointer(path: Path) -> None:
    """Raise ValueError if a file is a pointer of git-lfs. Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        if file.read(len(_START)) == _START:
            raise ValueError(
                f"{path} is a pointer of git-lfs, expected the file itself: run git lfs pull"
            )


def read_json(file: Path) -> dict[str, Any]:
    """Read names and values from a JSON file. Raises ValueError for others, or OSError."""
    refuse_pointer(file)
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected names and values, got a {type(content).__name__}")
    return content
