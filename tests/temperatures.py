"""A third extension, through the seam that the learned bias and sparse attention use."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bmt_burst.strategies import Plan, Problem, Scoring, choose
from bmt_burst.strategies.compute import Attention, AttentionGradient
from bmt_burst.strategies.extension import Extension


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
