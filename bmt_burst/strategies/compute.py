"""The computations that strategies share: kernel calls on tokens of queries and of keys.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ..base.ranges import in_range
from ..kernels import Kernel
from ..merging.merge import stack_lse_delta
from ..merging.parts import GradientPart, OutputPart
from ..sequence.gathered_calls import GatheredCall
from ..sequence.span import Span, length
from ..spec import Spec

Tensors = tuple[Tensor, ...]
ALL = slice(None)  # all tokens, or all heads
_ROWS = ("lse", "delta")  # tensors (B, heads, S)


class Side:
    """Tensors of some tokens: of queries or of keys. The first one is (B, S, heads, D)."""

    def part(self, tokens: slice, heads: slice = ALL) -> Self:
        """Return views of some tokens and heads."""
        if tokens == heads == ALL:
            return self
        return self._map(lambda x, dim: x[:, tokens, heads] if dim == 1 else x[:, heads, tokens])

    def gather(self, spans: Sequence[Span]) -> Self:
        """Return the tokens of rising spans, one after the other, a view for a single span."""
        if len(spans) == 1:
            first: Tensor = next(iter(vars(self).values()))
            is_all = spans[0] == (0, first.shape[1])
            return self if is_all else self.part(slice(*spans[0]))
        return self._map(
            lambda x, dim: torch.cat([x.narrow(dim, at[0], length(at)) for at in spans], dim)
        )

    def _map(self, change: Callable[[Tensor, int], Tensor]) -> Self:
        """Change each tensor, given the dimension of its tokens."""
        found = {}
        for name, x in vars(self).items():
            if x is not None:
                found[name] = change(x, 2 if name in _ROWS else 1)
        return type(self)(**found)


@dataclass(frozen=True)
class Queries(Side):
    """The query side of a forward: q (B, S, H, D)."""

    q: Tensor


@dataclass(frozen=True)
class QueryGradients(Queries):
    """The query side of a backward: q, dout (B, S, H, D), lse (B, H, S), and either out or delta.

    delta (B, H, S) is rowsum(out * dout).
    """

    dout: Tensor
    lse: Tensor
    out: Tensor | None = None
    delta: Tensor | None = None

    def with_delta(self) -> QueryGradients:
        """Return the same queries with delta instead of out."""
        if self.out is None:
            return self
        delta = stack_lse_delta(self.out, self.dout, self.lse)[..., 1].transpose(1, 2)
        return replace(self, out=None, delta=delta.contiguous())


@dataclass(frozen=True)
class Keys(Side):
    """The key side: k and v (B, S, G, D).

    dk, dv  sums of gradients in the accumulator's dtype, if any. A backward adds to them, and
            returns them.
    """

    k: Tensor
    v: Tensor
    dk: Tensor | None = None
    dv: Tensor | None = None


@dataclass(frozen=True)
class Attention:
    """The forward of kernel calls.

    kept               what the backward will need besides inputs and results
    writes_new_memory  whether all kernels return new memory
    """

    kernel: Kernel
    spec: Spec

    @property
    def kept(self) -> Tensors:
        return ()

    @property
    def writes_new_memory(self) -> bool:
        return self.kernel.writes_new_memory

    def of_heads(self, heads: slice) -> Self:
        """Return the attention of some query heads."""
        return self

    def is_complete(self, gathered: GatheredCall) -> bool:
        """Whether the out of a call needs no merge if the call has all pairs of its queries."""
        return True

    def forward(
        self, queries: Queries, keys: Keys, gathered: GatheredCall
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of one call. `queries` and `keys` are its gathered tokens."""
        return self.kernel.forward(queries.q, keys.k, keys.v, gathered.call, self.spec)

    def compute(
        self, calls: Sequence[GatheredCall], queries: Queries, keys: Keys
    ) -> Iterator[tuple[OutputPart]]:
        """Yield the queries, out and lse of each call, as a single partial result."""
        for gathered in calls:
            rows, columns = gathered.q_spans, gathered.kv_spans
            here, there = queries.gather(rows), keys.gather(columns)
            out, lse = in_range("kernel", self.forward, here, there, gathered)
            yield ((rows, out, lse),)


@dataclass(frozen=True)
class AttentionGradient:
    """The backward of kernel calls.

    gradients  those of the scoring's inputs, once all calls are computed
    """

    kernel: Kernel
    spec: Spec

    @property
    def gradients(self) -> Tensors:
        return ()

    def of_heads(self, heads: slice) -> Self:
        """Return the gradient of some query heads."""
        return self

    def backward(
        self, queries: QueryGradients, keys: Keys, gathered: GatheredCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of one call. `queries` and `keys` are its gathered tokens."""
        inputs = queries.dout, queries.q, keys.k, keys.v
        softmax = queries.out, queries.lse, queries.delta
        return self.kernel.backward(*inputs, *softmax, gathered.call, self.spec)

    def compute(
        self, calls: Sequence[GatheredCall], queries: QueryGradients, keys: Keys
    ) -> Iterator[tuple[GradientPart, ...]]:
        """Yield the partial dq, dk and dv of each call, with their tokens."""
        for gathered in calls:
            rows, columns = gathered.q_spans, gathered.kv_spans
            here, there = queries.gather(rows), keys.gather(columns)
            dq, dk, dv = in_range("kernel", self.backward, here, there, gathered)
            yield (rows, dq), (columns, dk), (columns, dv)
