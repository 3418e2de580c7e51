"""Layouts: which token positions a rank owns.

A layout cuts one sequence of `seq_len` tokens over `size` ranks. A rank's shard is a few *runs*,
arithmetic progressions of positions, in rising order; everything else (positions for RoPE,
sharding, labels, what a rank sees of another) derives from the runs. Any length works: shards may
differ by one token, nothing is padded or dropped.

    zigzag      the sequence in 2 * size chunks; rank r owns chunks r and 2 * size - 1 - r (equal
                causal work)
    striped     rank r owns positions r, r + size, r + 2 * size, ... (equal work, also with
                documents; all travels)
    contiguous  the sequence in size chunks; rank r owns chunk r (equal work for full masks and for
                windows)
    balanced    equal tokens and equal work for a mask, with few documents cut: see
                bmt_burst.sequence.balance

Chunks are cut as torch.tensor_split cuts: the first `seq_len % chunks` are one token longer.

No torch.distributed, no CUDA. Try `print(Layout.zigzag(10, 2))`. A new layout is a class here.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.arguments import as_int, check_dim
from .balance import balanced_spans
from .mask import Mask

IGNORE_INDEX = -100
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)  # dtypes that can hold it


class Run(NamedTuple):
    """Positions `start, start + step, ...`, `length` of them, stored from index `offset` of the
    shard on.
    """

    start: int
    step: int
    length: int
    offset: int

    @property
    def stop(self) -> int:
        return self.start + self.step * self.length


class Layout(ABC):
    """How `seq_len` tokens lie on `size` ranks. Made by zigzag, striped, contiguous, balanced, or
    named.

    Equal to another one of the same kind that puts tokens in the same places. Prints the positions
    of each rank.

    Raises ValueError for a size below 1 or fewer tokens than ranks, TypeError for what is no whole
    number.
    """

    name: str

    def __init__(self, seq_len: int, size: int):
        self.seq_len, self.size = as_int("seq_len", seq_len), as_int("size", size)
        if self.size < 1:
            raise ValueError(f"a layout needs at least one rank, got size={self.size}")
        if self.seq_len < self.size:
            raise ValueError(
                f"a sequence of {self.seq_len} tokens is too short for {self.size} ranks; the smallest is {self.size}"
            )

    @staticmethod
    def named(name: str, seq_len: int, size: int) -> Layout:
        """The layout called `name`, one of LAYOUTS. Raises ValueError for an unknown one, TypeError
        for no name.
        """
        return layout_class(name)(seq_len, size)

    @staticmethod
    def zigzag(seq_len: int, size: int) -> Layout:
        """Rank r owns chunks r and 2 * size - 1 - r of 2 * size: equal work under a causal mask."""
        return Zigzag(seq_len, size)

    @staticmethod
    def striped(seq_len: int, size: int) -> Layout:
        """Rank r owns every size-th position from r on: equal work also with documents, but all
        tokens travel.
        """
        return Striped(seq_len, size)

    @staticmethod
    def contiguous(seq_len: int, size: int) -> Layout:
        """Rank r owns chunk r of size: equal work under a full mask and under windows."""
        return Contiguous(seq_len, size)

    @staticmethod
    def balanced(mask: Mask, size: int) -> Layout:
        """Equal tokens, to one, and nearly equal work under `mask`; whole documents on one rank
        where that can be.
        """
        if not isinstance(mask, Mask):
            raise TypeError(f"a balanced layout is one of a Mask, got {type(mask).__name__}")
        return Balanced(mask, size)

    @abstractmethod
    def ranges(self, rank: int) -> Sequence[range]:
        """The positions of `rank`'s shard: rising ranges in rising order, all of one step; empty
        ones do not count.
        """

    @functools.cached_property
    def shards(self) -> tuple[tuple[range, ...], ...]:
        """The positions of each rank's shard, without empty ranges."""
        return tuple(tuple(filter(None, self.ranges(rank))) for rank in range(self.size))

    @functools.cached_property
    def term(self) -> str:
        """What tells this layout from others of as many tokens on as many ranks, as ranks say it to
        each other.
        """
        numbers = array("q")
        for ranges in self.shards:
            numbers.append(len(ranges))
            for r in ranges:
                numbers.extend((r.start, r.stop, r.step))
        return f"{self.name} {hashlib.blake2b(numbers.tobytes(), digest_size=12).hexdigest()}"

    def runs(self, rank: int) -> tuple[Run, ...]:
        """The runs of `rank`'s shard, in storage order; positions increase from the first to the
        last.
        """
        ranges = self._shard(rank)
        offsets = itertools.accumulate(map(len, ranges), initial=0)
        return tuple(
            Run(r.start, r.step, len(r), at) for r, at in zip(ranges, offsets, strict=False)
        )

    def length(self, rank: int) -> int:
        """Tokens of `rank`'s shard."""
        return sum(map(len, self._shard(rank)))

    def _shard(self, rank: int) -> tuple[range, ...]:
        if type(rank) is not int:
            rank = as_int("rank", rank)
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a layout of {self.size} ranks")
        return self.shards[rank]

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Global position ids of `rank`'s shard in storage order: (S_local,) int64."""
        return torch.cat(
            [torch.arange(r.start, r.stop, r.step, device=device) for r in self.runs(rank)]
        )

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The part of `x` that `rank` owns, cut along `dim` (of seq_len entries). Differentiable; a
        copy.

        Raises ValueError for another number of entries or a rank out of range, TypeError for what
        is no tensor.
        """
        dim = check_dim(x, dim)
        if x.shape[dim] != self.seq_len:
            raise ValueError(
                f"dimension {dim} of {tuple(x.shape)} has {x.shape[dim]} tokens, not {self.seq_len}"
            )
        return x.index_select(dim, self.positions(rank, x.device))

    def unshard(self, shards: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole of what `shard` cut: `shards` of all ranks, in rank order, joined along `dim`.
        Differentiable.

        Raises ValueError for shards of other lengths or another number of them.
        """
        lengths, given = (
            [self.length(r) for r in range(self.size)],
            [s.shape[check_dim(s, dim)] for s in shards],
        )
        if given != lengths:
            raise ValueError(f"shards have {given} tokens, expected {lengths}")
        order = torch.cat([self.positions(r) for r in range(self.size)]).argsort()
        return torch.cat(list(shards), dim).index_select(dim, order.to(shards[0].device))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return (self.seq_len, self.size, self.term) == (other.seq_len, other.size, other.term)

    def __hash__(self) -> int:
        return hash((self.seq_len, self.size, self.term))

    def __repr__(self) -> str:
        return f"Layout.{self.name}({self.seq_len}, {self.size})"

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: {self.positions(r).tolist()}" for r in range(self.size))


