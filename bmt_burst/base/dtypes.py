"""Dtypes of sums."""

from __future__ import annotations

import torch


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results of inputs of `dtype` are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32
