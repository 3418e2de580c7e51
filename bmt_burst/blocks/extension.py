"""A choice of blocks as a call sees it: dense attention near, and chosen blocks beyond."""

from __future__ import annotations

import sys
from abc import abstractmethod
from dataclasses import replace
from typing import Any, Self

from ..base.kept import is_recomputing
from ..sequence.mask import Mask
from ..strategies import Plan, Problem, choose
from ..strategies.extension import DenseCall, Extension, Tensors
from .documents import find_fault, find_longest


class BlockChoice(Extension):
    """Attention of causal documents, in which the data chooses blocks. `memory` of a subclass is a
    `BlockMemory`.
    """

    takes_two_lengths = True

    @abstractmethod
    def near_mask(self, mask: Mask) -> Mask:
        """Return the pairs that a dense kernel computes."""

    @abstractmethod
    def is_exact(self, longest: int) -> bool:
        """Return whether a call is dense if its longest document has this many tokens."""

    @abstractmethod
    def make_plan(self, problem: Problem, rank: int, near: Plan, span_bytes: int) -> Plan:
        """Return the plan of a rank, a BlockPlan that chooses. `near` plans the near part."""

    def terms(self, tensors: Tensors) -> dict[str, Any]:
        return {"sparse": str(self), "kept choices": is_recomputing()}

    def for_layer(self, *, rotary: bool, **others: Any) -> Self:
        for name, value in others.items():
            if value is not None:
                raise ValueError(f"expected sparse or {name}, got {self} and {name}={value}")
        return self

    def bind(self, tensors: Tensors, call: DenseCall) -> Self:
        if call.spec.softcap is not None:
            raise ValueError(
                "expected sparse or softcap, got both: sparse attention caps no scores"
            )
        if call.mask is None and not call.causal:
            raise ValueError(
                "expected causal=True or a mask of causal documents with sparse, got none"
            )
        if call.mask is not None and (fault := find_fault(call.mask)):
            raise ValueError(fault)
        return self

    def plan(self, problem: Problem, rank: int, strategy: str) -> Plan:
        if self.is_exact(find_longest(problem.mask)):
            plan = super().plan(problem, rank, strategy)
            plan.takes_inputs = False  # it has no use for what blocks are chosen by
            return plan
        # sparse sequences are long, and so "auto" takes the ring for what is near
        dense = "ring" if strategy == "auto" else strategy
        near = replace(problem, mask=self.near_mask(problem.mask), forward="kv")
        if problem.kv_layout is not None and problem.backward == "auto":
            near = replace(near, backward="kv")  # of many keys, queries see few here: few are sent
        span_bytes = sys.maxsize if strategy == "all-gather" else problem.group_bytes
        return self.make_plan(problem, rank, choose(dense, near).plan(near, rank), span_bytes)
