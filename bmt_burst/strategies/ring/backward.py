"""The backward of a program: it adds up gradients, and returns those of tokens that were sent.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size. All that is sent is
(B, S, heads, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...merging.merge import Gradients, sum_parts
from ...merging.parts import Part, is_whole
from ...ranks.rings import Rings
from ...sequence.gathered_calls import GatheredCall
from ...sequence.span import Span
from ...transport.packing import Packing
from ..compute import ALL, Keys, QueryGradients, Tensors, compute_gradients
from .events import Event
from .execution import Execution, add_parts
from .program import Program

# Partial gradients may hold this many times group_bytes before they are added up (compare
# forward.py). Memory is short in the backward, and its kernels take longer.
_GRADIENTS_WAITING = 1.25


class Backward(Execution):
    """The backward. It adds up the gradients of the side that stays. Gradients of the side that is
    sent are returned, and their owner adds them up.

    own_parts      partial dq, dk and dv of the own block
    grads          dq, dk and dv, from the event `own` on
    sent, staying  which of dq, dk and dv are those of each side
    """

    queries: QueryGradients

    def __init__(
        self,
        program: Program,
        rings: Rings,
        queries: QueryGradients,
        keys: Keys,
        inputs: Tensors,
        kept: Tensors,
    ):
        problem, sends_queries = program.problem, program.payload.sends_queries
        if problem.scoring.prefers_delta:
            queries = queries.with_delta()  # then calls need not gather out
        super().__init__(program, rings, queries, keys)
        self.attention = problem.scoring.backward(problem, queries, inputs, kept)
        of_queries, of_keys = slice(0, 1), slice(1, 3)  # of dq, dk and dv
        self.sent, self.staying = (of_queries, of_keys) if sends_queries else (of_keys, of_queries)
        self.limit = int(_GRADIENTS_WAITING * problem.group_bytes)
        self.own_parts: tuple[list[Part], ...] = ([], [], [])
        self.grads: list[Tensor] = []

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensors]:
        """Run. Return dq, dk and dv in the inputs' dtype, or the sums that the keys have, and this
        rank's shares of the gradients of the scoring's inputs.
        """
        self.run()
        dq, dk, dv = self.grads
        return dq, dk, dv, self.attention.gradients

    def _own(self, event: Event) -> None:
        for found in compute_gradients(self.attention, self.program.own, self.queries, self.keys):
            for parts, part in zip(self.own_parts, found, strict=True):
                parts.append(part)
        inputs = self.queries.q, self.keys.k, self.keys.v
        sums = None, self.keys.dk, self.keys.dv
        for parts, x, earlier in zip(self.own_parts, inputs, sums, strict=True):
            if earlier is not None:
                parts.insert(0, ([(0, x.shape[1])], earlier))
                self.grads.append(earlier)
                continue
            whole = is_whole(parts, x.shape[1])
            self.grads.append(
                parts[0][1].to(x.dtype).contiguous() if whole else x.new_empty(x.shape)
            )
        if not self.program.passes:
            for total in self._sum_from_own(ALL, ALL):
                total.result()

    def _begin(self, event: Event) -> None:
        pass_ = self._pass(event)
        self.sums[event.number] = self._sum_from_own(pass_.q, pass_.kv)

    def _sum_from_own(self, q_heads: slice, kv_heads: slice) -> list[Gradients]:
        """Begin the sums of some heads with the own block's share."""
        sums = []
        for own, grad, heads in zip(
            self.own_parts, self.grads, (q_heads, kv_heads, kv_heads), strict=True
        ):
            if heads != ALL:
                grad = grad[:, :, heads]
                own = [(spans, part[:, :, heads]) for spans, part in own]
            # Without partial results of the own block, a single dq may be the result itself. Not so
            # dk and dv: their parts lie in memory that is received into.
            is_free = self.program.has_one_stage and grad is self.grads[0]
            into = None if is_free else grad
            sums.append(Gradients(grad.shape, grad.dtype, grad.device, self.limit, into, own))
        return sums

    def _compute_calls(
        self, event: Event, calls: Sequence[GatheredCall], queries: Any, keys: Keys
    ) -> None:
        attention = self.attention.of_heads(self._pass(event).q)
        for found in compute_gradients(attention, calls, queries, keys):
            add_parts(self.sums[event.number][self.staying], found[self.staying])
            self._add_computed(event, found[self.sent])

    def _sum_computed(self, span: Span, packing: Packing) -> list[Tensor]:
        return [
            sum_parts(parts, span, packing.batch, *row, self.device)
            for parts, row in zip(self.computed, packing.entries, strict=True)
        ]

    def _share(self, sums: list[Gradients]) -> Tensors:
        return tuple(total.result(self.program.problem.sizes.partial) for total in sums)

    def _parts_of(self, spans: Sequence[Span], results: Sequence[Tensor]) -> list[Part]:
        return [(spans, grad) for grad in results]

    def _complete(self, sums: list[Gradients]) -> None:
        grads = [total.result() for total in sums]
        if self.program.has_one_stage:
            self.grads = grads
