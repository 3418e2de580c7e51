"""What is computed of the visible pairs of a mask. What kernels may lack is a field here and a
refusal there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """Attention softmax(softcap tanh(scale q k^T / softcap)) v, or without a softcap softmax(scale
    q k^T + bias) v.

    scale          positive factor of the scores
    deterministic  results are equal bit for bit between runs
    biased         calls may come with a `CallBias`, which is added to the scores; not where there
                   is a softcap
    softcap        positive bound of the scores before they are masked; None: they have none
    """

    scale: float
    deterministic: bool = False
    biased: bool = False
    softcap: float | None = None
