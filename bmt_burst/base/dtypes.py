"""Dtypes of sums."""

from __future__ import annotations

import torch


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results of inputs of `dtype` are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of `dtype` are added up: fp32 for floats of fewer bits,
    otherwise `dtype`.
    """
    return accumulator_dtype(dtype) if dtype.is_floating_point else dtype
