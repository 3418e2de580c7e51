"""The exchange of states: ranks send the last states of their runs, and add up those they take.

With U_j the last state of run j if it began with 0, the state before run r is

    C_r = sum of e^(-slope * tokens from the end of j to the start of r) U_j

over the earlier runs j of its document. Gradients of states are added up in the same way, from the
end of the sequence. A sum has a fixed order, so results are bitwise equal between runs, and the
states that leave a chunk are between ranks.

Letters: N states, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..ranks.rings import Rings
from ..transport import Arrival, Put, Transport
from .segments import Faded, Hop, StateExchange
from .slopes import decay


def find_weights(sums: Sequence[Sequence[Faded]], slopes: Tensor) -> Tensor:
    """Return the decay of each state that is added up, those of all sums in turn: (N, H, 1, 1) in
    the dtype of slopes (H,).
    """
    tokens = [tokens for faded in sums for _, tokens in faded]
    return decay(slopes, torch.tensor(tokens, dtype=torch.int64)).mT[..., None, None]


def exchange_states(
    rings: Rings,
    plan: StateExchange,
    own: Sequence[Tensor],
    entering: Sequence[Tensor],
    like: Tensor,
    weights: Tensor,
) -> list[Tensor]:
    """Return the states (H, D, D) that this rank takes, one for each of `plan.sums`.

    own       the states of `plan.own`, (H, D, D) each, contiguous
    entering  those of `plan.entering`, which every rank holds
    like      a tensor (..., H, D, D) of the dtype and device of states
    weights   what `find_weights` returned for `plan.sums`
    """
    held = dict(zip(plan.own, own, strict=True))
    held |= _cross(rings.outer, plan.across, held, like)
    edges = {~row: state for row, state in zip(plan.entering, entering, strict=True)}
    with _deliver(rings.inner, plan.within, plan.most, held, like) as received:
        return _add_up(plan.sums, {**held, **received, **edges}, weights)


def _cross(
    ring: Transport, hop: Hop, held: Mapping[int, Tensor], like: Tensor
) -> dict[int, Tensor]:
    """Exchange states between hosts. Return the received ones by run."""
    memory = like.new_empty(len(hop.receives), *like.shape[-3:])
    sends = [(held[run], peer) for run, peer, _ in hop.sends]
    receives = [(memory[place], peer) for _, peer, place in hop.receives]
    ring.exchange(sends, receives).wait()
    return {run: memory[place] for run, _, place in hop.receives}


@contextmanager
def _deliver(
    ring: Transport, hop: Hop, most: int, held: Mapping[int, Tensor], like: Tensor
) -> Iterator[dict[int, Tensor]]:
    """Exchange states within a host. Yield the received ones by run. They may be read until the
    context ends.
    """
    if not most:
        yield {}
        return
    nbytes = state_bytes(like)
    puts = [Put(held[run], peer, place * nbytes) for run, peer, place in hop.sends]
    arrivals = [Arrival(peer, place * nbytes, nbytes) for _, peer, place in hop.receives]
    delivery = ring.deliver("visit", len(arrivals) * nbytes, puts, arrivals, like.device)
    delivery.wait()
    try:
        memory = delivery.memory.view(like.dtype).view(-1, *like.shape[-3:])
        yield {run: memory[place] for run, _, place in hop.receives}
    finally:
        delivery.release()


def check_state(q: Tensor, state: Tensor | None) -> None:
    """Raise ValueError unless q (B, S, H, D) can continue `state`, which is (B, H, D, D) in the
    accumulator's dtype on q's device.
    """
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


def _add_up(
    sums: Sequence[Sequence[Faded]], states: Mapping[int, Tensor], weights: Tensor
) -> list[Tensor]:
    parts = weights.split([len(faded) for faded in sums])
    return [
        torch.stack([states[run] for run, _ in faded]).mul_(its_weights).sum(0)
        for faded, its_weights in zip(sums, parts, strict=True)
    ]
