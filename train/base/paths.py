"""Paths inside a folder. Names in a folder from elsewhere must not lead out of it."""

from __future__ import annotations

from pathlib import Path


def inside(folder: Path, name: str) -> Path:
    """Return the path of file `name` in `folder`, which may be a link. The file need not exist.
    Raises ValueError if `name` is not a plain name, or is a link that leads out of the folder.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{folder}: expected the name of a file in this folder, got {name!r}")
    path = folder / name
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:  # links that point to each other
        raise ValueError(f"{path} leads nowhere: {error}") from error
    if folder.resolve() not in real.parents:
        raise ValueError(f"{path} leads out of its folder, to {real}")
    return path
