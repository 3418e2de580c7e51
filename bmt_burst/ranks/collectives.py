"""Tensors that ranks join or add up, with gradients: see `SequenceParallel.unshard`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base.autograd import check_first_derivative, check_transforms
from ..base.compiled import not_compiled
from ..base.policies import without_policies
from ..sequence.layout import Layout
from .agreement import Terms, run_agreed
from .rings import Rings, check_device


@dataclass(frozen=True)
class Join:
    """The whole of all ranks' shards along a dimension, for the function `name`."""

    layout: Layout
    dim: int
    name: str = "unshard"

    def terms(self, rings: Rings, x: Tensor) -> dict[str, Any]:
        """Return what is equal on all ranks. Raises ValueError if x has not this rank's tokens."""
        expected, tokens = self._shape_with(x, self.layout.length(rings.rank)), self.layout.seq_len
        if x.shape != expected:
            here = f"rank {rings.rank}'s x, of {tokens} tokens along {self.dim}"
            raise ValueError(f"expected {here}, to be {[*expected]}, got {[*x.shape]}")
        shape = [*self._shape_with(x, tokens)]
        return {"dim": self.dim, "seq_len": tokens, "layout": self.layout, "shape": shape}

    def forward(self, rings: Rings, x: Tensor) -> Tensor:
        shapes = [self._shape_with(x, self.layout.length(rank)) for rank in range(rings.size)]
        return self.layout.unshard(rings.gather_tensors(_dense(x), shapes), self.dim)

    def backward(self, rings: Rings, dout: Tensor) -> Tensor:
        parts = [_dense(self.layout.shard(dout, r, self.dim)) for r in range(rings.size)]
        return rings.sum_for_each(parts).to(dout.dtype)

    def _shape_with(self, x: Tensor, tokens: int) -> torch.Size:
        return torch.Size((*x.shape[: self.dim], tokens, *x.shape[self.dim + 1 :]))


@dataclass(frozen=True)
class RankSum:
    """The sum over ranks, `SequenceParallel.sum`. Integers and bools are added up as int64."""

    name: ClassVar[str] = "sum"

    def terms(self, rings: Rings, x: Tensor) -> dict[str, Any]:
        return {"shape": [*x.shape]}

    def forward(self, rings: Rings, x: Tensor) -> Tensor:
        has_fractions = x.is_floating_point() or x.is_complex()
        x = x if has_fractions else x.long()
        parts = _dense(x).reshape(-1).tensor_split(rings.size)
        mine = rings.sum_for_each(parts).to(x.dtype)
        sums = rings.gather_tensors(mine, [part.shape for part in parts])
        whole = mine.new_empty(x.shape)  # autograd refuses to change a view of the result in place
        torch.cat(sums, out=whole.view(-1))
        return whole

    def backward(self, rings: Rings, dout: Tensor) -> Tensor:
        return self.forward(rings, dout)


def apply_together(
    rings: Rings, name: str, check: Callable[[], tuple[Tensor, Join | RankSum]]
) -> Tensor:
    """Return the result of a collective that `check` returns, once all ranks agree on the call."""
    doing = f"a call of {name}"

    def check_terms() -> tuple[Terms, tuple[Tensor, Join | RankSum]]:
        x, collective = check()
        check_transforms(name, x)
        check_device(rings, x)
        recorded = torch.is_grad_enabled() and x.requires_grad
        shared = {"dtype": str(x.dtype), "recording of gradients": recorded}
        shared |= collective.terms(rings, x)
        return Terms(doing, shared, of=f" of {name}"), (x, collective)

    def run(given: tuple[Tensor, Join | RankSum], _: Sequence[bytes]) -> Tensor:
        x, collective = given
        for ring in rings.shared:
            ring.connect(x.device)
        result: Tensor = _OverRanks.apply(x, rings, collective, rings.history.calls)
        return result

    with without_policies():
        return run_agreed(rings, doing, check_terms, run, counts=True)


class _OverRanks(torch.autograd.Function):
    """A collective of the call with this number, differentiable once in x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rings: Rings, collective: Join | RankSum, number: int
    ) -> Tensor:
        ctx.rings, ctx.collective, ctx.number = rings, collective, number
        return collective.forward(rings, x)

    @staticmethod
    @not_compiled  # not by compiled autograd either
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of forward's arguments, once all ranks are in this backward."""
        rings: Rings = ctx.rings
        collective: Join | RankSum = ctx.collective
        name = collective.name
        doing = f"the backward of call {ctx.number}, of {name}"

        def begin() -> tuple[Terms, None]:
            check_first_derivative(name)
            check_transforms(f"the backward of {name}", dout)
            return Terms(doing), None

        dx = run_agreed(rings, doing, begin, lambda *_: collective.backward(rings, dout))
        return dx, None, None, None


def _dense(x: Tensor) -> Tensor:
    """Return x without views that its memory does not show."""
    return x.resolve_conj().resolve_neg().contiguous()
