"""The forward of a program: it merges partial outputs of the own queries.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size. All that is sent is
(B, S, heads, ...).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...merging.merge import Outputs, empty_lse
from ...merging.parts import OutputPart, is_whole
from ...ranks.rings import Rings
from ..compute import ALL, Keys, Queries, Tensors, compute_outputs
from .events import Event
from .execution import Execution
from .program import Program

# Partial outputs are read again each time they are folded, and hold memory until then. So this many
# times group_bytes of them may wait.
_OUTPUTS_WAITING = 4


class Forward(Execution):
    """The forward. It merges partial outputs of the own queries.

    out, lse  the results, from the event `own` on
    parts     the partial outputs of the own block
    merged    the sum of the current pass
    """

    out: Tensor
    lse: Tensor
    merged: Outputs

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
        self.merged = self._merge_from_own(self._pass(event).q)

    def _compute(self, event: Event) -> None:
        tensors, heads = self._received(event), self._pass(event).q
        if not (calls := self.program.calls[event.round, event.stage]):
            return
        attention, queries = self.attention.of_heads(heads), self.queries.part(ALL, heads)
        for part in compute_outputs(attention, calls, queries, Keys(*tensors)):
            self.merged.add(*part)

    def _end(self, event: Event) -> None:
        parts, q = self.merged.parts, self.queries.q
        is_only = is_whole(parts, q.shape[1]) and parts[0][1].dtype == q.dtype
        if self.program.has_one_stage and is_only:
            _, self.out, self.lse = parts[0]
        else:
            self.merged.result()
        del self.merged

    def _merge_from_own(self, heads: slice) -> Outputs:
        """Begin the sum of some heads with the own block's share."""
        out, lse, parts = self.out, self.lse, self.parts
        if heads != ALL:
            out, lse = out[:, :, heads], lse[:, heads]
            parts = [(spans, x[:, :, heads], x_lse[:, heads]) for spans, x, x_lse in parts]
        limit = _OUTPUTS_WAITING * self.program.problem.group_bytes
        return Outputs(out, lse, limit, parts)