class _Named(Layout):
    """One that the name alone tells from others."""

    @property
    def term(self) -> str:
        return self.name


class Zigzag(_Named):
    name = "zigzag"

    def ranges(self, rank: int) -> Sequence[range]:
        return [
            _chunk(self.seq_len, 2 * self.size, chunk) for chunk in (rank, 2 * self.size - 1 - rank)
        ]


class Striped(_Named):
    name = "striped"

    def ranges(self, rank: int) -> Sequence[range]:
        return [range(rank, self.seq_len, self.size)]


class Contiguous(_Named):
    name = "contiguous"

    def ranges(self, rank: int) -> Sequence[range]:
        return [_chunk(self.seq_len, self.size, rank)]


class Balanced(Layout):
    """See bmt_burst.sequence.balance."""

    name = "balanced"

    def __init__(self, mask: Mask, size: int):
        super().__init__(mask.seq_len, size)
        self.spans = balanced_spans(mask, self.size)

    def ranges(self, rank: int) -> Sequence[range]:
        return [range(*span) for span in self.spans[rank]]

    def __repr__(self) -> str:
        return f"<balanced layout of {self.seq_len} tokens on {self.size} ranks>"


class Stacked(Layout):
    """The layouts of the rows of a batch as that of one sequence, in which the rows follow one
    another.

    A rank's shard are its shards of the rows, one after the other: (B, S_local) as (1, B *
    S_local).
    """

    name = "stacked"

    def __init__(self, layouts: Sequence[Layout]):
        super().__init__(sum(layout.seq_len for layout in layouts), layouts[0].size)
        self.layouts = tuple(layouts)

    def ranges(self, rank: int) -> Sequence[range]:
        starts = itertools.accumulate((layout.seq_len for layout in self.layouts), initial=0)
        rows = zip(starts, self.layouts, strict=False)
        return [
            range(r.start + at, r.stop + at, r.step) for at, row in rows for r in row.ranges(rank)
        ]

    @functools.cached_property
    def term(self) -> str:
        terms = repr([(layout.seq_len, layout.term) for layout in self.layouts])
        return f"{self.name} {hashlib.blake2b(terms.encode(), digest_size=12).hexdigest()}"


