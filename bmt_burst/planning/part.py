"""A part of a sequence without values, whose attention only allocates and saves.

ledger = Ledger()
part = PlannedPart(ledger)
with ledger:
    layer(x, cos, sin, mask=part).sum().backward()  # all on the device META
print(ledger.most, part.levels)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..calls.autograd import Past
from ..lightning.memory import Lightning
from ..memories.keys import KeyMemory
from ..memories.protocol import Kind, Room, Turn
from ..ranks.sequence_parallel import SequenceParallel, WholeSequence
from ..sequence.layout import Layout
from ..sequence.mask import Mask
from ..sparse import InfLLMV2
from .ledger import META, Ledger
from .lightning import LightningShape

CHUNKS = 2  # of a sequence: the earlier one has been kept


class PlannedPart(WholeSequence):
    """A part of a sequence without values. Its attention allocates and saves as on a GPU, computes
    nothing, and notes the memory meanwhile.

    ledger     counts the memory
    sparse     the sparse attention of layers that choose blocks, which it keeps as `chosen`
    is_alone   whether its rank has whole sequences, and lightning layers take no states of others
    chunked    whether its tokens are the last chunk of a sequence, of CHUNKS
    levels     the most bytes when attention ran "forward", "again" in the backward, and "backward"
    runs       how often it did
    """

    def __init__(
        self,
        ledger: Ledger,
        sparse: InfLLMV2 | None = None,
        chosen: torch.dtype = torch.int16,
        is_alone: bool = True,
        chunked: bool = False,
    ):
        super().__init__(causal=True)
        self.sp, self.ledger, self.in_backward = SequenceParallel(), ledger, False
        # the blocks that sparse attention chooses for each token and kv head
        self.far_blocks = 0 if sparse is None else sparse.most_blocks - sparse.window_blocks
        self.chosen, self.is_alone, self.chunked = chosen, is_alone, chunked
        self._memories: dict[int, KeyMemory] = {}
        self.levels: Counter[str] = Counter()
        self.runs: Counter[str] = Counter()

    @property
    def kept(self) -> list[Tensor]:
        """The memory of chunks: the keys and values of layers, and sums of their gradients."""
        return [x for memory in self._memories.values() for x in (*memory.kept, *memory.sums)]

    def _open_memory(self, layer: int, kind: Kind, q: Tensor, k: Tensor) -> KeyMemory:
        """Return the memory of a layer for all chunks, which the ledger does not count."""
        if layer not in self._memories:
            length, tokens = CHUNKS * q.shape[1], q.shape[1]
            chunks = Layout.chunks(length, 1, tokens)
            with _disable_current_modes():
                memory = kind.memory(Room(layer, self.sp, (Mask.causal(length),), chunks), q, k, k)
                assert isinstance(memory, KeyMemory), "of softmax attention"
                self.ledger.ignore(*memory.kept, *memory.sums)
            self._memories[layer] = memory
        return self._memories[layer]

    def mix(self, layer: int, kind: Any, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        """Allocate what the attention of a layer does. Return its result."""
        if isinstance(kind, Lightning):
            return _PassStates.apply(q, k, v, self)
        inputs = [x for x in tensors if x is not None]  # by which sparse attention chooses
        past = None
        if self.chunked:
            memory = self._open_memory(layer, kind, q, k)
            turn = Turn(CHUNKS - 1, True, True, True, None, lambda: None)
            past = memory.put(turn, *(k, v, *inputs[1:])[: len(memory.kept)])
            inputs = inputs[:1]
        return _Attend.apply(q, k, v, self, past, *inputs)

    def _note(self, run: str) -> None:
        self.runs[run] += 1
        self.levels[run] = max(self.levels[run], self.ledger.now)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        part: PlannedPart,
        past: Past | None,
        *inputs: Tensor,
    ) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        own = (k, v) if past is None else ()
        ctx.save_for_backward(q, out, lse, *inputs, *own)
        ctx.past = past
        # Offloading does not move choices, and a recomputation takes those of the first forward.
        # A document's first queries choose nothing, but a rank may have only later ones.
        chosen = 0 if part.in_backward else part.far_blocks * k.shape[:3].numel()
        ctx.chosen = torch.empty(chosen, dtype=part.chosen, device=META)
        ctx.part, ctx.input_count = part, len(inputs)
        part._note("again" if part.in_backward else "forward")
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, _, _, *others = ctx.saved_tensors
        past: Past | None = ctx.past
        if past is None:
            results = tuple(map(torch.empty_like, (q, *others[ctx.input_count :])))
        else:
            results = torch.empty_like(q), *past.own_gradients(past.keys_with_sums())
        ctx.part._note("backward")
        return *results, *[None] * (2 + ctx.input_count)


class _PassStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, part: PlannedPart) -> Tensor:
        ranks = 1 if part.is_alone else 2
        batch, tokens, heads, size = q.shape
        shape = LightningShape(batch, tokens, heads, size, q.dtype, ranks, part.chunked)
        # a recomputation takes the states of the first forward
        taken = 0 if part.in_backward else shape.taken_bytes
        ctx.taken = torch.empty(taken, dtype=torch.uint8, device=META)
        ctx.save_for_backward(q, k, v)
        ctx.part = part
        part._note("again" if part.in_backward else "forward")
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        results = tuple(map(torch.empty_like, ctx.saved_tensors))
        ctx.part._note("backward")
        return *results, None
