"""Names of yunchang 0.6.4 (feifeibear/long-context-attention, or USP), computed by this library.

In a grid of Ulysses of degree U times a ring of degree R, rank s of a sequence has part u of U of
shard r of the ring. A shard is chunk r ("basic"), tokens r, r + R, r + 2R, ... ("strip"), or chunks
r and 2R - 1 - r of 2R ("zigzag"). r, u = s // U, s % U. With use_ulysses_low=False "zigzag" takes
the rank's places in the groups, r, u = s % R, s // R.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from ...base.arguments import as_bool, as_int
from ...ranks.agreement import agree
from ...ranks.groups import cut_world, make_group
from ...ranks.rings import Group, Rings
from ...sequence.layout import Layout
from ...transport import ALONE
from ...transport.torch_dist import torch_transport
from .. import ring_flash_attn as ring
from ..flash import Bounds, make_function
from ..ring_flash_attn import *  # noqa: F403

# The groups of this rank. SEQUENCE_PG, all ranks that share a sequence, is not in yunchang.
PROCESS_GROUP = SimpleNamespace(ULYSSES_PG=None, RING_PG=None, SEQUENCE_PG=None, grid=None)
# The names of kernels. Each exact one means flash="auto" here, the fastest kernel.
AttnType = StrEnum(
    "AttnType",
    "AITER FA FA3 FLASHINFER TORCH TORCH_MATH TORCH_FLASH TORCH_EFFICIENT TORCH_CUDNN SAGE_AUTO "
    "SAGE_FP16 SAGE_FP16_TRITON SAGE_FP8 SAGE_FP8_SM90 SPARSE_SAGE NPU",
)

_SHARDS = {"basic": "contiguous", "strip": "striped", "zigzag": "zigzag"}  # layouts of the ring


def _describe_unknown(kind: object) -> str:
    plain, bound, _ = str(kind).partition("_")
    hint = f": kinds bound to a kernel are missing, and {plain!r} takes the fastest one"
    return f"must be in {[*_SHARDS]}, got {kind!r}{hint if bound and plain in _SHARDS else ''}"


class _ByKind(dict[str, Any]):
    """Functions by the kind of their shards. Raises KeyError for an unknown kind."""

    def __missing__(self, kind: str) -> NoReturn:
        raise KeyError(f"the kind of shards {_describe_unknown(kind)}")


def set_seq_parallel_pg(
    sp_ulysses_degree: int,
    sp_ring_degree: int,
    rank: int,
    world_size: int,
    use_ulysses_low: bool = True,
) -> None:
    """Make the groups in PROCESS_GROUP. Every rank must call it, with the same degrees.

    Consecutive ranks share a sequence, and of these consecutive ones are a Ulysses group, or with
    use_ulysses_low=False a ring. Wrong arguments of a rank raise on all ranks.
    """
    if dist.group.WORLD is None:
        raise RuntimeError("call torch.distributed.init_process_group before set_seq_parallel_pg")
    world = torch_transport(dist.group.WORLD)

    def terms() -> dict[str, Any]:
        ulysses = as_int("sp_ulysses_degree", sp_ulysses_degree)
        ring = as_int("sp_ring_degree", sp_ring_degree)
        if (rank, world_size) != (world.rank, world.size):
            expected = f"{world.rank} of {world.size}"
            raise ValueError(f"expected rank {expected}, got {rank} of {world_size}")
        if min(ulysses, ring) < 1 or world.size % (ulysses * ring):
            raise ValueError(f"{ulysses} x {ring} ranks do not divide the world of {world.size}")
        low = as_bool("use_ulysses_low", use_ulysses_low)
        return {"sp_ulysses_degree": ulysses, "sp_ring_degree": ring, "use_ulysses_low": low}

    [given, *_] = agree(Rings(world, ALONE), "set_seq_parallel_pg", terms)
    ulysses, ring = given["sp_ulysses_degree"], given["sp_ring_degree"]
    low = given["use_ulysses_low"]
    size, inner = ulysses * ring, ulysses if low else ring
    sequences, consecutive, strided = cut_world(world.size, size, inner)
    near, far, whole = (make_group(world, parts) for parts in (consecutive, strided, sequences))
    PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG = (near, far) if low else (far, near)
    PROCESS_GROUP.SEQUENCE_PG, PROCESS_GROUP.grid = whole, (ulysses, ring, low)


def _find_grid() -> Any:
    if PROCESS_GROUP.grid is None:
        raise RuntimeError("call set_seq_parallel_pg first: it makes the groups of ranks")
    return PROCESS_GROUP.grid


class Extracted(Layout):
    """The layout of a kind of shards in a grid. All ranks have equally many tokens."""

    def __init__(self, kind: str, seq_len: int, ulysses: int, ring: int, ulysses_low: bool):
        super().__init__(seq_len, ulysses * ring)
        self.name, self.grid = kind, (ulysses, ring, ulysses_low)
        parts = math.lcm(self.size, 2 * ring if kind == "zigzag" else 1)
        if seq_len % parts:
            raise ValueError(f"{kind}: expected a multiple of {parts} tokens, got {seq_len}")

    def ranges(self, rank: int) -> Sequence[range]:
        ulysses, ring, ulysses_low = self.grid
        r, u = divmod(rank, ulysses)
        if self.name == "zigzag" and not ulysses_low:
            u, r = divmod(rank, ring)
        runs = Layout.named(_SHARDS[self.name], self.seq_len, ring).ranges(r)
        tokens = self.seq_len // self.size
        starts = itertools.accumulate(map(len, runs), initial=-u * tokens)  # from the part's
        spans = [(max(-start, 0), max(tokens - start, 0)) for start in starts]
        return [run[start:stop] for run, (start, stop) in zip(runs, spans, strict=False)]


make_extracted = functools.lru_cache(maxsize=64)(Extracted)  # layers and calls repeat them


def _extract(
    kind: str, value: Tensor, rank: int, world_size: int, rd: int = 1, ud: int = 1, dim: int = 1
) -> Tensor:
    """Return a copy of the part of value (B, S, ...) of `rank`. "zigzag" takes this rank instead.
    "basic" needs no groups, ignores rd, ud and dim, and is without gradient.
    """
    if kind == "basic":
        layout = make_extracted(kind, value.shape[1], 1, world_size, True)
        return layout.shard(value.detach(), rank)
    ulysses, ring, low = _find_grid()
    if (rd, ud, world_size) != (ring, ulysses, ring * ulysses):
        raise ValueError(
            f"expected rd={ring}, ud={ulysses} and their product as world_size, as "
            f"set_seq_parallel_pg made the groups, got rd={rd}, ud={ud}, world_size={world_size}"
        )
    place = PROCESS_GROUP.SEQUENCE_PG.rank() if kind == "zigzag" else rank
    return make_extracted(kind, value.shape[dim], ulysses, ring, low).shard(value, place, dim)


EXTRACT_FUNC_DICT = _ByKind((kind, functools.partial(_extract, kind)) for kind in _SHARDS)
basic_extract_local, stripe_extract_local, zigzag_extract_local = EXTRACT_FUNC_DICT.values()


class UlyssesAttention(nn.Module):
    """Attention over ranks that have contiguous chunks of the sequence. use_sync is ignored."""

    tensors: tuple[str, ...] = ("query", "key", "value")
    indices, strategy = (2, 1), "ulysses"

    def __init__(
        self,
        sequence_process_group: Group | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
    ):
        super().__init__()
        if (given := (scatter_idx, gather_idx)) != self.indices:
            raise ValueError(f"scatter_idx and gather_idx must be {self.indices}, got {given}")
        if not isinstance(attn_type, AttnType) or "sage" in attn_type:
            raise ValueError(f"attn_type must be an AttnType that is exact, got {attn_type!r}")
        fixed: dict[str, Any] = {"group": sequence_process_group, "strategy": self.strategy}
        self.attend = make_function(type(self).__name__, self.tensors, self.place, **fixed)

    def place(self, rings: Rings, tokens: int, causal: bool) -> tuple[Bounds, str | Layout]:
        return (0, tokens * rings.size), "contiguous"

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """Return out. The arguments are `tensors`, and options of bmt_burst.compat.flash."""
        result = self.attend(*args, **named)
        return result[0] if isinstance(result, tuple) else result


class LongContextAttention(UlyssesAttention):
    """Attention over the last groups of set_seq_parallel_pg, with tokens of EXTRACT_FUNC_DICT."""

    strategy = "ring"  # of the ranks of both groups; use_pack_qkv and use_sync are ignored

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
        attn_processor: Any = None,
    ):
        if attn_processor is not None:
            raise ValueError(f"attn_processor must be None, got a {type(attn_processor).__name__}")
        if ring_impl_type not in _SHARDS:
            raise ValueError(f"ring_impl_type {_describe_unknown(ring_impl_type)}")
        grid, group = _find_grid(), PROCESS_GROUP.SEQUENCE_PG
        super().__init__(group, scatter_idx, gather_idx, use_sync, attn_type)
        self.kind, self.grid = ring_impl_type, grid

    def place(self, rings: Rings, tokens: int, causal: bool) -> tuple[Bounds, Layout]:
        if self.kind != "basic" and not causal:
            raise ValueError(f"{self.kind} attention is causal: pass causal=True")
        layout = make_extracted(self.kind, tokens * rings.size, *self.grid)
        return (0, layout.seq_len), layout


class LongContextAttentionQKVPacked(LongContextAttention):
    """LongContextAttention of one tensor qkv (B, S, 3, H, D)."""

    tensors, indices = ("qkv",), (3, 1)

    def __init__(
        self,
        scatter_idx: int = 3,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
    ):
        super().__init__(scatter_idx, gather_idx, ring_impl_type, False, use_sync, attn_type)


AsyncLongContextAttention = LongContextAttention  # here all exchanges overlap computation
_RING_NAMES = {"basic": "ring", "strip": "stripe", "zigzag": "zigzag_ring"}
RING_IMPL_DICT, RING_IMPL_QKVPACKED_DICT = (
    _ByKind((kind, getattr(ring, f"{name}_flash_attn{form}")) for kind, name in _RING_NAMES.items())
    for form in ("_func", "_qkvpacked_func")
)
