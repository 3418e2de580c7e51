"""Lightning attention as a kind of layer. Its memory holds the state before each chunk, and after
the newest token.

A forward keeps the state before each chunk for the backward, or only the latest one, as for a
prompt. The backward goes from the last chunk to the first, and passes on the gradient of the state.
New tokens continue the latest state in place, at one address, as a CUDA graph needs. Every rank
computes all of them, so every rank holds all states.

Letters: B batch, S new tokens, H heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base.autocast import without_autocast
from ..base.compiled import not_compiled
from ..base.dtypes import accumulator_dtype
from ..base.kept import find_difference
from ..memories.new_tokens import NewTokens
from ..memories.protocol import Kind, Memory, Room, Turn, check_alike, select_rows
from ..ranks.sequence_parallel import WholeSequence
from . import kernels
from .attention import attend_lightning
from .plan import PastStates, check_state
from .rates import decay, send_slopes
from .segments import Segments, cut_documents


@dataclass(frozen=True)
class Lightning:
    """Lightning attention of heads with these slopes, see lightning_attn_func."""

    slopes: tuple[float, ...]
    scale: float | None = None
    flash: str = "auto"
    name: ClassVar[str] = "lightning attention"

    def attend(self, part: Any, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        return attend_lightning(part.sp.rings, part, q, k, v, self.slopes, self.scale, self.flash)

    def check_tensors(self, tensors: Sequence[Any]) -> None:
        if tensors:
            raise ValueError(
                f"{self.name} takes no tensors besides q, k and v, got {len(tensors)} more"
            )

    def memory(self, room: Room, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> StateMemory:
        return StateMemory(self, room, q)


class StateMemory(Memory):
    """The states of a lightning layer. They are (B, H, D, D) in the accumulator's dtype, identical
    on all ranks. None is 0.

    states    before each chunk whose forward began, and last the latest one
    gradient  the gradient of the state after the chunk whose backward is next
    past      the past of the present chunk
    """

    keeps_results = False  # a second run exchanges its states again, to compare them

    def __init__(self, kind: Lightning, room: Room, q: Tensor):
        self.kind, self.room, self.rows = kind, room, len(q)
        self.states: list[Tensor | None] = [None]
        self.gradient: Tensor | None = None
        self.past: PastStates | None = None
        self.like = q.new_empty(0, *q.shape[2:])
        self.difference = q.new_zeros((), dtype=torch.float32)
        self.keeps = False  # whether states stay for the second run of chunks

    @functools.cached_property
    def _fades(self) -> Tensor:
        """The decay over one token, (H, 1, 1) on the layer's device."""
        slopes = torch.tensor(self.kind.slopes, dtype=accumulator_dtype(self.like.dtype))
        return torch.exp(-slopes).view(-1, 1, 1).to(self.like.device)

    def check(self, kind: Kind, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> None:
        layer = self.room.layer
        if not isinstance(kind, Lightning) or kind != self.kind:
            raise ValueError(
                f"expected {self.kind} in layer {layer}, as in its earlier calls, got {kind}"
            )
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_alike(layer, name, x, self.rows, self.like)

    def keep(
        self, turn: Turn, q: Tensor, k: Tensor, v: Tensor, *tensors: Any
    ) -> Callable[[], Tensor]:
        chunks, self.keeps = self.room.chunks, turn.with_backward
        assert chunks is not None, "a chunk belongs to a sequence"
        goes_on = self.room.limit is not None
        masks, edges = cut_documents(self.room.masks, *chunks.spans[turn.number], goes_on)
        if not turn.differentiates:
            self.past = PastStates(edges, self.states[-1])
        elif self.past is None:  # a recomputation gets the same past
            before = self.states[turn.number]
            self.past = PastStates(edges, before, turn.begin, dfinal=self.gradient)
        mask = masks if len(masks) > 1 else masks[0]
        sequence = WholeSequence.local(mask, chunks.layouts[turn.number])
        constants = self.kind.slopes, self.kind.scale, self.kind.flash
        given = self.room.sp.rings, sequence, q, k, v, *constants, self.past
        return functools.partial(attend_lightning, *given)

    @torch.no_grad()
    def close(self, number: int) -> None:
        assert self.past is not None, "a chunk was computed"
        final, self.past = self.past.final, None
        if self.keeps:
            self.states.append(final)
        else:
            self.states = [final]

    def finish(self, number: int) -> None:
        assert self.past is not None, "a chunk was computed"
        found, self.gradient, self.past = self.past.final, self.past.dinitial, None
        kept = self.states[number + 1] if number + 1 < len(self.states) else None
        self.difference = torch.zeros_like(self.difference)
        if found is not None and kept is not None:
            self.difference = find_difference(found, kept, self.like.dtype)
        del self.states[number + 1 :]

    @torch.no_grad()
    def attend(self, new: NewTokens, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        kind, state, size = self.kind, self.states[-1], q.shape[3]
        scale = size**-0.5 if kind.scale is None else kind.scale
        if state is None or q.shape[1] > 1:
            found = continue_state(q, k, v, kind.slopes, scale, state, kind.flash)
            out, self.states[-1] = found
            return out
        # one token: a few operators, which a CUDA graph holds
        queries, keys, values = (x.squeeze(1).to(state.dtype) for x in (q, k, v))
        state.mul_(self._fades).addcmul_(keys.unsqueeze(-1), values.unsqueeze(-2))
        out = (queries.unsqueeze(-2) @ state).transpose(1, 2) * scale
        return out.to(q.dtype)

    def refuses_crop(self) -> str | None:
        return "the state of lightning attention is a sum, and the tokens in it are not kept"

    def select_rows(self, rows: Tensor, count: int) -> bool:
        self.rows, before = len(rows), self.states[-1]
        if before is not None:
            self.states[-1] = select_rows(before, rows)
        return self.states[-1] is before


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
    (R, H, D, D). A given state, that before them, is changed in place. There is no gradient.

    Raises ValueError for no tokens, a state of another shape, dtype or device, or a kernel that
    cannot compute with q.
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
