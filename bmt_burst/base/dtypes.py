"""Dtypes of sums and of copies."""

from __future__ import annotations

import torch

# The best unit of copies, 16 bytes: GPUs take several times as long to copy or join parts of
# tensors by 2-byte numbers.
WIDE = torch.complex128


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results of inputs of `dtype` are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def copy_unit(dtype: torch.dtype, numbers: int) -> torch.dtype:
    """Return the dtype in whose units rows of so many numbers of `dtype` are copied."""
    return dtype if numbers * dtype.itemsize % WIDE.itemsize else WIDE
