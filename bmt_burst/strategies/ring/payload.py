"""Payloads: the tensors that are sent around the ring, and the results that are returned.

    KeysValues     k and v. A backward returns dk and dv.
    QueriesOnly    q of a forward. It returns out in q's dtype, and lse.
    QueriesDelta   q, dout, and lse and delta = rowsum(out * dout) side by side. It returns dq
                   (arXiv 2403.09347).

All these tensors are (B, S, heads, ...).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...base.dtypes import accumulator_dtype
from ...merging.merge import stack_lse_delta
from ...transport.packing import Packing
from .. import DENSE, Problem, Sizes
from ..compute import Keys, Queries, QueryGradients, Side, Tensors


class Payload(ABC):
    """The tensors of a block that are sent, in a forward or a backward.

    sends_queries  whether keys stay; otherwise queries stay
    returns        whether results are returned: gradients, or out and lse
    """

    sends_queries: bool = True
    returns: bool = True

    @abstractmethod
    def packings(self, sizes: Sizes) -> tuple[Packing, Packing]:
        """Return how blocks lie in memory when they are sent, and results when they return."""

    @abstractmethod
    def depart(self, block: Any) -> Tensors:
        """Return the tensors of a block of the sent side, contiguous."""

    @abstractmethod
    def arrive(self, tensors: Sequence[Tensor]) -> Side:
        """Return the block from the tensors of `depart`."""

    def most_tokens(self, problem: Problem) -> int:
        return problem.most_queries if self.sends_queries else problem.most_keys

    def most_bytes(self, problem: Problem) -> int:
        """Count the bytes of the longest shard, there and back."""
        there, back = self.packings(problem.sizes)
        return (there.token_bytes() + back.token_bytes()) * self.most_tokens(problem)


class KeysValues(Payload):
    sends_queries = False

    def __init__(self, returns: bool = True):
        self.returns = returns

    def depart(self, block: Keys) -> Tensors:
        return block.k.contiguous(), block.v.contiguous()

    def arrive(self, tensors: Sequence[Tensor]) -> Keys:
        return Keys(*tensors)

    def packings(self, sizes: Sizes) -> tuple[Packing, Packing]:
        shape = sizes.kv_heads, sizes.head_size
        gradients = ((shape, sizes.partial),) * 2 if self.returns else ()
        return Packing(sizes.batch, ((shape, sizes.dtype),) * 2), Packing(sizes.batch, gradients)


class QueriesOnly(Payload):
    def depart(self, block: Queries) -> Tensors:
        return (block.q.contiguous(),)

    def arrive(self, tensors: Sequence[Tensor]) -> Queries:
        return Queries(*tensors)

    def packings(self, sizes: Sizes) -> tuple[Packing, Packing]:
        row = (sizes.heads, sizes.head_size), sizes.dtype
        lse = (sizes.heads,), accumulator_dtype(sizes.dtype)
        return Packing(sizes.batch, (row,)), Packing(sizes.batch, (row, lse))


class QueriesDelta(Payload):
    def depart(self, block: QueryGradients) -> Tensors:
        if block.delta is not None:
            rows = torch.stack((block.lse, block.delta), -1).transpose(1, 2).contiguous()
        else:
            assert block.out is not None, "a block has out or delta"
            rows = stack_lse_delta(block.out, block.dout, block.lse)
        return block.q.contiguous(), block.dout.contiguous(), rows

    def arrive(self, tensors: Sequence[Tensor]) -> QueryGradients:
        q, dout, rows = tensors
        lse, delta = (x.transpose(1, 2).contiguous() for x in rows.unbind(-1))
        return QueryGradients(q, dout, lse, delta=delta)

    def packings(self, sizes: Sizes) -> tuple[Packing, Packing]:
        shape = sizes.heads, sizes.head_size
        row, gradient = (shape, sizes.dtype), (shape, sizes.partial)
        lse_delta = (sizes.heads, 2), accumulator_dtype(sizes.dtype)
        return Packing(sizes.batch, (row, row, lse_delta)), Packing(sizes.batch, (gradient,))


def forward_payload(problem: Problem) -> Payload:
    """Return the payload of a problem's forward. "auto" picks the one with fewer bytes if keys are
    other tokens than queries, for dense attention. Otherwise it is k and v.
    """
    takes_both = problem.kv_layout is not None and problem.scoring is DENSE
    side = "kv" if problem.forward == "auto" and not takes_both else problem.forward
    return _by_bytes(problem, side, {"kv": KeysValues(returns=False), "q": QueriesOnly()})[0]


def backward_payloads(problem: Problem) -> list[Payload]:
    """Return the payloads between which the mask may choose, in a problem's backward. "auto" has
    the one with the fewest bytes, and if other ranks have tokens and keys are the same tokens as
    queries, also those with less than twice as many.
    """
    found = _by_bytes(problem, problem.backward, {"q": QueriesDelta(), "kv": KeysValues()})
    least = found[0].most_bytes(problem)
    others = found[1:] if problem.kv_layout is None and problem.layout.size > 1 else []
    return [found[0], *(each for each in others if each.most_bytes(problem) < 2 * least)]


def _by_bytes(problem: Problem, side: str, choices: dict[str, Payload]) -> list[Payload]:
    """Return the payload of a side, or for "auto" all of them, those with fewer bytes first."""
    if side != "auto":
        return [choices[side]]
    return sorted(choices.values(), key=lambda payload: payload.most_bytes(problem))


def select_heads(sizes: Sizes, kv_heads: int) -> Sizes:
    """Return the sizes of some kv heads and their query heads."""
    return replace(sizes, heads=sizes.heads // sizes.kv_heads * kv_heads, kv_heads=kv_heads)
