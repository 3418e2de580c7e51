"""The problem that a strategy solves: a call of attention, as its ranks agreed on it.

`Scoring` says how the pairs of a call are computed. An extension that computes them in another way,
or adds something to their scores, is a subclass of it, and of `Attention` and `AttentionGradient`.
Strategies, programs and executions treat all of them equally.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import Kernel
from ..sequence.gathered_calls import GatheredCall
from ..sequence.layout import Layout
from ..sequence.mask import Mask
from ..spec import Spec
from .compute import Attention, AttentionGradient, QueryGradients, Tensors

GROUP_BYTES = 5 << 26  # by default


class Part(NamedTuple):
    """Some of the visible pairs. Kernel calls have the pairs of one part.

    label      tells a `Scoring` which part it is; strategies do not read it
    most_gaps  as `kernel_calls` takes it
    """

    mask: Mask
    label: Any = None
    most_gaps: float = 0.0


class Scoring:
    """The computation of a call's pairs: that of the problem's kernel. Extensions subclass it.

    A scoring is immutable and hashable, and equal on all ranks. Its `inputs` are tensors besides q,
    k and v that all ranks have, which it may find gradients for.

    name           what messages call it
    prefers_delta  whether a backward should compute delta first
    host_work      how many times the host's work of dense attention calls need: short ones are not
                   worth being cut further
    """

    name: str = "dense attention"
    prefers_delta: bool = False
    host_work: int = 1

    def parts(self, problem: Problem) -> tuple[Part, ...]:
        """Return the visible pairs in parts, disjoint and complete."""
        return (Part(problem.mask),)

    def refine(
        self, calls: list[GatheredCall], sides: Callable[[], tuple[Tensor, Tensor]]
    ) -> list[GatheredCall]:
        """Return the calls, with labels that may tell more.

        sides  returns the positions of queries (S,) and of keys (T,), as they lie in memory
        """
        return calls

    def select_heads(self, inputs: Tensors, heads: slice) -> Tensors:
        """Return views of the inputs, or of their gradients, for some query heads."""
        return inputs

    def forward(self, problem: Problem, q: Tensor, inputs: Tensors) -> Attention:
        """Begin a forward with queries q (B, S, H, D)."""
        return Attention(problem.kernel, problem.spec)

    def backward(
        self, problem: Problem, queries: QueryGradients, inputs: Tensors, kept: Tensors
    ) -> AttentionGradient:
        """Begin a backward. `kept` are the `Attention.kept` of its forward."""
        return AttentionGradient(problem.kernel, problem.spec)


DENSE = Scoring()


@dataclass(frozen=True)
class Sizes:
    """The sizes and dtypes of q (B, S, H, D) and k, v (B, T, G, D).

    `partial` is the dtype of the kernel's gradients.
    """

    batch: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    partial: torch.dtype


@dataclass(frozen=True)
class Problem:
    """A call of attention as the ranks agreed on it. It is identical on all ranks.

    layout         that of the queries
    inner, outer   the number of ranks of a host, and of hosts
    forward        the side that a ring's forward sends: "q", "kv" or "auto"
    backward       the side that its backward sends
    group_bytes    the most bytes of a ring's blocks in one stage, unless a single block is larger
    scoring        how pairs are computed: by the kernel, unless an extension computes them
    kv_layout      the layout of the keys, or None if keys are the same tokens as queries
    """

    mask: Mask
    layout: Layout
    spec: Spec
    kernel: Kernel
    sizes: Sizes
    inner: int
    outer: int
    forward: str = "auto"
    backward: str = "auto"
    group_bytes: int = GROUP_BYTES
    scoring: Scoring = DENSE
    kv_layout: Layout | None = None

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The visible pairs in parts, which kernel calls do not mix."""
        return self.scoring.parts(self)

    @functools.cached_property
    def most_queries(self) -> int:
        """The number of queries of the longest shard."""
        return max(map(self.layout.length, range(self.layout.size)))

    @functools.cached_property
    def most_keys(self) -> int:
        """The number of keys of the longest shard."""
        layout = self.kv_layout
        return self.most_queries if layout is None else max(map(layout.length, range(layout.size)))
