"""The plan of a rank in calls of lightning attention: forward, backward, and how states are sent.

Ranks send the last states of their runs, and add up those they take, decayed to the start of their
run. A sum has a fixed order, so results are bitwise equal between runs, and the states that leave a
chunk are between ranks.

Letters: T tokens of this rank, R rows, H heads, D head size, N states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..base.autocast import without_autocast
from ..base.compiled import not_compiled
from ..base.kept import find_kept
from ..base.ranges import in_range
from ..calls.autograd import begin_backward
from ..kernels.packed import make_dense
from ..ranks.agreement import Terms, run_agreed
from ..ranks.rings import Rings
from ..transport import Arrival, Put, Transport
from .rates import ByRun, Rates, Slopes, find_rates
from .segments import Edges, Hop, StatePlan

NAME = "lightning_attn_func"


@dataclass(eq=False)
class PastStates:
    """The states of a chunk's edges, the same on every rank: (R, H, D, D) in the accumulator's
    dtype. Autograd records none of them. None is 0. A whole sequence has no edges.

    initial   the states of earlier tokens
    begin     called when the backward begins. Raises ValueError if another one did before. None
              for a call without a backward
    final     the forward writes the states after the chunk. A recomputation that takes its states
              from the first run does not.
    dfinal    the gradients of the states after the chunk, once a backward begins
    dinitial  the backward writes the gradients of `initial`
    """

    edges: Edges | None = None
    initial: Tensor | None = None
    begin: Callable[[], None] | None = None
    final: Tensor | None = None
    dfinal: Tensor | None = None
    dinitial: Tensor | None = None


@dataclass(eq=False)
class LightningPlan:
    """The part of one rank in calls with the same terms."""

    states: StatePlan
    kernel: ModuleType  # see `kernels.py`
    slopes: Slopes
    scale: float
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False)

    def exchange(
        self, rings: Rings, direction: str, rates: Rates, own: Tensor, edge: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the states (N, H, D, D) that this rank takes in a direction, "forward" or
        "backward", and those that leave the rows (R, H, D, D), or None.

        own   the states of its segments. Gradients of states are the states of a backward
        edge  the states that enter the rows. None: they are 0
        """
        segments = self.states.segments
        plan, step, sources = self.states.forward, 1, segments.leaves
        if direction == "backward":  # it numbers runs from the end of the sequence
            plan, step, sources = self.states.backward, -1, segments.opens
        if not plan.is_any:
            return own, None
        zero = own.new_zeros(1, *own.shape[1:]) if plan.entering or plan.leaving else own
        packed = rates.pack(own, sources, segments.cuts)
        edges = [zero] * self.states.rows if edge is None else edge.split(1)
        states = dict(zip(plan.own, packed.unbind()[::step], strict=True))
        states |= _cross(rings.outer, plan.across, states, packed)
        with _deliver(rings.inner, plan.within, plan.most, states, packed) as received:
            states |= received
            states |= {~row: rates.pack(edges[row])[0] for row in plan.entering}
            found = rates.add_up(direction, plan.sums, states)
        count = len(found) - len(plan.leaving)
        taken = torch.stack(found[:count][::step]) if count else own.new_empty(0, *own.shape[1:])
        if not plan.leaving:
            return taken, None
        leaving = dict(zip(plan.leaving, found[count:], strict=True))
        return taken, torch.stack([leaving.get(row, zero[0]) for row in range(self.states.rows)])


def _cross(ring: Transport, hop: Hop, held: ByRun, like: Tensor) -> dict[int, Tensor]:
    """Exchange states between hosts. Return the received ones by run."""
    memory = like.new_empty(len(hop.receives), *like.shape[1:])
    sends = [(held[run], peer) for run, peer, _ in hop.sends]
    receives = [(memory[place], peer) for _, peer, place in hop.receives]
    ring.exchange(sends, receives).wait()
    return {run: memory[place] for run, _, place in hop.receives}


@contextmanager
def _deliver(
    ring: Transport, hop: Hop, most: int, held: ByRun, like: Tensor
) -> Iterator[dict[int, Tensor]]:
    """Exchange states within a host. Yield the received ones by run, until the context ends."""
    if not most:
        yield {}
        return
    nbytes = like.shape[1:].numel() * like.element_size()
    puts = [Put(held[run], peer, place * nbytes) for run, peer, place in hop.sends]
    arrivals = [Arrival(peer, place * nbytes, nbytes) for _, peer, place in hop.receives]
    delivery = ring.deliver("visit", len(arrivals) * nbytes, puts, arrivals, like.device)
    delivery.wait()
    try:
        memory = delivery.memory.view(like.dtype).view(-1, *like.shape[1:])
        yield {run: memory[place] for run, _, place in hop.receives}
    finally:
        delivery.release()


class PlannedLightning(torch.autograd.Function):
    """Lightning attention of one rank by its plan: (T, H, D), differentiable once in q, k,
    v and log_decay (T, H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        rings: Rings,
        plan: LightningPlan,
        number: int,
        past: PastStates,
    ) -> Tensor:
        """Return out of the call with this number, which continues the states of `past`."""
        segments, kernel = plan.states.segments, plan.kernel
        with without_autocast(q):
            rates = find_rates(plan, plan.slopes, log_decay, q)
            states = kernel.forward_states(k, v, rates, segments)

            def exchange() -> Tensor:
                given = rings, "forward", rates, states.last, past.initial
                initial, past.final = in_range("states", plan.exchange, *given)
                return initial

            if not plan.states.forward.is_any:
                initial = states.last
            elif rings.size == 1:  # nothing is sent
                initial = exchange()
            else:  # a recomputation takes the states of the first run
                initial = find_kept(exchange, "lightning attention exchanges its states")
            out: Tensor = kernel.outputs(q, k, v, rates, plan.scale, segments, states, initial)
        ctx.save_for_backward(q, k, v, initial, log_decay)
        ctx.rings, ctx.plan, ctx.number = rings, plan, number
        ctx.past, ctx.has_past = past, past.edges is not None
        return out

    @staticmethod
    @not_compiled  # not by compiled autograd either
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of forward's arguments, once all ranks are in this backward."""
        doing = f"the backward of call {ctx.number}, of {NAME}"
        rings: Rings = ctx.rings
        plan: LightningPlan = ctx.plan
        past: PastStates = ctx.past

        def begin() -> tuple[Terms, tuple[Tensor, ...]]:
            return Terms(doing), begin_backward(ctx, NAME, dout)

        def compute(saved: tuple[Tensor, ...], _: Any) -> tuple[Tensor | None, ...]:
            q, k, v, initial, log_decay = saved
            with without_autocast(dout):
                segments, kernel, scale = plan.states.segments, plan.kernel, plan.scale
                rates = find_rates(plan, plan.slopes, log_decay, q, ctx.needs_input_grad[3])
                dense = make_dense(dout)
                states = kernel.backward_states(q, dense, rates, scale, segments)
                of_states = rings, "backward", rates, states.last, past.dfinal
                dfinal, past.dinitial = in_range("states", plan.exchange, *of_states)
                grads: tuple[Tensor, ...] = kernel.gradients(
                    q, k, v, dense, rates, scale, segments, initial, states, dfinal
                )
            return *grads, rates.gradient

        grads = run_agreed(rings, doing, begin, compute)
        if ctx.has_past:  # a whole sequence may have another backward
            ctx.past = None  # a loss that is still held would hold all states
        return *grads, None, None, None, None
