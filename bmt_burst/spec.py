"""The formula of attention. A feature that some kernels lack is a field here, and a reason in
`refuses` of those kernels.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """The formula of attention: softmax(softcap tanh(scale q k^T / softcap)) v, without a softcap
    softmax(scale q k^T) v.

    scale          positive factor of the scores
    deterministic  results are equal bit for bit between runs
    softcap        positive bound of the scores before they are masked, or None
    value_size     the first columns of v and dout that may differ from 0, if fewer than q has.
                   A kernel may compute with these alone, and return zeros in the others of out and
                   dv.
    """

    scale: float
    deterministic: bool = False
    softcap: float | None = None
    value_size: int | None = None