LAYOUTS: dict[str, type[Layout]] = {layout.name: layout for layout in (Zigzag, Striped, Contiguous)}


def layout_class(name: str) -> type[Layout]:
    """The class of the layout called `name`. Raises ValueError for an unknown one, TypeError for no
    name.
    """
    if not isinstance(name, str):
        raise TypeError(f"a layout is one of {sorted(LAYOUTS)}, got {type(name).__name__}")
    if name not in LAYOUTS:
        raise ValueError(f"unknown layout {name!r}; expected one of {sorted(LAYOUTS)}")
    return LAYOUTS[name]


def shard(x: Tensor, rank: int, size: int, dim: int = 1, layout: str = "zigzag") -> Tensor:
    """Cuts `x` along `dim` and returns the part of `rank` out of `size`. Any dtype, any other
    dimensions.

    `layout` is "zigzag", "striped" or "contiguous"; a Layout has a `shard` of its own.
    """
    dim = check_dim(x, dim)
    return Layout.named(layout, x.shape[dim], size).shard(x, rank, dim)


def unshard(shards: Sequence[Tensor], dim: int = 1, layout: str = "zigzag") -> Tensor:
    """Joins the shards of all ranks, given in rank order: the inverse of `shard`."""
    return Layout.named(
        layout, sum(s.shape[check_dim(s, dim)] for s in shards), len(shards)
    ).unshard(shards, dim)


def shift_labels(
    tokens: Tensor, dim: int = -1, *, mask: Mask | Sequence[Mask] | None = None
) -> Tensor:
    """Next-token labels of whole, unsharded sequences: label t is token t + 1, the last is
    IGNORE_INDEX (-100).

    tokens  integers of any shape, the tokens of a sequence along `dim`
    mask    what they see of each other: the last token of each document, a part of the mask that
            sees nothing of the others, has no target either. One mask for all sequences, or one for
            each row of tokens (B, S).

    Shift first and shard after: a shard's last token has its successor on another rank. Raises
    TypeError for tokens of a dtype without negative numbers and for a mask that is none, ValueError
    if there is no dimension `dim` or masks are not of so many tokens, or not as many as rows.
    """
    dim = check_dim(tokens, dim)
    if tokens.dtype not in SIGNED:
        raise TypeError(f"labels need a signed integer dtype, got {tokens.dtype}")
    last = torch.full_like(tokens.narrow(dim, 0, 1), IGNORE_INDEX)
    labels = torch.cat([tokens.narrow(dim, 1, tokens.shape[dim] - 1), last], dim)
    if isinstance(mask, Sequence):
        if tokens.dim() != 2 or dim != 1 or len(mask) != len(tokens):
            raise ValueError(
                f"{len(mask)} masks are for as many rows of (B, S), got {tuple(tokens.shape)}, dim {dim}"
            )
        for row, of_row in zip(labels, mask, strict=True):
            row.index_fill_(0, _last_tokens(of_row, len(row), row.device), IGNORE_INDEX)
    elif mask is not None:
        labels.index_fill_(dim, _last_tokens(mask, tokens.shape[dim], tokens.device), IGNORE_INDEX)
    return labels


def _chunk(seq_len: int, chunks: int, index: int) -> range:
    small, longer = divmod(seq_len, chunks)
    start = index * small + min(index, longer)
    return range(start, start + small + (index < longer))


def _last_tokens(mask: Mask, seq_len: int, device: torch.device) -> Tensor:
    """The last position of each part of a mask: int64."""
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask, or one for each row, got {type(mask).__name__}")
    if mask.seq_len != seq_len:
        raise ValueError(f"a mask of {mask.seq_len} tokens was given for sequences of {seq_len}")
    return torch.tensor([stop - 1 for _, stop in mask.parts], device=device)
