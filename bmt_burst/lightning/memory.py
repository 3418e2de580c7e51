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
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..base.kept import find_difference
from ..memories.new_tokens import NewTokens
from ..memories.protocol import Kind, Memory, Room, Turn, check_alike, select_rows
from ..ranks.sequence_parallel import WholeSequence
from . import kernels
from .attention import attend_lightning
from .plan import PastStates
from .rates import Slopes, check_rates, find_rates, widen
from .segments import Segments, cut_documents


@dataclass(frozen=True)
class Lightning:
    """Lightning attention of heads with these slopes, see lightning_attn_func. None: layers pass
    log_decay besides q, k and v. Ranks compare by what they divided its logits.
    """

    slopes: Slopes
    scale: float | None = None
    flash: str = "auto"
    gate_logit_normalizer: float | None = None
    name: ClassVar[str] = "lightning attention"

    def attend(self, part: Any, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        return attend_lightning(part.sp.rings, part, q, k, v, None, *tensors, **vars(self))

    def check_tensors(self, tensors: Sequence[Any]) -> None:
        if len(tensors) != (self.slopes is None):
            expected = "log_decay, for it has no slopes," if self.slopes is None else "no tensors"
            raise ValueError(
                f"{self.name} takes {expected} besides q, k and v, got {len(tensors)} more"
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
    def _decay(self) -> Tensor:
        """The decay of slopes over one token, (H, 1, 1) on the layer's device."""
        slopes = torch.tensor(self.kind.slopes, dtype=accumulator_dtype(self.like.dtype))
        return torch.exp(-slopes).view(-1, 1, 1).to(self.like.device)

    def check(self, kind: Kind, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> None:
        if not isinstance(kind, Lightning) or kind != self.kind:
            raise ValueError(
                f"expected {self.kind} in layer {self.room.layer}, as in its earlier calls, got "
                f"{kind}"
            )
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_alike(self.room.layer, name, x, self.rows, self.like)
        for log_decay in tensors:
            check_rates(None, log_decay, q)

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
        given = self.room.sp.rings, sequence, q, k, v, self.past, *tensors
        return functools.partial(attend_lightning, *given, **vars(self.kind))

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

    def attend(self, new: NewTokens, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        state, size = self.states[-1], q.shape[3]
        scale = size**-0.5 if self.kind.scale is None else self.kind.scale
        if state is None or q.shape[1] > 1:
            return self._continue(scale, q, k, v, *tensors)
        # one token: a few operators, which a CUDA graph holds
        queries, keys, values = (x.squeeze(1).to(state.dtype) for x in (q, k, v))
        decay = widen(tensors[0], state.dtype).exp().mT.unsqueeze(3) if tensors else self._decay
        state.mul_(decay).addcmul_(keys.unsqueeze(-1), values.unsqueeze(-2))
        return ((queries.unsqueeze(-2) @ state).transpose(1, 2) * scale).to(q.dtype)

    def _continue(
        self, scale: float, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None
    ) -> Tensor:
        """Attend as `attend` does, for any number of tokens. A state is changed in place."""
        state, slopes = self.states[-1], self.kind.slopes
        segments = _make_segments(*q.shape[:2], state is not None)
        kernel = kernels.load(kernels.pick(self.kind.flash, q, slopes is None))
        flat_q, flat_k, flat_v = (x.flatten(0, 1).contiguous() for x in (q, k, v))
        rates = find_rates(segments, slopes, log_decay, q)
        states = kernel.forward_states(flat_k, flat_v, rates, segments)
        initial = states.last[:0] if state is None else state.contiguous()
        out: Tensor = kernel.outputs(
            flat_q, flat_k, flat_v, rates, scale, segments, states, initial
        )
        if state is None:
            self.states[-1] = states.last
        else:
            decays = [rates.over(*span) for span in itertools.pairwise(segments.cuts)]
            state.mul_(torch.stack(decays)).add_(states.last)
        return out.view(q.shape)

    def refuses_crop(self) -> str | None:
        return "the state of lightning attention is a sum, and the tokens in it are not kept"

    def select_rows(self, rows: Tensor, count: int) -> bool:
        self.rows, before = len(rows), self.states[-1]
        if before is not None:
            self.states[-1] = select_rows(before, rows)
        return self.states[-1] is before


@functools.lru_cache(maxsize=64)  # kernels keep what they prepare for segments
def _make_segments(rows: int, tokens: int, is_open: bool) -> Segments:
    """Return a segment for each row, which leaves its state."""
    each = tuple(range(rows))
    cuts = tuple(range(0, rows * tokens + 1, tokens))
    return Segments(cuts, opens=each if is_open else (), leaves=each)
