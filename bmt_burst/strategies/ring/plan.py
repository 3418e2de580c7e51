"""The plan of a call: what its ranks agree on, and what follows from it about sizes and routes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor

from .kernels import Kernel
from .layout import Layout
from .merge import accumulator_dtype
from .packing import Packing
from .routes import Routes
from .schedule import Schedule

_ENOUGH_ROWS = 1 << 18  # rows of queries, over all heads, that keep a GPU busy: some sixteen tiles for each SM


@dataclass(frozen=True)
class Pass:
    """A way round the ring: the heads that go together, slices of q's and k's, how blocks are packed and where they go.

    return_packing  of the gradients that come home, None if none do
    """

    q: slice
    kv: slice
    packing: Packing
    return_packing: Packing | None
    routes: Routes

    @property
    def away(self) -> slice:
        """The heads of the side that travels."""
        return self.q if self.routes.travels == "q" else self.kv


@dataclass(frozen=True)
class Plan:
    """All that the ring needs to know besides tensors and rings; the same on every rank but for the rank itself.

    backward     "q" or "kv": the side that travels in the backward
    send_out     in a "q" backward let out travel itself instead of delta = rowsum(out * dout)
    group_bytes  most bytes of travelling blocks in one group, at least one block of one kv head
    """

    layout: Layout
    schedule: Schedule
    rank: int
    kernel: Kernel
    scale: float
    causal: bool
    backward: str
    send_out: bool
    deterministic: bool
    group_bytes: int

    @property
    def kernel_options(self) -> dict:
        return {"scale": self.scale, "deterministic": self.deterministic}

    def passes(self, travels: str, q: Tensor, k: Tensor, returning: bool) -> list[Pass]:
        """The passes in which blocks go round, none if there is nobody else; `returning` if their gradients come back.

        Each has as few heads as let the blocks of a whole ring come in one group, which makes partial results few and
        kernel calls large, but enough heads to keep a GPU busy; a single block is within group_bytes in any case, down
        to one kv head, whatever that is in bytes.
        """
        if self.layout.size == 1:
            return []
        (batch, _, heads, _), kv_heads = q.shape, k.shape[2]
        ratio, ring = heads // kv_heads, max(self.schedule.inner - 1, 1)
        within = self.group_bytes * kv_heads // self._block_bytes(self._packing(travels, q, k))  # heads of one block
        enough = -(-_ENOUGH_ROWS // (batch * self._most_tokens * ratio))
        most = min(max(within // ring, enough), max(within, 1), kv_heads)
        count = -(-kv_heads // most)
        cuts = itertools.pairwise(kv_heads * i // count for i in range(count + 1))
        parts = [(slice(a * ratio, b * ratio), slice(a, b)) for a, b in cuts]
        return [self._pass(travels, q[:, :, at], k[:, :, kv_at], returning, at, kv_at) for at, kv_at in parts]

    def _pass(self, travels: str, q: Tensor, k: Tensor, returning: bool, at: slice, kv_at: slice) -> Pass:
        """The pass of q's and k's heads `at` and `kv_at`; q and k have no others."""
        packing = self._packing(travels, q, k)
        width = min(max(self.group_bytes // self._block_bytes(packing), 1), self.schedule.inner)
        routes = Routes(self.layout, self.schedule, self.causal, travels, width, returning)
        return Pass(at, kv_at, packing, self._return_packing(travels, q, k) if returning else None, routes)

    def _packing(self, travels: str, q: Tensor, k: Tensor) -> Packing:
        """Of what travels: k and v, or q, dout and (lse, delta) side by side, or q, dout, lse and out."""
        heads, wide = q.shape[2], accumulator_dtype(q.dtype)
        q_row, k_row = (tuple(q.shape[2:]), q.dtype), (tuple(k.shape[2:]), k.dtype)
        if travels == "kv":
            return Packing(q.shape[0], (k_row, k_row))
        if self.send_out:
            return Packing(q.shape[0], (q_row, q_row, ((heads,), wide), q_row))
        return Packing(q.shape[0], (q_row, q_row, ((heads, 2), wide)))

    def _return_packing(self, travels: str, q: Tensor, k: Tensor) -> Packing:
        """Of the gradients that come home in the backward, as the kernel makes them."""
        partial = self.kernel.partial_dtype(q.dtype)
        if travels == "kv":
            return Packing(q.shape[0], ((tuple(k.shape[2:]), partial),) * 2)
        return Packing(q.shape[0], ((tuple(q.shape[2:]), partial),))

    def _block_bytes(self, packing: Packing) -> int:
        return packing.token_bytes() * self._most_tokens

    @property
    def _most_tokens(self) -> int:
        """Tokens of the rank that has most, on every rank."""
        return -(-self.layout.seq_len // self.layout.size)


def travelling_bytes(kernel: Kernel, q: Tensor, k: Tensor, send_out: bool = False) -> dict[str, int]:
    """Bytes per token and hop, there and back, if the q side or the kv side travels: what backward="auto" compares.

    Without what a causal mask saves, which is alike on both sides. What crosses between hosts is as much per token.
    """
    itemsize, partial = q.dtype.itemsize, kernel.partial_dtype(q.dtype).itemsize
    heads, kv_heads, head_size = q.shape[2], k.shape[2], q.shape[3]
    lse = heads * accumulator_dtype(q.dtype).itemsize
    out_or_delta = heads * head_size * itemsize if send_out else lse
    return {
        "q": heads * head_size * (2 * itemsize + partial) + lse + out_or_delta,
        "kv": 2 * kv_heads * head_size * (itemsize + partial),
    }
