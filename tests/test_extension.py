"""A third extension, through the seam that the learned bias and sparse attention use."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bmt_burst import Layout, Mask, simulate
from bmt_burst.calls.softmax import SoftmaxAttention, attend
from bmt_burst.ranks.rings import make_rings
from bmt_burst.ranks.sequence_parallel import WholeSequence
from bmt_burst.strategies import Plan, Problem, Scoring, choose
from bmt_burst.strategies.compute import Attention, AttentionGradient
from bmt_burst.strategies.extension import Extension
from tests.cases import random_qkv
from tests.reference import dense_results, relative_error
from tests.rings import ring_arguments


class Temperatures(Scoring):
    """Scores times a learned number for each head. The input is (H,)."""

    name = "temperatures"

    def select_heads(self, inputs, heads):
        return tuple(x[heads] for x in inputs)

    def forward(self, problem, q, inputs):
        return Warmed(problem.kernel, problem.spec, *inputs)

    def backward(self, problem, queries, inputs, kept):
        [factors] = inputs
        return WarmedGradient(problem.kernel, problem.spec, factors, torch.zeros_like(factors))


@dataclass(frozen=True)
class Warmed(Attention):
    factors: Tensor

    def of_heads(self, heads):
        return replace(self, factors=self.factors[heads])

    def forward(self, queries, keys, gathered):
        warm = replace(queries, q=queries.q * self.factors.unsqueeze(1))
        return super().forward(warm, keys, gathered)


@dataclass(frozen=True)
class WarmedGradient(AttentionGradient):
    factors: Tensor
    gradient: Tensor

    @property
    def gradients(self):
        return (self.gradient,)

    def of_heads(self, heads):
        return replace(self, factors=self.factors[heads], gradient=self.gradient[heads])

    def backward(self, queries, keys, gathered):
        warm = replace(queries, q=queries.q * self.factors.unsqueeze(1))
        dq, dk, dv = super().backward(warm, keys, gathered)
        self.gradient.add_((dq * queries.q).sum((0, 1, 3)))
        return dq * self.factors.unsqueeze(1), dk, dv


@dataclass(frozen=True)
class Warm(Extension):
    """The extension as a call sees it."""

    name = "temperatures"

    def check(self, tensors, q, k):
        if tensors[0].shape != q.shape[2:3]:
            raise ValueError(f"expected {q.shape[2]} temperatures, got {tuple(tensors[0].shape)}")

    def bind(self, tensors, call):
        return self

    def terms(self, tensors):
        return {"temperatures": len(tensors[0])}

    def plan(self, problem: Problem, rank: int, strategy: str) -> Plan:
        problem = replace(problem, scoring=Temperatures())
        return choose(strategy, problem).plan(problem, rank)


def kind(strategy: str, extension: Extension | None = None) -> SoftmaxAttention:
    return SoftmaxAttention(0.3, "reference", strategy=strategy, group_bytes=0, extension=extension)


@pytest.mark.parametrize(
    ("strategy", "size", "inner"),
    [("ring", 1, 1), ("ring", 3, 3), ("ring", 4, 2), ("ulysses", 3, 3), ("usp", 4, 2)],
)
def test_it_computes_over_ranks(strategy, size, inner):
    mask = Mask.documents((0, 9, 30))
    layout, tensors = Layout.balanced(mask, size), random_qkv(1, 30, 4, 2, 8)
    factors = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5

    def work(ring):
        own = [layout.shard(x, ring.rank).requires_grad_() for x in tensors[:3]]
        mine, groups = factors.clone().requires_grad_(), ring_arguments(ring, inner)
        rings = make_rings(groups.get("process_group"), groups.get("double_group", (None, None)))
        sequence = WholeSequence.local(mask, layout)
        out, _ = attend(rings, sequence, kind(strategy, Warm()), *own, (None, mine))
        out.backward(layout.shard(tensors[3], ring.rank))
        return out.detach(), *(x.grad for x in own), mine.grad

    results = simulate(size, work)
    got = [layout.unshard([r[i] for r in results]) for i in range(4)]
    warmed = [tensors[0] * factors.unsqueeze(1), *tensors[1:]]
    out, _, dq, dk, dv = dense_results(mask, warmed, 0.3)
    expected = out, dq * factors.unsqueeze(1), dk, dv
    for mine, exact in zip(got, expected, strict=True):
        assert relative_error(mine, exact) < 1e-12
    of_factors = (dq * tensors[0]).sum((0, 1, 3))
    assert relative_error(sum(r[4] for r in results), of_factors) < 1e-12


def test_ranks_compare_its_terms_and_share_its_errors():
    layout = Layout.zigzag(12, 2)
    q, k, v, _ = (layout.shard(x, 0) for x in random_qkv(1, 12, 2, 2, 8))

    def work(ring, counts, message):
        factors = torch.ones(counts[ring.rank], dtype=torch.float64)
        extended = kind("ring", Warm() if len(factors) else None)
        sequence = WholeSequence.local(Mask.causal(12), layout)
        others = (None, factors) if len(factors) else ()
        with pytest.raises(ValueError, match=message):
            attend(make_rings(ring, (None, None)), sequence, extended, q, k, v, others)

    simulate(2, lambda ring: work(ring, (2, 0), "ranks differ in temperatures"))
    simulate(2, lambda ring: work(ring, (2, 3), "expected 2 temperatures, got"))
