"""The forward of a program: it merges partial outputs, and returns those of queries that were sent.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size. All that is sent is
(B, S, heads, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...merging.merge import Outputs, empty_lse, merge_parts
from ...merging.parts import OutputPart, is_whole
from ...ranks.rings import Rings
from ...sequence.gathered_calls import GatheredCall
from ...sequence.span import Span
from ...transport.packing import Packing
from ..compute import ALL, Keys, Queries, Tensors, compute_outputs
from .events import Event
from .execution import Execution, add_parts
from .program import Program

# Partial outputs are read again each time they are folded, and hold memory until then. So this many
# times group_bytes of them may wait.
_OUTPUTS_WAITING = 4


class Forward(Execution):
    """The forward. It merges partial outputs of the own queries. If queries are sent, partial
    outputs are returned, and their owner merges them.

    out, lse  the results, from the event `own` on
    parts     the partial outputs of the own block
    """

    out: Tensor
    lse: Tensor

    def __init__(
        self, program: Program, rings: Rings, queries: Queries, keys: Keys, inputs: Tensors
    ):
        super().__init__(program, rings, queries, keys)
        self.attention = program.problem.scoring.forward(program.problem, queries.q, inputs)
        self.parts: list[OutputPart] = []

    def result(self) -> tuple[Tensor, Tensor, Tensors]:
        """Run. Return out (B, S, H, D), lse (B, H, S) and what the scoring keeps."""
        self.run()
        return self.out, self.lse, self.attention.kept

    def _own(self, event: Event) -> None:
        q = self.queries.q
        found = compute_outputs(self.attention, self.program.own, self.queries, self.keys)
        self.parts = list(found)
        # The kernel's out becomes the result's memory if it is the only part, and if nobody else
        # relies on it: stages are merged into it.
        if (
            is_whole(self.parts, q.shape[1])
            and self.attention.is_complete(self.program.own[0])
            and self.parts[0][1].dtype == q.dtype
            and (self.attention.writes_new_memory or not self.program.passes)
        ):
            _, self.out, self.lse = self.parts[0]
            if self.program.passes:
                self.lse = self.lse.clone()
            return
        self.out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.lse = empty_lse(q)
        if not self.program.passes:
            self._merge_from_own(ALL).result()

    def _begin(self, event: Event) -> None:
        self.sums[event.number] = [self._merge_from_own(self._pass(event).q)]

    def _compute_calls(
        self, event: Event, calls: Sequence[GatheredCall], queries: Any, keys: Keys
    ) -> None:
        attention = self.attention.of_heads(self._pass(event).q)
        for part in compute_outputs(attention, calls, queries, keys):
            if self.program.payload.sends_queries:
                self._add_computed(event, [part])
            else:
                add_parts(self.sums[event.number], [part])

    def _sum_computed(self, span: Span, packing: Packing) -> Tensors:
        [parts], (row, *_) = self.computed, packing.entries
        out, lse = merge_parts(parts, span, packing.batch, *row, self.device)
        return out, lse.transpose(1, 2)

    def _share(self, sums: list[Outputs]) -> Tensors:
        [merged] = sums
        merged.result()
        return merged.out, merged.lse.transpose(1, 2).contiguous()

    def _parts_of(self, spans: Sequence[Span], results: Sequence[Tensor]) -> list[OutputPart]:
        out, lse = results
        return [(spans, out, lse.transpose(1, 2))]

    def _complete(self, sums: list[Outputs]) -> None:
        [merged], q = sums, self.queries.q
        is_only = is_whole(merged.parts, q.shape[1]) and merged.parts[0][1].dtype == q.dtype
        if self.program.has_one_stage and is_only:
            _, self.out, self.lse = merged.parts[0]
        else:
            merged.result()

    def _merge_from_own(self, heads: slice) -> Outputs:
        """Begin the sum of some heads with the own block's share."""
        out, lse, parts = self.out, self.lse, self.parts
        if heads != ALL:
            out, lse = out[:, :, heads], lse[:, heads]
            parts = [(spans, x[:, :, heads], x_lse[:, heads]) for spans, x, x_lse in parts]
        limit = _OUTPUTS_WAITING * self.program.problem.group_bytes
        return Outputs(out, lse, limit, parts)
