"""Layouts: which token positions a rank owns, and what a query block sees of a kv block.

A layout cuts one sequence of `seq_len` tokens over `size` ranks. A rank's shard is one or two *runs*, arithmetic
progressions of positions; everything else (positions for RoPE, sharding, labels, the visible part of a pair of
blocks) derives from the runs. Any length works: blocks may differ by one token, nothing is padded or dropped.

    zigzag      the sequence in 2 * size chunks; rank r owns chunks r and 2 * size - 1 - r (equal causal work)
    striped     rank r owns positions r, r + size, r + 2 * size, ... (equal causal work)
    contiguous  the sequence in size chunks; rank r owns chunk r (unequal causal work; for non-causal attention)

Chunks are cut as torch.tensor_split cuts: the first `seq_len % chunks` are one token longer.

Pure functions: no torch.distributed, no CUDA. Try `print(Layout("zigzag", 10, 2))`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .arguments import as_int, check_dim

IGNORE_INDEX = -100
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)  # dtypes that can hold it


@dataclass(frozen=True)
class Run:
    """Positions `start, start + step, ...`, `length` of them, stored from index `offset` of the shard on."""

    start: int
    step: int
    length: int
    offset: int

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        return torch.arange(self.start, self.start + self.step * self.length, self.step, device=device)


@dataclass(frozen=True)
class Tile:
    """A rectangle of (query, key) pairs to attend to in one kernel call, in indices local to the two shards.

    `q` and `kv` are half-open (start, stop). A causal tile is square and query i sees keys 0..i of the tile; in any
    other tile every query sees every key.
    """

    q: tuple[int, int]
    kv: tuple[int, int]
    causal: bool


def _zigzag(seq_len: int, size: int, rank: int) -> list[range]:
    chunks = _split(seq_len, 2 * size)
    return [chunks[rank], chunks[2 * size - 1 - rank]]


def _striped(seq_len: int, size: int, rank: int) -> list[range]:
    return [range(rank, seq_len, size)]


def _contiguous(seq_len: int, size: int, rank: int) -> list[range]:
    return [_split(seq_len, size)[rank]]


LAYOUTS = {"zigzag": _zigzag, "striped": _striped, "contiguous": _contiguous}


@dataclass(frozen=True)
class Layout:
    """How `seq_len` tokens lie on `size` ranks. See the module's docstring for the names.

    Raises ValueError for an unknown name, a size below 1, or a sequence of fewer tokens than ranks, TypeError for what
    is no name or no whole number.
    """

    name: str
    seq_len: int
    size: int

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise TypeError(f"a layout is one of {sorted(LAYOUTS)}, got {type(self.name).__name__}")
        for name in ("seq_len", "size"):
            object.__setattr__(self, name, as_int(name, getattr(self, name)))
        if self.name not in LAYOUTS:
            raise ValueError(f"unknown layout {self.name!r}; expected one of {sorted(LAYOUTS)}")
        if self.size < 1:
            raise ValueError(f"a layout needs at least one rank, got size={self.size}")
        if self.seq_len < self.size:
            raise ValueError(
                f"a sequence of {self.seq_len} tokens is too short for {self.size} ranks; the smallest is {self.size}"
            )

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: {self.positions(r).tolist()}" for r in range(self.size))

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - a layout is small, frozen and hashable
    def runs(self, rank: int) -> tuple[Run, ...]:
        """The runs of `rank`'s shard, in storage order; their positions increase from the first to the last."""
        if not 0 <= as_int("rank", rank) < self.size:
            raise ValueError(f"rank {rank} is outside a layout of {self.size} ranks")
        runs, offset = [], 0
        for positions in LAYOUTS[self.name](self.seq_len, self.size, rank):
            if len(positions):
                runs.append(Run(positions.start, positions.step, len(positions), offset))
                offset += len(positions)
        return tuple(runs)

    def length(self, rank: int) -> int:
        """Tokens of `rank`'s shard."""
        return sum(run.length for run in self.runs(rank))

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Global position ids of `rank`'s shard in storage order: (S_local,) int64."""
        return torch.cat([run.positions(device) for run in self.runs(rank)])

    @functools.lru_cache(maxsize=65536)  # noqa: B019
    def tile(self, q_rank: int, kv_rank: int, causal: bool) -> Tile | None:
        """All that `q_rank`'s queries see of `kv_rank`'s keys, or None. One tile is enough in every layout."""
        if not causal or q_rank == kv_rank:  # a shard's own positions increase, so its own tile is a plain triangle
            return Tile((0, self.length(q_rank)), (0, self.length(kv_rank)), causal)
        pairs = itertools.product(self.runs(q_rank), self.runs(kv_rank))
        tiles = _coalesce([tile for q, kv in pairs for tile in _visible(q, kv)])
        assert len(tiles) <= 1, f"{self.name} needs {len(tiles)} tiles"
        return tiles[0] if tiles else None

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The part of `x` that `rank` owns, cut along `dim` (of seq_len entries). Differentiable; a copy."""
        dim = check_dim(x, dim)
        if x.shape[dim] != self.seq_len:
            raise ValueError(f"dimension {dim} of {tuple(x.shape)} has {x.shape[dim]} tokens, not {self.seq_len}")
        return x.index_select(dim, self.positions(rank, x.device))

    def unshard(self, shards: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole of what `shard` cut: `shards` of all ranks, in rank order, joined along `dim`."""
        lengths, given = [self.length(r) for r in range(self.size)], [s.shape[check_dim(s, dim)] for s in shards]
        if given != lengths:
            raise ValueError(f"shards have {given} tokens, expected {lengths}")
        order = torch.cat([self.positions(r) for r in range(self.size)]).argsort()
        return torch.cat(list(shards), dim).index_select(dim, order.to(shards[0].device))


