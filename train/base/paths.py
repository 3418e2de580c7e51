"""Names in a folder never lead out of it, whoever wrote the folder."""

from __future__ import annotations

from pathlib import Path


def inside(folder: Path, name: str) -> Path:
    """The file `name` of `folder`, which itself may be a link. The file need not exist.

    Raises ValueError if `name` is not a plain name, or a link that leads out of the folder.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{folder} names a file {name!r}, which is not the name of a file in it")
    path = folder / name
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:  # of links that lead to each other
        raise ValueError(f"{path} leads nowhere: {error}") from error
    if folder.resolve() not in real.parents:
        raise ValueError(f"{path} leads out of its folder, to {real}")
    return path
