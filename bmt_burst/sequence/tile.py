"""What one kernel call computes: tiles of (query, key) pairs, and the calls that cover any set of
tiles.

A tile is a rectangle of which a band along the diagonal is visible. Tiles that share neither
queries nor keys and whose bands are cut alike are one call, as the variable-length functions of
FlashAttention take it. Plain numbers, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .span import Span, length


class Tile(NamedTuple):
    """Query a of `q` sees key b of `kv`, counted from the tile's corner, iff low <= a - b < high;
    None: no bound.
    """

    q: Span
    kv: Span
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class KernelCall:
    """One kernel call on q (B, S, ...) and k, v (B, T, ...).

    q_tokens, kv_tokens  S and T
    tiles                (q span, kv span) of each tile, rising and without overlap on both sides
    left, right          a tile's query a, counted back from its last one, sees key b, counted back
                         from its last one, iff a + right >= b and b >= a - left, in negative
                         numbers: 0 is the last one. None: no bound. So causal is right=0, a sliding
                             window of w tokens left=w - 1, right=0
    """

    q_tokens: int
    kv_tokens: int
    tiles: tuple[tuple[Span, Span], ...]
    left: int | None = None
    right: int | None = None
    # what kernels keep for it
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def whole(tokens: int, kv_tokens: int | None = None, causal: bool = False) -> KernelCall:
        """One tile of everything."""
        kv_tokens = tokens if kv_tokens is None else kv_tokens
        return KernelCall(
            tokens, kv_tokens, (((0, tokens), (0, kv_tokens)),), None, 0 if causal else None
        )

    @property
    def is_whole(self) -> bool:
        """Whether it is one tile of everything, with a band that plain kernels know: full, or
        causal and square.
        """
        if self.left is not None or self.tiles != (((0, self.q_tokens), (0, self.kv_tokens)),):
            return False
        return self.right is None or (self.right == 0 and self.q_tokens == self.kv_tokens)

    @property
    def is_causal(self) -> bool:
        return self.right == 0 and self.left is None

    def sequences(self) -> tuple[tuple[Span, Span], ...]:
        """The tiles, and between them the tokens that no tile has, each gap as a tile without
        tokens on one side.

        Together they are all queries and all keys, in order.
        """
        found: list[tuple[Span, Span]] = []
        q_at = kv_at = 0
        ends = ((self.q_tokens, self.q_tokens), (self.kv_tokens, self.kv_tokens))
        for q, kv in (*self.tiles, ends):
            if q_at < q[0]:
                found.append(((q_at, q[0]), (kv_at, kv_at)))
            if kv_at < kv[0]:
                found.append(((q[0], q[0]), (kv_at, kv[0])))
            if length(q) and length(kv):
                found.append((q, kv))
            q_at, kv_at = q[1], kv[1]
        return tuple(found)
