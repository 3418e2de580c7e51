"""The learned bias as a call sees it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from ..base.arguments import check_like_lse, check_tensor, expand_rows
from ..sequence.mask import Mask
from ..strategies import Plan, Problem, choose
from ..strategies.extension import DenseCall, Extension, Tensors
from .kernels import TableKernel, pick
from .scores import Scores
from .scoring import TableScoring

# Results are kept, with all that they computed. So a loader can prepare them before the call.
stack_scores = functools.lru_cache(maxsize=64)(Scores.stacked)


@dataclass(frozen=True)
class Bias(Extension):
    """A row of a table added to the scores of each pair. The table is its only tensor.

    scores  one for the whole batch, or one for each of its rows
    kernel  computes pairs that do not share one row, once it is bound
    """

    scores: Scores | tuple[Scores, ...] | None
    kernel: TableKernel | None = None

    name = "a bias"
    brings = "scores"

    @property
    def mask(self) -> Mask:
        return self._scores.mask

    @property
    def _scores(self) -> Scores:
        assert isinstance(self.scores, Scores), "the scores of one sequence"
        return self.scores

    def check(self, tensors: Tensors, q: Tensor, k: Tensor) -> None:
        [bias] = tensors
        if (bias is None) != (self.scores is None):
            got = "scores" if bias is None else "a bias"
            raise ValueError(
                f"expected scores and bias together, got {got} alone: scores say which row of the "
                "bias each pair adds, as Scores.by_distance(mask, distances) does"
            )
        check_tensor("bias", bias)
        heads = q.shape[-2]
        if bias.dim() != 2 or bias.shape[1] != heads:
            raise ValueError(f"bias must be (rows, {heads} heads), got shape {tuple(bias.shape)}")

    def of_rows(self, batch: int) -> Sequence[Self]:
        hint = ": make them of a mask, such as Scores.by_distance(mask, distances)"
        rows = expand_rows("scores", self.scores, (Scores,), batch, hint=hint)
        return tuple(replace(self, scores=scores) for scores in rows)

    @classmethod
    def join(cls, rows: Sequence[Self]) -> Self:
        return replace(rows[0], scores=stack_scores(tuple(row._scores for row in rows)))

    def bind(self, tensors: Tensors, call: DenseCall) -> Self:
        [bias] = tensors
        check_like_lse("bias", bias, call.q)
        if call.spec.softcap is not None:
            raise ValueError(
                "expected softcap or a bias, got both: no kernel caps scores with a bias"
            )
        if (needed := self._scores.num_rows) > len(bias):
            raise ValueError(f"bias must have {needed} rows, as scores need, got {len(bias)}")
        return replace(self, kernel=pick(call.kernel, call.q, call.k, call.spec))

    def terms(self, tensors: Tensors) -> dict[str, Any]:
        assert self.kernel, "the extension is bound"
        return {
            "scores": self._scores.digest,
            "bias rows": len(tensors[0]),
            "the kernel of the bias": self.kernel.name,
        }

    def plan(self, problem: Problem, rank: int, strategy: str) -> Plan:
        assert self.kernel, "the extension is bound"
        problem = replace(problem, scoring=TableScoring(self._scores, self.kernel))
        return choose(strategy, problem).plan(problem, rank)
