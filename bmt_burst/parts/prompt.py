"""The prompt of a cache, which is computed in chunks.

Letters: B batch, C tokens of a rank in a chunk, G kv heads, D head size, E model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..base.autocast import autocast
from ..base.compiled import not_compiled
from ..calls.autograd import Past
from .chunks import Chunk, Chunks, Kept
from ..ranks.sequence_parallel import SequenceParallel
from ..sequence.mask import Mask
from ..sequence.span import Span
from ..sparse.config import InfLLMV2


class Prompt(Chunks):
    """The chunks of a cache's first tokens.

    limit        the most tokens of the cache
    later        how many keys of later tokens will stay on this rank
    add_sums     takes the number of a layer and the keys (B, C, G, D) of all ranks, in order
    is_replaced  whether another prefill has begun
    """

    _keeps_all = True

    def __init__(
        self,
        sp: SequenceParallel,
        layers: int,
        length: int,
        tokens: int,
        layout: str,
        *,
        limit: int,
        later: int,
        add_sums: Callable[[int, Tensor, InfLLMV2], None],
    ):
        self.length, self.limit, self.later, self.add_sums = length, limit, later, add_sums
        self.results: dict[int, Kept] = {}
        self.is_replaced = False
        super().__init__(Mask.causal(length), tokens, layers, sp, layout=layout)

    def _make_chunk(self, number: int, positions: Span, span: slice) -> PrefillChunk:
        return PrefillChunk(self, number, positions, span)

    def _count_places(self, window: int | None) -> int:
        return super()._count_places(window) + self.later

    def _keep(
        self, chunk: Chunk, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None
    ) -> Past:
        if self.is_replaced:
            raise ValueError(
                "expected a chunk of the prefill that began last, got one of an earlier prefill"
            )
        with reserve_memory(self.limit):
            return super()._keep(chunk, layer, q, k, v, window)

    def _adapt(self, sparse: InfLLMV2 | None) -> InfLLMV2 | None:
        refuse_nope(sparse)  # also in a dense prompt: the text may turn sparse later
        return super()._adapt(sparse)

    def _forget(self) -> None:
        self.results = dict(self._kept)
        super()._forget()


class PrefillChunk(Chunk):
    """A part of a prompt, which a model takes as its cache. `Cache.prefill` yields it."""

    chunks: Prompt

    def select(self, x: Tensor) -> Tensor:
        """Return the prompt's last token of x (B, C, E), on all ranks: (B, 1, E) with the last
        chunk, none before.
        """
        if self is not self.chunks.chunks[-1]:
            return x[:, :0]
        sp, layout = self.chunks.sp, self.chunks.layout.layouts[self.number]
        last = sp.with_layout("contiguous").unshard(x[:, -1:], sp.size)  # of each rank
        at = layout.seq_len - 1
        [owner] = (r for r in range(sp.size) if any(at in some for some in layout.shards[r]))
        return last[:, owner : owner + 1]

    @not_compiled
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Do what Chunk.attend does, and keep sums of keys for sparse attention."""
        out = super().attend(layer, q, k, v, window, **options)
        if (sparse := options.get("sparse")) is not None:
            layout = self.chunks.layout.layouts[self.number]
            whole = self.chunks.sp.with_layout(layout).unshard(autocast(k), layout.seq_len)
            self.chunks.add_sums(layer, whole, sparse)
        return out


@contextlib.contextmanager
def reserve_memory(tokens: int) -> Iterator[None]:
    """Raise ValueError instead of torch's RuntimeError if memory does not suffice inside."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(
            f"not enough memory for the keys and values of {tokens:,} tokens: expected a smaller "
            "limit of the cache, or more ranks"
        ) from error


def refuse_nope(sparse: InfLLMV2 | None) -> None:
    """Raise ValueError for sparse attention that chooses by keys without rotary positions."""
    if sparse is not None and sparse.use_nope:
        raise ValueError(
            f"a Cache keeps rotated keys only: expected sparse attention without use_nope, got "
            f"{sparse}"
        )
