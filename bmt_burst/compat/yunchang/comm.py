"""Which tokens a rank has, and functions that cut them out of a whole sequence.

Of ranks that are a Ulysses group of degree U times a ring of degree R, number s of the U * R has,
of a sequence that it shares with the others:

    basic     chunk s of U * R
    strip     part u of U of tokens r, r + R, r + 2R, ..., where r, u = s // U, s % U
    zigzag    part u of U of what chunks r and 2R - 1 - r of 2R have, one after the other, where r
              is its rank in the ring and u that in the Ulysses group

yunchang's own layers have `basic` and `strip` as these functions do only if consecutive ranks are a
Ulysses group (use_ulysses_low); else a causal mask is there one of other positions than the
functions give. Here it is not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...base.arguments import as_int, check_dim
from ...sequence.layout import Layout
from .globals import PROCESS_GROUP

_MOST_LAYOUTS = 64  # that are kept


class Extracted(Layout):
    """What the extract function of a `kind` of ring, "basic", "strip" or "zigzag", gives the ranks.

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
def extracted(kind: str, seq_len: int, ulysses: int, ring: int, ulysses_low: bool) -> Extracted:
    return Extracted(kind, seq_len, ulysses, ring, ulysses_low)


def basic_extract_local(
    value: Tensor, rank: int, world_size: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Chunk `rank` of `world_size` of value (B, S, ...), without gradient. Other arguments do not
    matter.
    """
    return _extract("basic", value, rank, 1, as_int("world_size", world_size)).detach()


def stripe_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int, ud: int, *args: Any, **kwargs: Any
) -> Tensor:
    """The part of value (B, S, ...) of `rank` among ranks that are a ring of `rd` times Ulysses of
    `ud`. A copy.

    Raises ValueError if PROCESS_GROUP has other degrees, or world_size is not their product.
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
    """The part of value (B, S, ...) of this rank, as PROCESS_GROUP has it, whatever `rank` is; cut
    along `dim`. A copy.

    Raises ValueError if PROCESS_GROUP has other degrees, or world_size is not their product.
    """
    _check_degrees(world_size, rd, ud)
    return _extract("zigzag", value, dist.get_rank(PROCESS_GROUP.SEQUENCE_PG), ud, rd, dim)


EXTRACT_FUNC_DICT = {
    "basic": basic_extract_local,
    "strip": stripe_extract_local,
    "zigzag": zigzag_extract_local,
    "basic_pytorch": basic_extract_local,
    "basic_flashinfer": basic_extract_local,
    "basic_npu": basic_extract_local,
}


def _extract(kind: str, value: Tensor, rank: int, ulysses: int, ring: int, dim: int = 1) -> Tensor:
    dim = check_dim(value, dim)
    return extracted(kind, value.shape[dim], ulysses, ring, PROCESS_GROUP.ULYSSES_LOW).shard(
        value, rank, dim
    )


def _check_degrees(world_size: int, rd: int, ud: int) -> None:
    if PROCESS_GROUP.SEQUENCE_PG is None:
        raise RuntimeError(
            "call set_seq_parallel_pg first: it makes the groups that the cut depends on"
        )
    made = dist.get_world_size(PROCESS_GROUP.RING_PG), dist.get_world_size(PROCESS_GROUP.ULYSSES_PG)
    if (rd, ud) != made or world_size != rd * ud:
        raise ValueError(
            f"rd={rd}, ud={ud}, world_size={world_size} were given, the groups are a ring of {made[0]} x {made[1]}"
        )
