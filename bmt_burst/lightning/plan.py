"""The plan of a rank in calls of lightning attention: forward, backward, and how states are sent.

Ranks send the last states of their runs, and add up those they take. With U_j the last state of run
j if it began with 0, the state before run r is

    C_r = sum of e^(-slope * tokens from the end of j to the start of r) U_j

over the earlier runs j of its document. Gradients of states are added up in the same way, from the
end of the sequence. A sum has a fixed order, so results are bitwise equal between runs, and the
states that leave a chunk are between ranks.

Letters: T tokens of this rank, R rows, H heads, D head size, N states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..base.autocast import without_autocast
from ..base.compiled import not_compiled
from ..base.dtypes import accumulator_dtype
from ..base.kept import find_kept
from ..base.streams import send_to_device
from ..calls.autograd import begin_backward
from ..kernels.packed import make_dense, prepare_once
from ..ranks.agreement import Terms, run_agreed
from ..ranks.rings import Rings
from ..transport import Arrival, Put, Transport
from .rates import decay, send_slopes
from .segments import Edges, Hop, StatePlan

NAME = "lightning_attn_func"


@dataclass(eq=False)
class PastStates:
    """The states of a chunk's edges, the same on every rank: (R, H, D, D) in the accumulator's
    dtype. Autograd records none of them. None is 0.

    initial   the states of earlier tokens
    begin     called when the backward begins. Raises ValueError if another one did before. None
              for a call without a backward
    final     the forward writes the states after the chunk. A recomputation that takes its states
              from the first run does not.
    dfinal    the gradients of the states after the chunk, once a backward begins
    dinitial  the backward writes the gradients of `initial`
    """

    edges: Edges
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
    slopes: tuple[float, ...]
    scale: float
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False)

    def take_initial(self, rings: Rings, last: Tensor, past: PastStates | None) -> Tensor:
        """Return the states (N, H, D, D) before segments, from those after. Write `past.final`."""
        if not self.states.forward.is_any:
            return last

        def exchange() -> Tensor:
            entering = past.initial if past else None
            initial, final = self._exchange(rings, "forward", last, entering)
            if past is not None:
                past.final = final
            return initial

        if rings.size == 1:  # nothing is sent
            return exchange()
        # a recomputation takes the states of the first run
        return find_kept(exchange, "lightning attention exchanges its states")

    def take_final(self, rings: Rings, first: Tensor, past: PastStates | None) -> Tensor:
        """Return the gradients of the states after segments, from those of the states before them,
        (N, H, D, D). Write `past.dinitial`.
        """
        if not self.states.backward.is_any:
            return first
        entering = past.dfinal if past else None
        final, dinitial = self._exchange(rings, "backward", first, entering)
        if past is not None:
            past.dinitial = dinitial
        return final

    def _exchange(
        self, rings: Rings, direction: str, own: Tensor, edge: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the states that this rank takes in a direction, and those that leave the rows.
        `own` are the states of its segments, `edge` those that enter the rows.
        """
        plan, step = self.states.forward, 1
        if direction == "backward":  # it numbers runs from the end of the sequence
            plan, step = self.states.backward, -1

        def make() -> Tensor:
            """Return the decay of each state that is added up: (N, H, 1, 1)."""
            slopes = torch.tensor(self.slopes, dtype=torch.float64)
            tokens = torch.tensor([faded.tokens for faded in itertools.chain(*plan.sums)])
            weights = decay(slopes, tokens.long()).mT[..., None, None]
            return send_to_device(weights.to(own.dtype), own.device)

        weights = prepare_once(self, (direction, own.dtype), own.device, make)

        def take(state: Tensor | None) -> Tensor:
            return own.new_zeros(own.shape[1:]) if state is None else state

        states = dict(zip(plan.own, own.unbind()[::step], strict=True))
        states |= _cross(rings.outer, plan.across, states, own)
        with _deliver(rings.inner, plan.within, plan.most, states, own) as received:
            states |= received
            states |= {~row: take(None if edge is None else edge[row]) for row in plan.entering}
            parts = weights.split([len(faded) for faded in plan.sums])
            found = [
                torch.stack([states[run] for run, _ in faded]).mul_(part).sum(0)
                for faded, part in zip(plan.sums, parts, strict=True)
            ]
        count = len(found) - len(plan.leaving)
        taken = torch.stack(found[:count][::step]) if count else own.new_empty(0, *own.shape[1:])
        if not plan.leaving:
            return taken, None
        leaving = dict(zip(plan.leaving, found[count:], strict=True))
        rows = range(self.states.rows)
        return taken, torch.stack([take(leaving.get(row)) for row in rows])


