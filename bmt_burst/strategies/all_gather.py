"""All-gather: the ring with all blocks of a host in one stage, as Llama 3 was trained (arXiv
2407.21783).

While a rank computes its own block, it gathers all that it looks at of the others' keys and values,
of all heads, and then computes that in as few kernel calls as the mask allows: nobody has fewer
partial results to add up. But no more than the own block hides the exchange, and memory is needed
for all that is looked at. The backward is the same with what is cheaper to move, and its gradients
go home at the end. A double ring has a stage for each host.
"""

from __future__ import annotations

import sys

from . import Problem
from .ring import Ring, RingPlan


class AllGather(Ring):
    """`group_bytes` does not bound what comes in, only how many partial results wait to be added
    up.
    """

    name = "all-gather"

    def plan(self, problem: Problem, rank: int) -> RingPlan:
        return RingPlan(problem, rank, stage_bytes=sys.maxsize)
