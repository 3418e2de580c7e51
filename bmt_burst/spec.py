"""What is computed of the visible pairs of a mask. A kernels' feature is a field here and honest refusals there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """Attention softmax(scale q k^T) v.

    scale          positive factor of the scores
    deterministic  results are equal bit for bit between runs
    """

    scale: float
    deterministic: bool = False
