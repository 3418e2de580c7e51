"""All-gather: the ring with all blocks of a host in one stage, as for Llama 3 (arXiv 2407.21783).

While a rank computes its own block, it gathers all keys and values that it needs, of all heads.
Then it computes with them in as few kernel calls as the mask allows. No other strategy has fewer
partial results to add up. But only the own block's kernels hide the exchange, and the memory must
hold all that is gathered. The backward does the same with whichever side is cheaper to send, and
returns the gradients at the end. A forward that sends queries (see ring/) also returns its outputs
at the end. A double ring has a stage for each host.
"""

from __future__ import annotations

import sys

from . import Problem
from .ring import Ring, RingPlan


class AllGather(Ring):
    """The ring without a bound on a stage. `group_bytes` only bounds the partial results that wait
    to be added up.
    """

    name = "all-gather"

    def plan(self, problem: Problem, rank: int) -> RingPlan:
        return RingPlan(problem, rank, stage_bytes=sys.maxsize)
