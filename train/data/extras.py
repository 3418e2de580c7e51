"""Packages that only some files need. They are extras, imported when such a file is read."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, package: str, reader: str) -> Any:
    """Import a module that `reader` needs. Raises ValueError with the pip command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{reader} needs {package}, which cannot be imported ({error}): pip install {package}, "
            "or pip install '.[data]' in the repository"
        ) from error