def _cross(
    ring: Transport, hop: Hop, held: Mapping[int, Tensor], like: Tensor
) -> dict[int, Tensor]:
    """Exchange states between hosts. Return the received ones by run."""
    memory = like.new_empty(len(hop.receives), *like.shape[1:])
    sends = [(held[run], peer) for run, peer, _ in hop.sends]
    receives = [(memory[place], peer) for _, peer, place in hop.receives]
    ring.exchange(sends, receives).wait()
    return {run: memory[place] for run, _, place in hop.receives}


@contextmanager
def _deliver(
    ring: Transport, hop: Hop, most: int, held: Mapping[int, Tensor], like: Tensor
) -> Iterator[dict[int, Tensor]]:
    """Exchange states within a host. Yield the received ones by run, until the context ends."""
    if not most:
        yield {}
        return
    nbytes = state_bytes(like)
    puts = [Put(held[run], peer, place * nbytes) for run, peer, place in hop.sends]
    arrivals = [Arrival(peer, place * nbytes, nbytes) for _, peer, place in hop.receives]
    delivery = ring.deliver("visit", len(arrivals) * nbytes, puts, arrivals, like.device)
    delivery.wait()
    try:
        memory = delivery.memory.view(like.dtype).view(-1, *like.shape[1:])
        yield {run: memory[place] for run, _, place in hop.receives}
    finally:
        delivery.release()


def check_state(q: Tensor, state: Tensor | None) -> None:
    """Raise ValueError unless q (B, S, H, D) can continue `state`, (B, H, D, D)."""
    batch, _, heads, size = q.shape
    expected = f"{(batch, heads, size, size)} in {accumulator_dtype(q.dtype)} on {q.device}"
    found = "none" if state is None else f"{tuple(state.shape)} in {state.dtype} on {state.device}"
    if found != expected:
        raise ValueError(
            f"expected states {expected} to continue, got {found}: continue with the same rows, "
            "dtype and device, or begin with other states"
        )


def state_bytes(like: Tensor) -> int:
    """Return the bytes of one of the states (N, H, D, D)."""
    return like.shape[1:].numel() * like.element_size()


class PlannedLightning(torch.autograd.Function):
    """Lightning attention of one rank by its plan: (T, H, D), differentiable once in q, k and v."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rings: Rings,
        plan: LightningPlan,
        number: int,
        past: PastStates | None,
    ) -> Tensor:
        """Return out of the call with this number. It continues the states of a `past`."""
        segments, kernel = plan.states.segments, plan.kernel
        slopes = send_slopes(plan, plan.slopes, q)
        with without_autocast(q):
            states = kernel.forward_states(k, v, slopes, segments)
            initial = plan.take_initial(rings, states.last, past)
            out: Tensor = kernel.outputs(q, k, v, slopes, plan.scale, segments, states, initial)
        ctx.save_for_backward(q, k, v, initial)
        ctx.rings, ctx.plan, ctx.number = rings, plan, number
        ctx.past, ctx.has_past = past, past is not None
        return out

    @staticmethod
    @not_compiled  # not by compiled autograd either
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of forward's arguments, once all ranks are in this backward."""
        doing = f"the backward of call {ctx.number}, of {NAME}"
        rings: Rings = ctx.rings
        plan: LightningPlan = ctx.plan
        past: PastStates | None = ctx.past

        def begin() -> tuple[Terms, tuple[Tensor, ...]]:
            return Terms(doing), begin_backward(ctx, NAME, dout)

        def compute(saved: tuple[Tensor, ...], _: Any) -> tuple[Tensor, ...]:
            q, k, v, initial = saved
            with without_autocast(dout):
                segments, kernel, scale = plan.states.segments, plan.kernel, plan.scale
                slopes = send_slopes(plan, plan.slopes, q)
                dense = make_dense(dout)
                states = kernel.backward_states(q, dense, slopes, scale, segments)
                dfinal = plan.take_final(rings, states.last, past)
                grads: tuple[Tensor, ...] = kernel.gradients(
                    q, k, v, dense, slopes, scale, segments, initial, states, dfinal
                )
            return grads

        grads = run_agreed(rings, doing, begin, compute)
        ctx.past = None  # a loss that is still held would hold all states
        return *grads, None, None, None, None
