"""Sparse attention as a call sees it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor
from torch.nn import functional

from ..base.arguments import DTYPES, check_tensor
from ..base.kept import is_recomputing
from ..sequence.mask import Mask
from ..strategies import Plan, Problem, choose
from ..strategies.extension import DenseCall, Extension, Tensors
from .choice import find_fault
from .config import InfLLMV2, check_layer
from .memory import SparseMemory
from .plan import SparsePlan
from .queries import find_longest, near_mask


@dataclass(frozen=True)
class Sparse(Extension):
    """A choice of blocks by the data, with `use_nope` by its tensors: queries and keys."""

    config: InfLLMV2 | None

    name = "sparse attention"
    takes_two_lengths = True
    memory = SparseMemory

    def check(self, tensors: Tensors, q: Tensor, k: Tensor) -> None:
        check_layer(self.config)
        _check_choose_by(tensors, q, k)
        if bool(tensors) != (self.config is not None and self.config.use_nope):
            got = f"choose_by and sparse={self.config}" if tensors else f"{self.config} alone"
            raise ValueError(f"expected choose_by together with use_nope=True, got {got}")

    def prepare(self, tensors: Tensors, q: Tensor) -> Tensors:
        found = (x.detach() if x.dim() == 4 else x.detach().unsqueeze(0) for x in tensors)
        return tuple(functional.pad(x.to(q.dtype), (0, q.shape[-1] - x.shape[-1])) for x in found)

    def join_rows(self, tensors: Tensors) -> Tensors:
        return tuple(x.flatten(0, 1).unsqueeze(0) for x in tensors)

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

    def in_chunks(self, masks: Sequence[Mask]) -> Self | None:
        assert self.config, "a layer's extension has constants"
        if masks and self.config.is_dense(max(map(find_longest, masks))):
            return None
        return replace(self, config=replace(self.config, dense_len=-1))

    def terms(self, tensors: Tensors) -> dict[str, Any]:
        return {"sparse": str(self.config), "kept choices": is_recomputing()}

    def plan(self, problem: Problem, rank: int, strategy: str) -> Plan:
        assert self.config, "a checked extension has constants"
        longest = find_longest(problem.mask)
        if self.config.is_dense(longest) or longest <= self.config.exact_tokens:
            plan = super().plan(problem, rank, strategy)
            plan.takes_inputs = False  # it has no use for what blocks are chosen by
            return plan
        # sparse sequences are long, and so "auto" takes the ring for what is near
        dense = "ring" if strategy == "auto" else strategy
        near = replace(problem, mask=near_mask(problem.mask, self.config), forward="kv")
        if problem.kv_layout is not None and problem.backward == "auto":
            near = replace(near, backward="kv")  # of many keys, queries see few here: few are sent
        span_bytes = sys.maxsize if strategy == "all-gather" else problem.group_bytes
        plan = choose(dense, near).plan(near, rank)
        return SparsePlan(problem, self.config, rank, plan, span_bytes)


def _check_choose_by(tensors: Tensors, q: Tensor, k: Tensor) -> None:
    if not tensors:
        return
    if len(tensors) != 2:
        raise TypeError(f"choose_by must be a pair of queries and keys, got {len(tensors)} items")
    for name, x, like in zip(("queries", "keys"), tensors, (q, k), strict=True):
        check_tensor(f"{name} of choose_by", x)
        if x.shape != like.shape or x.device != like.device:
            raise ValueError(
                f"expected {name} of choose_by of shape {tuple(like.shape)} on {like.device}, "
                f"got {tuple(x.shape)} on {x.device}"
            )
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} of choose_by must be floating point, got {x.dtype}")
