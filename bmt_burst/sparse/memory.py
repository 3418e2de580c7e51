"""The memory of a layer with sparse attention: keys, values, and what blocks are chosen by.

Letters: B batch, S new tokens, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..blocks.memory import BlockMemory
from ..kernels.few_queries import has_kernels
from ..memories.keys import KeyMemory, Softmax
from ..memories.new_tokens import NewTokens
from ..memories.protocol import Kind, Room, Turn, reserve_memory
from ..merging.parts import Partials
from .choice import choose_in_document
from .compressed import KeySums
from .config import Constants

if TYPE_CHECKING:  # it needs the package triton
    from .triton_decoding import DecodingKeys


class SparseMemory(BlockMemory):
    """Keys and values of a layer with sparse attention. New tokens choose by sums of keys, chunks
    by the kept keys: with use_nope, by those before they are rotated, which are kept too.
    """

    has_graphs = True

    def __init__(self, kind: Softmax, room: Room, k: Tensor, v: Tensor):
        config = kind.extension
        assert isinstance(config, Constants), "its extension is InfLLMV2"
        self.config: Constants = config
        self.sums_of_keys: KeySums = KeySums(config)
        self.block_size = config.block_size
        self._decoding: DecodingKeys | None = None  # on GPUs, once there are new tokens
        by_k = (k,) if config.use_nope and room.chunks is not None else ()
        super().__init__(kind, room, k, v, *by_k)

    def check(self, kind: Kind, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> None:
        super().check(kind, q, k, v, *tensors)
        assert self.kind.extension is not None, "it chooses"
        self.kind.extension.check(tensors[1:], q, k)

    def keep(
        self, turn: Turn, q: Tensor, k: Tensor, v: Tensor, *tensors: Any
    ) -> Callable[[], Tensor]:
        sinks, by_q, by_k = self._take_choose_by(q, k, *tensors)
        keys, extra = self.keys[turn.number], self.kept[2:]
        past = self.put(turn, k, v, *([by_k] if extra else []))
        others = (by_q, extra[0][:, keys.seen]) if extra else ()
        compute = functools.partial(self._attend_chunk, turn, past, q, k, v, sinks, *others)
        return self._then_sum(turn, by_k, compute)

    def _take_choose_by(
        self, q: Tensor, k: Tensor, sinks: Tensor | None = None, *choose_by: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the sinks, and the queries and keys to choose by."""
        if not self.config.use_nope:
            return sinks, q, k
        by_q, by_k = (x.detach().to(q.dtype) for x in choose_by)
        return sinks, by_q, by_k

    def attend(self, new: NewTokens, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        sinks, by_q, by_k = self._take_choose_by(q, k, *tensors)
        if has_kernels(k):
            self._add_on_device(new, by_k)
        else:
            self.sums_of_keys.extend(by_k)
        return KeyMemory.attend(self, new, q, k, v, sinks, by_q)

    def _add_on_device(self, new: NewTokens, k: Tensor) -> None:
        """Add keys (B, S, G, D) of new tokens in memory that a graph may write."""
        from .triton_decoding import DecodingKeys

        if self._decoding is None:
            assert self.room.limit is not None, "a cache has a limit"
            sums = self.sums_of_keys if self.sums_of_keys.tokens else None
            with reserve_memory(self.room.limit):
                self._decoding = DecodingKeys(sums, k, self.room.limit, self.config)
            self.sums_of_keys = KeySums(self.config)
        self._decoding.extend(k, new.on(k.device, "first"))

    def _attend_part(self, new: NewTokens, q: Tensor, k: Tensor, *others: Tensor) -> Partials:
        if self.config.is_dense(new.stop):
            return KeyMemory._attend_part(self, new, q, k)
        [by_q] = others
        positions, (keys, values, *_) = new.positions, self.kept
        spec = self.kind.spec(q)
        if self._decoding is not None:
            from .triton_decoding import KeysAtHand

            name, at = (KeysAtHand, self.config.block_size), positions.on(q.device)
            if name not in positions.prepared:
                positions.prepared[name] = KeysAtHand.of(at, positions.limit, name[1])
            at_hand, first = positions.prepared[name], new.on(q.device, "first")
            return self._decoding.attend(q, by_q, keys, values, at_hand, first, new.prepared, spec)
        return super()._attend_part(new, q, k, by_q)

    def choose(self, row: int, q: Tensor, places: Tensor) -> Tensor:
        compressed, scale = self.sums_of_keys.compress(row), self.kind.spec(q).scale
        return choose_in_document(q, places, compressed, self.config, scale)

    def select_rows(self, rows: Tensor, count: int) -> bool:
        moved = self._decoding is not None and not self._decoding.select_rows(rows)
        return super().select_rows(rows, count) and not moved

    def variant(self, length: int) -> Hashable:
        return self.config.is_dense(length)
