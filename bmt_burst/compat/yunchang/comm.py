"""The layouts of tokens on ranks, and functions that cut a whole sequence by them.

In a grid of Ulysses of degree U times a ring of degree R, number s of the U * R ranks has of a
sequence:

    basic     chunk s of U * R
    strip     part u of U of tokens r, r + R, r + 2R, ..., where r, u = s // U, s % U
    zigzag    part u of U of chunks r and 2R - 1 - r of 2R together, where r is its rank in the ring
              and u its rank in the Ulysses group

Without use_ulysses_low, yunchang's own layers do not follow its `basic` and `strip` functions: they
apply a causal mask to other positions. The layers here always follow the functions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...base.arguments import as_int, check_dim
from ...sequence.layout import Layout
from .globals import Grid, current_grid

_MOST_LAYOUTS = 64  # that are kept


class Extracted(Layout):
    """The layout of the extract function of a `kind`: "basic", "strip" or "zigzag".

    Raises ValueError if the tokens cannot be cut in equal parts.
    """

    def __init__(self, kind: str, seq_len: int, ulysses: int, ring: int, ulysses_low: bool):
        super().__init__(seq_len, ulysses * ring)
        self.name, self.ulysses, self.ring, self.ulysses_low = kind, ulysses, ring, ulysses_low
        if self.seq_len % self.size or (kind == "zigzag" and self.seq_len % (2 * ring)):
            parts = f"{self.size} equal parts" + f", or {2 * ring}" * (kind == "zigzag")
            raise ValueError(f"{kind}: {self.seq_len} tokens cannot be cut in {parts}")

    def ranges(self, rank: int) -> Sequence[range]:
        tokens, ring = self.seq_len // self.size, self.ring
        if self.name == "basic":
            return [range(rank * tokens, (rank + 1) * tokens)]
        if self.name == "strip":
            of_ring, part = divmod(rank, self.ulysses)
            return [range(self.seq_len)[of_ring::ring][part * tokens : (part + 1) * tokens]]
        of_ring, part = divmod(rank, self.ulysses) if self.ulysses_low else divmod(rank, ring)[::-1]
        chunk = self.seq_len // (2 * ring)
        early, late = (
            range(at * chunk, (at + 1) * chunk) for at in (of_ring, 2 * ring - 1 - of_ring)
        )
        start, stop = part * tokens, (part + 1) * tokens
        return [early[start:stop], late[max(start - chunk, 0) : max(stop - chunk, 0)]]

    def __repr__(self) -> str:
        return f"<{self.name} of {self.seq_len} tokens on {self.ulysses} x {self.ring} ranks>"


@functools.lru_cache(maxsize=_MOST_LAYOUTS)
def extracted_layout(
    kind: str, seq_len: int, ulysses: int, ring: int, ulysses_low: bool
) -> Extracted:
    """Return an Extracted layout, made once for all layers and calls."""
    return Extracted(kind, seq_len, ulysses, ring, ulysses_low)


def basic_extract_local(
    value: Tensor, rank: int, world_size: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Return chunk `rank` of `world_size` of value (B, S, ...), without gradient. Other arguments
    are ignored.
    """
    return _extract("basic", value, rank, 1, as_int("world_size", world_size)).detach()


def stripe_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int, ud: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Return a copy of the part of value (B, S, ...) of `rank`, in a ring of `rd` times Ulysses of
    `ud`.

    Raises ValueError if PROCESS_GROUP has other degrees, or if world_size is not their product.
    """
    _check_degrees(world_size, rd, ud)
    return _extract("strip", value, rank, ud, rd)


def zigzag_extract_local(
    value: Tensor,
    rank: int,
    world_size: int,
    rd: int,
    ud: int,
    dim: int = 1,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Return a copy of this rank's part of value (B, S, ...), cut along `dim`. PROCESS_GROUP says
    which rank this is, and `rank` is ignored.

    Raises ValueError if PROCESS_GROUP has other degrees, or if world_size is not their product.
    """
    grid = _check_degrees(world_size, rd, ud)
    return _extract("zigzag", value, dist.get_rank(grid.sequence), ud, rd, dim, grid.ulysses_low)


EXTRACT_FUNC_DICT = {
    "basic": basic_extract_local,
    "strip": stripe_extract_local,
    "zigzag": zigzag_extract_local,
}


def _extract(
    kind: str,
    value: Tensor,
    rank: int,
    ulysses: int,
    ring: int,
    dim: int = 1,
    ulysses_low: bool = True,
) -> Tensor:
    dim = check_dim(value, dim)
    layout = extracted_layout(kind, value.shape[dim], ulysses, ring, ulysses_low)
    return layout.shard(value, rank, dim)


def _check_degrees(world_size: int, rd: int, ud: int) -> Grid:
    grid = current_grid()
    if (rd, ud) != (grid.ring, grid.ulysses) or world_size != rd * ud:
        raise ValueError(
            f"expected rd={grid.ring}, ud={grid.ulysses} and their product as world_size, as "
            f"set_seq_parallel_pg made the groups, got rd={rd}, ud={ud}, world_size={world_size}"
        )
    return grid
