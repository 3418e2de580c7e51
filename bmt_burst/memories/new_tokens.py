"""New tokens of a cache, which every rank computes: where their keys are, and merges over ranks.

Letters: B batch, S new tokens, T keys of a rank, H query heads, G kv heads, D head size, N partial
results.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..base.streams import send_to_device
from ..kernels.few_queries import find_kernels
from ..merging.parts import Partials
from ..ranks.rings import Rings
from ..ranks.sequence_parallel import SequenceParallel

BLOCK = 64  # neighbouring new tokens whose keys stay on one rank
_SIGNS = 8  # numbers by which ranks compare a new token


def count_own(sp: SequenceParallel, start: int, stop: int) -> int:
    """Return how many keys of new tokens at positions `start` to `stop` - 1 stay on this rank."""

    def before(position: int) -> int:
        rounds, rest = divmod(position, BLOCK * sp.size)
        return rounds * BLOCK + min(max(rest - sp.rank * BLOCK, 0), BLOCK)

    return before(stop) - before(start)


class Positions:
    """The positions of this rank's keys up to `limit`: int64, rising. They are computed once they
    are used, when there is memory for these keys.

    prompt    those of this rank's keys of the prompt
    start     the position of the first new token
    count     the number of keys so far
    prepared  what memories keep for all tokens, by kind
    """

    def __init__(self, sp: SequenceParallel, prompt: Tensor, start: int, limit: int):
        self.count, self.prompt = len(prompt), prompt
        self.sp, self.start, self.limit = sp, start, limit
        self.prepared: dict[Hashable, Any] = {}

    @functools.cached_property
    def on_host(self) -> Tensor:
        new = torch.arange(self.start, self.limit)
        return torch.cat((self.prompt, new[new // BLOCK % self.sp.size == self.sp.rank]))

    def on(self, device: torch.device) -> Tensor:
        if device not in self.prepared:
            self.prepared[device] = send_to_device(self.on_host, device)
        found: Tensor = self.prepared[device]
        return found

    def crop(self, length: int) -> None:
        """Take back the keys from position `length` on, which are of new tokens."""
        self.count = len(self.prompt) + count_own(self.sp, self.start, length)


class NewTokens:
    """The tokens that layers compute now, S of them. All ranks of `rings` have them.

    start      their first position
    stop       the position after the last one
    places     for each token, the place of its key in this rank's memory. -1: another rank keeps it
    stops      for each token, the number of this rank's keys up to it
    sent       int64 numbers on the keys' device, by `on`'s arguments
    prepared   what memories of a kind share
    given      (S,) or (B, S): their positions, if the model passed them
    differs    whether ranks have other tokens, () bool on a device. None: not compared
    """

    def __init__(self, rings: Rings, positions: Positions, start: int, tokens: int):
        self.rings, self.positions, self.start, self.stop = rings, positions, start, start + tokens
        size, rank, before = positions.sp.size, positions.sp.rank, positions.count
        own = [p // BLOCK % size == rank for p in range(start, self.stop)]
        self.stops = [before + count for count in itertools.accumulate(own)]
        self.places = [end - 1 if mine else -1 for end, mine in zip(self.stops, own, strict=True)]
        positions.count = self.stops[-1]
        self.sent: dict[tuple[Hashable, ...], Tensor] = {}
        self.prepared: dict[Any, Any] = {}
        self.given: Tensor | None = None
        self.differs: Tensor | None = None

    def on(self, device: torch.device, *what: Hashable) -> Tensor:
        """Return numbers about these tokens on a device: "first", (1,), "places", (S,), or "spans"
        and a window, (S, 2), each int64. A CUDA graph reads them at the same address in each step.
        """
        if what not in self.sent:
            self.sent[what] = send_to_device(torch.tensor(self.find(*what)), device)
        return self.sent[what]

    def find(self, what: Hashable, window: Any = None) -> list[Any]:
        """Return the numbers of `on`. A span is that of the keys of this rank that a token sees:
        the first key, and the key after the last one.
        """
        if what == "first":
            return [self.start]
        if what == "places":
            return self.places
        starts = [0] * len(self.stops)
        if window is not None:
            hidden = torch.arange(self.start, self.stop) - window
            starts = torch.searchsorted(self.positions.on_host, hidden, right=True).tolist()
        return [[start, stop] for start, stop in zip(starts, self.stops, strict=True)]

    def merge(self, parts: Partials, q: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """Merge all ranks' partial results in rank order. Return out (B, S, H, D), by default in
        the accumulator's dtype, and lse (B, S, H).
        """
        few, wide, rows = find_kernels(q), accumulator_dtype(q.dtype), q.shape[:-1]
        if self.rings.size > 1:
            sizes = q.numel(), rows.numel()
            mine = q.new_empty(sum(sizes), dtype=wide)
            out, lse = mine.split(sizes)
            few.merge(parts, out.view(q.shape), lse.view(rows))
            outs, lses = self.rings.gather_equal(mine).split(sizes, 1)
            parts = outs.view(-1, *q.shape), lses.view(-1, *rows)
        out, lse = q.new_empty(q.shape, dtype=dtype or wide), q.new_empty(rows, dtype=wide)
        few.merge(parts, out, lse)
        return out, lse

    def compare(self, k: Tensor, v: Tensor) -> None:
        """Set `differs` by the keys and values (B, S, G, D) of the first layer, and the given
        positions. The host does not wait for it.
        """
        if self.rings.size > 1 and self.differs is None:
            signs = self._sign(k, v)
            found = self.rings.gather_equal(signs.flatten())
            self.differs = _differ(found.view(-1, *signs.shape), v.dtype)

    def _sign(self, k: Tensor, v: Tensor) -> Tensor:
        """Return numbers that tell tokens apart, for each row: (N, B, S, 1 + _SIGNS)."""
        signs = [_sign(k), _sign(v)]
        if self.given is not None:  # compared exactly, as a token of norm 0
            at = self.given.to(signs[0]).expand(signs[0].shape[:-1]).unsqueeze(-1)
            signs.append(torch.cat((torch.zeros_like(at), at.expand(*at.shape[:-1], _SIGNS)), -1))
        return torch.stack(signs)


def _sign(x: Tensor) -> Tensor:
    """Return numbers that tell tokens x (B, S, G, D) apart, (B, S, 1 + _SIGNS): a token's norm, and
    its products with fixed numbers below 1, in which two tokens differ by about the norm.
    """
    flat = x.flatten(2).to(accumulator_dtype(x.dtype))
    factors = _factors(flat.shape[2], flat.dtype, flat.device)
    return torch.cat((flat.norm(dim=2, keepdim=True), flat @ factors), 2)


@functools.lru_cache(maxsize=8)
def _factors(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    at = torch.arange(1, width + 1, device=device, dtype=dtype).unsqueeze(1)
    return torch.cos(at * torch.arange(1, _SIGNS + 1, device=device) * 0.7548776662)


def _differ(signs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return whether ranks have other tokens, () bool, from the signs of all, ranks first. Kernels
    of ranks may differ, and so the rounding of the same tokens.
    """
    signs = signs.nan_to_num(0.0)  # a rank with NaN differs from one without
    rounding = max(32 * torch.finfo(dtype).eps, 1e-3) * signs[:1, ..., :1]
    return ((signs - signs[:1]).abs() > rounding).any()
