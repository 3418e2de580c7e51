"""Tiles, and the kernel calls that compute them. Plain numbers, no torch.

Tiles that share neither queries nor keys and have the same kind of band form one call, as
FlashAttention's variable-length functions take them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .span import Span, length


class Tile(NamedTuple):
    """A rectangle of pairs. Query a of `q` sees key b of `kv` if low <= a - b < high, both counted
    from the rectangle's corner. A bound of None hides nothing.
    """

    q: Span
    kv: Span
    low: int | None = None
    high: int | None = None


# A tile as a plain tuple. Functions accept either. Striped layouts have very many tiles, and the
# garbage collector scans named tuples again and again, but plain ones only once or twice.
TileFields = tuple[Span, Span, int | None, int | None]


def flipped(tile: TileFields) -> TileFields:
    """Exchange queries and keys of a tile or a slice."""
    q, kv, low, high = tile
    return kv, q, None if high is None else 1 - high, None if low is None else 1 - low


@dataclass(frozen=True)
class KernelCall:
    """One kernel call on q (B, S, ...) and k, v (B, T, ...).

    q_tokens, kv_tokens  S and T
    tiles                (q span, kv span) of each tile, rising and without overlap on both sides
    left, right          the band. Count a tile's queries a and keys b backwards from the last,
                         which is 0, so that they are negative. Query a sees key b if
                         a - left <= b <= a + right. None: no bound. Causal is right=0. A sliding
                         window of w tokens is left=w - 1, right=0.
    """

    q_tokens: int
    kv_tokens: int
    tiles: tuple[tuple[Span, Span], ...]
    left: int | None = None
    right: int | None = None
    # results that kernels keep for this call
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def whole(tokens: int, kv_tokens: int | None = None, causal: bool = False) -> KernelCall:
        """Return the call of one tile with all tokens."""
        kv_tokens = tokens if kv_tokens is None else kv_tokens
        tile = (0, tokens), (0, kv_tokens)
        return KernelCall(tokens, kv_tokens, (tile,), right=0 if causal else None)

    @property
    def is_whole(self) -> bool:
        """Whether it is one tile of all tokens that is full, or causal and square."""
        if self.left is not None or self.tiles != (((0, self.q_tokens), (0, self.kv_tokens)),):
            return False
        return self.right is None or (self.right == 0 and self.q_tokens == self.kv_tokens)

    @property
    def is_causal(self) -> bool:
        """Whether its tiles are causal, without a window."""
        return self.right == 0 and self.left is None

    def sequences(self) -> tuple[tuple[Span, Span], ...]:
        """Return the tiles and the gaps between them, in order: all queries and all keys. A gap has
        no tokens on one side.
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
