"""The names of kernels."""

from . import AttnType  # noqa: F401
