"""The plan of a call: what its ranks agree on, and what follows from it about sizes and routes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor

from .groups import Rings
from .kernels import Kernel
from .layout import Layout
from .merge import accumulator_dtype
from .packing import Packing
from .routes import Routes
from .schedule import Schedule

_ENOUGH_ROWS = 1 << 18  # rows of queries, over all heads, that keep a GPU busy: some sixteen tiles for each SM


@dataclass(frozen=True)
class Plan:
    """All that the ring needs to know besides the tensors; the same on every rank but for the rank itself.

    backward     "q" or "kv": the side that travels in the backward
    send_out     in a "q" backward let out travel itself instead of delta = rowsum(out * dout)
    group_bytes  most bytes of travelling blocks in one group, at least one block of one kv head
    """

    layout: Layout
    schedule: Schedule
    rings: Rings
    kernel: Kernel
    scale: float
    causal: bool
    backward: str
    send_out: bool
    deterministic: bool
    group_bytes: int

    @property
    def rank(self) -> int:
        return self.rings.rank

    @property
    def kernel_options(self) -> dict:
        return {"scale": self.scale, "deterministic": self.deterministic}

    def routes(self, travels: str, packing: Packing, returning: bool) -> Routes:
        """The routes of blocks packed so, and of their gradients if those are `returning`."""
        width = min(max(self.group_bytes // self._block_bytes(packing), 1), self.rings.inner.size)
        return Routes(self.layout, self.schedule, self.causal, travels, width, returning)

    def passes(self, travels: str, q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
        """The parts of q's and k's heads that go round one after the other: a block of a part is within group_bytes.

        If one part does not do, two blocks are to be within group_bytes as long as kernels have enough to do: sums are
        folded less often then, and take less memory. A part is at least one kv head, whatever that is in bytes.
        """
        kv_heads, ratio = k.shape[2], q.shape[2] // k.shape[2]
        most = kv_heads
        if self.rings.size > 1:
            most = max(kv_heads * self.group_bytes // self._block_bytes(self.packing(travels, q, k)), 1)
        if most < kv_heads:
            enough = -(-_ENOUGH_ROWS // (q.shape[0] * self._most_tokens * ratio))
            most = min(most, max(most // 2, enough))
        parts = -(-kv_heads // most)
        cuts = itertools.pairwise(kv_heads * i // parts for i in range(parts + 1))
        return [(slice(a * ratio, b * ratio), slice(a, b)) for a, b in cuts]

    def packing(self, travels: str, q: Tensor, k: Tensor) -> Packing:
        """Of what travels: k and v, or q, dout and (lse, delta) side by side, or q, dout, lse and out."""
        heads, wide = q.shape[2], accumulator_dtype(q.dtype)
        q_row, k_row = (tuple(q.shape[2:]), q.dtype), (tuple(k.shape[2:]), k.dtype)
        if travels == "kv":
            return Packing(q.shape[0], (k_row, k_row))
        if self.send_out:
            return Packing(q.shape[0], (q_row, q_row, ((heads,), wide), q_row))
        return Packing(q.shape[0], (q_row, q_row, ((2 * heads,), wide)))

    def return_packing(self, q: Tensor, k: Tensor) -> Packing:
        """Of the gradients that come home in the backward, as the kernel makes them."""
        partial = self.kernel.partial_dtype(q.dtype)
        if self.backward == "kv":
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
