"""The functions that cut sequences."""

from . import EXTRACT_FUNC_DICT  # noqa: F401