def shard(x: Tensor, rank: int, size: int, dim: int = 1, layout: str = "zigzag") -> Tensor:
    """Cuts `x` along `dim` and returns the part of `rank` out of `size`. Any dtype, any other dimensions."""
    dim = check_dim(x, dim)
    return Layout(layout, x.shape[dim], size).shard(x, rank, dim)


def unshard(shards: Sequence[Tensor], dim: int = 1, layout: str = "zigzag") -> Tensor:
    """Joins the shards of all ranks, given in rank order: the inverse of `shard`."""
    return Layout(layout, sum(s.shape[check_dim(s, dim)] for s in shards), len(shards)).unshard(shards, dim)


def shift_labels(tokens: Tensor, dim: int = -1) -> Tensor:
    """Next-token labels of a whole, unsharded sequence: label t is token t + 1, the last is IGNORE_INDEX (-100).

    Shift first and shard after: a shard's last token has its successor on another rank. Raises TypeError for tokens
    of a dtype without negative numbers, ValueError if there is no dimension `dim`.
    """
    dim = check_dim(tokens, dim)
    if tokens.dtype not in SIGNED:
        raise TypeError(f"labels need a signed integer dtype, got {tokens.dtype}")
    last = torch.full_like(tokens.narrow(dim, 0, 1), IGNORE_INDEX)
    return torch.cat([tokens.narrow(dim, 1, tokens.shape[dim] - 1), last], dim)


def _split(seq_len: int, chunks: int) -> list[range]:
    small, longer = divmod(seq_len, chunks)
    bounds = [i * small + min(i, longer) for i in range(chunks + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def _visible(q: Run, kv: Run) -> list[Tile]:
    """The causal part of a pair of runs of equal step: at most a rectangle, a triangle and a rectangle below it.

    Query a sees key b iff kv.start + step * b <= q.start + step * a, that is b <= a + lead.
    """
    lead = (q.start - kv.start) // q.step
    row = max(0, -lead)  # earlier queries see nothing
    column = min(max(0, lead), kv.length)  # earlier keys are seen by every query
    side = max(0, min(q.length - row, kv.length - column))
    tiles = []
    if column:
        tiles.append(_tile(q, kv, (0, q.length), (0, column), False))
    if side:
        tiles.append(_tile(q, kv, (row, row + side), (column, column + side), True))
        if row + side < q.length:
            tiles.append(_tile(q, kv, (row + side, q.length), (column, column + side), False))
    return tiles


def _tile(q: Run, kv: Run, rows: tuple[int, int], columns: tuple[int, int], causal: bool) -> Tile:
    """A tile in shard indices from one in run indices."""
    return Tile((rows[0] + q.offset, rows[1] + q.offset), (columns[0] + kv.offset, columns[1] + kv.offset), causal)


def _coalesce(tiles: list[Tile]) -> list[Tile]:
    for a, b in itertools.permutations(tiles, 2):
        if a.causal or b.causal:
            continue
        if a.q == b.q and a.kv[1] == b.kv[0]:
            joined = Tile(a.q, (a.kv[0], b.kv[1]), False)
        elif a.kv == b.kv and a.q[1] == b.q[0]:
            joined = Tile((a.q[0], b.q[1]), a.kv, False)
        else:
            continue
        return _coalesce([joined, *(t for t in tiles if t not in (a, b))])
    return tiles
