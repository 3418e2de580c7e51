"""The memory of a lightning layer: its states at the borders of chunks, and after new tokens.

A forward goes through the chunks of a sequence. It keeps the state before each chunk for the
backward, or only the latest one, as for a prompt. The backward goes from the last chunk to the
first, and passes on the gradient of the state:

    past = memory.open(edges)                   the forward of the next chunk
    attend_lightning(..., past)
    memory.close(keeps=True)

    past = memory.reopen(number, edges, begin)  the second run of a chunk, with a graph
    attend_lightning(..., past).backward(dout)
    memory.finish(number, dtype)

`segments.cut_documents` finds the edges of a chunk.

New tokens continue the latest state in place, at one address, as a CUDA graph needs. Every rank
computes all of them, so every rank holds all states.

Letters: R rows, S new tokens, H heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..base.autocast import without_autocast
from ..base.compiled import not_compiled
from ..base.differences import find_difference
from ..base.dtypes import accumulator_dtype
from . import kernels
from .exchange import check_state
from .plan import PastStates
from .segments import Edges, Segments
from .slopes import decay, send_slopes


@runtime_checkable
class StateCache(Protocol):
    """A cache of generation that keeps the states of lightning layers.

    It begins with an empty dict. The layers fill it.
    """

    states: dict[int, Tensor]  # by layer, (B, H, D, D) in fp32, or fp64 for fp64 inputs


class StateMemory:
    """The states of a lightning layer. They are (R, H, D, D) in the accumulator's dtype, identical
    on all ranks. None is 0.

    states    before each chunk whose forward began, and last the latest one
    gradient  the gradient of the state after the chunk whose backward is next
    past      the past of the present chunk
    """

    def __init__(self) -> None:
        self.states: list[Tensor | None] = [None]
        self.gradient: Tensor | None = None
        self.past: PastStates | None = None

    def open(self, edges: Edges) -> PastStates:
        """Return the past of the forward of the next chunk."""
        self.past = PastStates(edges, self.states[-1])
        return self.past

    def close(self, keeps: bool) -> None:
        """End the forward of a chunk: the state after it is the latest one.

        keeps  whether the state before the chunk stays, for the chunk's second run
        """
        assert self.past is not None, "a chunk is open"
        if keeps:
            self.states.append(self.past.final)
        else:
            self._replace_latest(self.past.final)
        self.past = None

    def reopen(self, number: int, edges: Edges, begin: Callable[[], None]) -> PastStates:
        """Return the past of the second run of chunk `number`. Later chunks are finished. A
        recomputation gets the same past.

        begin  see `PastStates`
        """
        if self.past is None:
            self.past = PastStates(edges, self.states[number], begin, dfinal=self.gradient)
        return self.past

    def finish(self, number: int, dtype: torch.dtype) -> Tensor | None:
        """End the second run of chunk `number`: take the gradient of the state before it, and
        forget the states after it.

        Return the difference of the state after it from the kept one, relative to the most that
        rounding in the inputs' dtype does. None if none was kept: after the last chunk, and where
        all documents end.
        """
        assert self.past is not None, "a chunk is open"
        found, self.gradient, self.past = self.past.final, self.past.dinitial, None
        kept = self.states[number + 1] if number + 1 < len(self.states) else None
        del self.states[number + 1 :]
        return None if found is None or kept is None else find_difference(found, kept, dtype)

    def reserve(self, rows: int, heads: int, size: int, like: Tensor) -> None:
        """Make the latest state at the address that it keeps.

        like  a tensor of the dtype and device of inputs
        """
        if self.states[-1] is None:
            dtype = accumulator_dtype(like.dtype)
            self.states[-1] = like.new_zeros(rows, heads, size, size, dtype=dtype)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: tuple[float, ...],
        scale: float,
        flash: str = "auto",
    ) -> Tensor:
        """Return the attention of new tokens, and continue the latest state: see
        `continue_state`.
        """
        out, self.states[-1] = continue_state(q, k, v, slopes, scale, self.states[-1], flash)
        return out

    def choose(self, rows: Tensor) -> None:
        """Let the latest state have the states of some rows: (R,) int64. Beams do that."""
        if (state := self.states[-1]) is not None:
            self._replace_latest(state.index_select(0, rows))

    def take_back(self, tokens: int) -> NoReturn:
        """Raise ValueError: a state is a sum, and the tokens in it are not kept."""
        raise ValueError(
            f"lightning attention cannot take back {tokens} tokens: it keeps one state, to which "
            "they were added, and no tokens. Begin again with the tokens before them"
        )

    @torch.no_grad()
    def _replace_latest(self, state: Tensor | None) -> None:
        """Set the latest state, at the address that it has if the shape is the same."""
        latest = self.states[-1]
        if latest is None or state is None or latest.shape != state.shape:
            self.states[-1] = state
        else:
            latest.copy_(state)


@not_compiled
@torch.no_grad()
def continue_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: tuple[float, ...],
    scale: float,
    state: Tensor | None,
    flash: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the lightning attention (R, S, H, D) of new tokens, and each row's state after them,
    (R, H, D, D). A given state is changed in place. There is no gradient.

    q, k, v  (R, S, H, D)
    slopes   those of the heads
    state    that of each row before these tokens, or None at the beginning
    flash    the kernel, as in lightning_attn_func

    Raises ValueError for no tokens, a state of another shape, dtype or device, or a kernel that
    cannot compute with q, TypeError for a kernel that is no string.
    """
    rows, tokens = q.shape[:2]
    if tokens < 1:
        raise ValueError("expected one or more new tokens, got none")
    if state is not None:
        check_state(q, state)
    segments = _make_segments(rows, tokens, state is not None)
    kernel = kernels.load(kernels.pick(flash, q))
    flat_q, flat_k, flat_v = (x.flatten(0, 1).contiguous() for x in (q, k, v))
    # kernels rely on q's GPU being the current one
    with torch.cuda.device_of(q), without_autocast(q):
        sent = send_slopes(segments, slopes, q)
        states = kernel.forward_states(flat_k, flat_v, sent, segments)
        initial = states.last[:0] if state is None else state.contiguous()
        out = kernel.outputs(flat_q, flat_k, flat_v, sent, scale, segments, states, initial)
        if state is None:
            return out.view(q.shape), states.last
        faded = decay(sent, torch.full((1, 1), tokens, device=q.device))
        return out.view(q.shape), state.mul_(faded).add_(states.last)


@functools.lru_cache(maxsize=64)  # kernels keep what they prepare for segments
def _make_segments(rows: int, tokens: int, is_open: bool) -> Segments:
    """Return a segment for each row, which leaves its state."""
    each = tuple(range(rows))
    cuts = tuple(range(0, rows * tokens + 1, tokens))
    return Segments(cuts, opens=each if is_open else (), leaves=each)
