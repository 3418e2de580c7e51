"""The backward of a program: it adds up gradients, and returns those of tokens that were sent.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size. All that is sent is
(B, S, heads, ...).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...merging.merge import Gradients, sum_parts
from ...merging.parts import Part, is_whole, tokens_at
from ...ranks.rings import Rings
from ...sequence.span import length, shifted
from ...transport import Put
from ..compute import ALL, Keys, QueryGradients, Tensors, compute_gradients
from .events import Event
from .execution import Execution
from .program import Program

# Partial gradients may hold this many times group_bytes before they are added up (compare
# forward.py). Memory is short in the backward, and its kernels take longer.
_GRADIENTS_WAITING = 1.25


class Backward(Execution):
    """The backward. It adds up the gradients of the side that stays. Gradients of the side that is
    sent are returned, and their owner adds them up.

    own_parts      partial dq, dk and dv of the own block
    grads          dq, dk and dv, from the event `own` on
    sums           the sums of dq, dk and dv, by pass
    sent, staying  which of dq, dk and dv are those of each side
    root_sums      the sums of a root's gradients, by pass and round
    computed       partial gradients of the sent side of a stage
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
        self.sums: dict[int, list[Gradients]] = {}
        self.root_sums: dict[tuple[int, int], list[Gradients]] = {}
        self.computed: list[list[Part]] = []

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
                parts[0][1].to(x.dtype).contiguous() if whole else torch.empty_like(x)
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

    def _compute(self, event: Event) -> None:
        calls, sums = self.program.calls[event.round, event.stage], self.sums[event.number]
        tensors = self._received(event)
        if event.stage >= 0:
            self.computed = [[] for _ in sums[self.sent]]
        if not calls:
            return
        attention = self.attention.of_heads(self._pass(event).q)
        for found in compute_gradients(attention, calls, *self._sides(event, tensors)):
            _add_parts(sums[self.staying], found[self.staying])
            if event.stage < 0:
                _add_parts(self._sent_sums(event), found[self.sent])
            else:
                for parts, part in zip(self.computed, found[self.sent], strict=True):
                    parts.append(part)

    def _sides(self, event: Event, tensors: Sequence[Tensor]) -> tuple[QueryGradients, Keys]:
        """Return the queries and keys of a stage's calls: the received side, and the own one."""
        received, pass_ = self.program.payload.arrive(tensors), self._pass(event)
        if isinstance(received, QueryGradients):
            return received, self.keys.part(ALL, pass_.kv)
        assert isinstance(received, Keys)
        return self.queries.part(ALL, pass_.q), received

    def _return(self, event: Event) -> None:
        stage, packing = self._stage(event), self._pass(event).return_packing
        puts: list[Put] = []
        for out in stage.returns:
            grads = [
                sum_parts(parts, out.span, packing.batch, *row, self.device)
                for parts, row in zip(self.computed, packing.entries, strict=True)
            ]
            # each batch row is a message of its own, so only rows need be contiguous
            grads = [x if x[0].is_contiguous() else x.contiguous() for x in grads]
            puts += packing.puts(grads, (0, length(out.span)), out.peer, out.at, out.total)
        self.computed = []
        self.returning.append(
            self._deliver("return", packing, stage.returned_tokens, puts, stage.return_sources)
        )

    def _collect(self, event: Event) -> None:
        sums = self._add_returned(event)
        # The sums have views of the delivery's memory. Once it is released, other ranks write the
        # gradients of the next stage there. So the sums must read it now.
        if self.returning[-1].recycled:
            for total in sums:
                total.fold()
        self.returning.pop().release()

    def _end(self, event: Event) -> None:
        if event.stage >= 0:
            self._add_returned(event)
        sums = self.sums.pop(event.number)
        grads = [total.result() for total in sums]
        if self.program.has_one_stage:
            self.grads = grads
        if event.stage >= 0:
            self.returning.pop().release()

    def _add_returned(self, event: Event) -> list[Gradients]:
        """Wait for the gradients of a stage and add them to the root's sums. Return the sums."""
        stage, packing = self._stage(event), self._pass(event).return_packing
        self.returning[-1].wait()
        sums = self._sent_sums(event)
        # `sends` count from the first token that is held, and the sums of the own block from the
        # first of its shard.
        first = 0 if event.round else self._round(event).held[0][0]
        views = packing.views(self.returning[-1].memory, stage.returned_tokens)
        for out, (_, at) in zip(stage.sends, stage.return_sources, strict=True):
            spans = [shifted(out.span, first)]
            _add_parts(sums, [(spans, tokens_at(grad, at)) for grad in views])
        return sums

    def _leave(self, event: Event) -> None:
        round_, packing = self._round(event), self._pass(event).return_packing
        share: Tensors = ()
        if round_.landing.tokens:
            dtype = self.program.problem.sizes.partial
            share = tuple(total.result(dtype) for total in self._sent_sums(event))
        self.root_sums.pop((event.number, event.round), None)
        owner, tokens = round_.root // self.rings.inner.size, sum(map(length, round_.lent))
        self.leaving.append(self._exchange(share, owner, packing, tokens, round_.lent_to))

    def _receive(self, event: Event) -> None:
        ticket, grads = self.leaving.pop()
        ticket.wait()
        if grads:
            lent = self._round(event).lent
            _add_parts(self.sums[event.number][self.sent], [(lent, grad) for grad in grads])

    def _sent_sums(self, event: Event) -> list[Gradients]:
        """Return the sums of the sent side: of the own tokens, or in later rounds this host's share
        of a root's.
        """
        own, key = self.sums[event.number][self.sent], (event.number, event.round)
        if event.round and key not in self.root_sums:
            tokens = self._round(event).landing.tokens
            self.root_sums[key] = [
                Gradients((x.shape[0], tokens, *x.shape[2:]), x.dtype, x.device, self.limit)
                for x in own
            ]
        return self.root_sums[key] if event.round else own


def _add_parts(sums: Sequence[Gradients], parts: Sequence[Part]) -> None:
    """Add a part to each of `sums`."""
    for total, part in zip(sums, parts, strict=True):
        total.add(*part)
