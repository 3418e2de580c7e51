"""Folders that exist only when they are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train.base.lock import lock


@contextmanager
def write_aside(output: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to `output` at the end, or removed if the work fails.

    Raises ValueError if another process is writing it.
    """
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
