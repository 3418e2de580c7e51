"""Layouts: the token positions that each rank owns.

A layout cuts one sequence of `seq_len` tokens into a shard for each of `size` ranks. A shard
consists of a few *runs*: arithmetic progressions of positions, in rising order. Any length works.
Shards may differ by one token; nothing is padded or dropped. Chunks have the sizes of
torch.tensor_split: the first `seq_len % chunks` are one token longer.

Try `print(Layout.zigzag(10, 2))`.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.arguments import as_int, check_choice, check_dim
from .balance import balanced_spans
from .mask import Mask
from .span import Span, length

_LINES, _COLUMNS = 24, 100  # of a layout that is printed, at most
IGNORE_INDEX = -100
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)  # dtypes that can hold IGNORE_INDEX


class Run(NamedTuple):
    """Tokens `span` of the shard of `owner`, at positions `start`, `start + step`, and so on."""

    start: int
    step: int
    owner: int
    span: Span

    @property
    def stop(self) -> int:
        """The position that would be next."""
        return self.start + self.step * length(self.span)


# A run as a plain tuple, like `TileFields`: plans have very many of them.
RunFields = tuple[int, int, int, Span]


class Layout(ABC):
    """The positions of `seq_len` tokens on `size` ranks. It prints the runs of each rank.

    Make one with zigzag, striped, contiguous, balanced, chunks or named. Layouts are equal if they
    have the same kind and put all tokens in the same places.

    Raises ValueError for a size below 1 or too few tokens, TypeError for anything but an integer.
    """

    name: str

    def __init__(self, seq_len: int, size: int):
        self.seq_len, self.size = as_int("seq_len", seq_len), as_int("size", size)
        if self.size < 1:
            raise ValueError(f"expected a layout of at least one rank, got size={self.size}")
        if self.seq_len < self.size:
            raise ValueError(
                f"a sequence of {self.seq_len} tokens is too short for {self.size} ranks"
            )

    @staticmethod
    def named(name: str, seq_len: int, size: int) -> Layout:
        """Return the layout called `name`. Raises ValueError or TypeError unless LAYOUTS has it."""
        return layout_class(name)(seq_len, size)

    @staticmethod
    def zigzag(seq_len: int, size: int) -> Layout:
        """Return the layout in which rank r owns chunks r and 2 * size - 1 - r of 2 * size.

        Work is equal for causal masks.
        """
        return Zigzag(seq_len, size)

    @staticmethod
    def striped(seq_len: int, size: int) -> Layout:
        """Return the layout in which rank r owns every size-th position from r on.

        Work is equal, also for causal documents, but all tokens are sent.
        """
        return Striped(seq_len, size)

    @staticmethod
    def contiguous(seq_len: int, size: int) -> Layout:
        """Return the layout in which rank r owns chunk r of size.

        Work is equal for full masks and windows.
        """
        return Contiguous(seq_len, size)

    @staticmethod
    def balanced(mask: Mask, size: int) -> Layout:
        """Return a layout with equal tokens, up to one, and nearly equal work under `mask`.

        Documents stay whole on one rank where possible.
        """
        if not isinstance(mask, Mask):
            raise TypeError(f"expected a Mask, got {type(mask).__name__}")
        return Balanced(mask, size)

    @staticmethod
    def chunks(seq_len: int, size: int, tokens: int, layout: str = "zigzag") -> Chunked:
        """Return the layout that cuts a sequence into chunks, and each chunk by itself.

        So a rank has an equal share of every chunk, and its shares lie one after the other.

        tokens  the most tokens of a chunk, on all ranks together. No chunk is a short rest.
        layout  how each chunk is cut: one of LAYOUTS

        Raises ValueError for tokens below 1, and for chunks with fewer tokens than ranks.
        """
        return Chunked(seq_len, size, tokens, layout)

    @abstractmethod
    def ranges(self, rank: int) -> Sequence[range]:
        """Return the positions of `rank`'s shard: rising ranges in rising order. Ranges of one step
        need the fewest kernel calls. Empty ranges do not count.
        """

    @functools.cached_property
    def shards(self) -> tuple[tuple[range, ...], ...]:
        """The positions of each rank's shard, without empty ranges."""
        return tuple(tuple(filter(None, self.ranges(rank))) for rank in range(self.size))

    @functools.cached_property
    def term(self) -> str:
        """A name that tells this layout from others of its size, which ranks compare."""
        if LAYOUTS.get(self.name) is type(self):  # all follows from the name
            return self.name
        numbers = array("q")
        for ranges in self.shards:
            numbers.append(len(ranges))
            for r in ranges:
                numbers.extend((r.start, r.stop, r.step))
        return f"{self.name} {hashlib.blake2b(numbers.tobytes(), digest_size=12).hexdigest()}"

    def runs(self, rank: int) -> tuple[Run, ...]:
        """Return the runs of `rank`'s shard in storage order, which rise."""
        found, at = [], 0
        for r in self._shard(rank):
            found.append(Run(r.start, r.step, rank, (at, at + len(r))))
            at += len(r)
        return tuple(found)

    def length(self, rank: int) -> int:
        """Return the number of tokens of `rank`'s shard."""
        return sum(map(len, self._shard(rank)))

    def count(self, rank: int, positions: Span) -> int:
        """Return how many tokens of `rank`'s shard are at some positions."""
        return sum(map(len, _cut_ranges(self._shard(rank), positions)))

    def _shard(self, rank: int) -> tuple[range, ...]:
        if type(rank) is not int:
            rank = as_int("rank", rank)
        if not 0 <= rank < self.size:
            raise ValueError(f"expected a rank from 0 to {self.size - 1}, got {rank}")
        return self.shards[rank]

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return `rank`'s positions: (S_local,) int64, in storage order."""
        none = torch.empty(0, dtype=torch.int64, device=device)  # a shard may have no ranges
        parts = [torch.arange(r.start, r.stop, r.step, device=device) for r in self._shard(rank)]
        return torch.cat([none, *parts])

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return a differentiable copy of the part of `x` that `rank` owns.

        Raises ValueError unless `dim` has seq_len entries, or for a rank out of range, TypeError
        for anything but a tensor.
        """
        dim = check_dim(x, dim)
        if x.shape[dim] != self.seq_len:
            got = f"{x.shape[dim]} in shape {tuple(x.shape)}"
            raise ValueError(f"expected {self.seq_len} tokens in dimension {dim}, got {got}")
        return x.index_select(dim, self.positions(rank, x.device))

    def unshard(self, shards: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Join the shards of all ranks, in rank order, along `dim`: the inverse of `shard`.

        Differentiable. Raises ValueError for shards of other lengths or another number of them,
        TypeError for anything but tensors.
        """
        lengths = [self.length(r) for r in range(self.size)]
        given = _count_tokens(shards, dim)
        if given != lengths:
            raise ValueError(f"expected shards of {lengths} tokens, got {given}")
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
        """List the first and last position of each run, such as "rank 0: 0-9, 30-39"."""
        shown = self.size if self.size <= _LINES else _LINES - 1
        lines = [f"rank {r}: {_list_runs(self.shards[r], r)}" for r in range(shown)]
        more = self.size - shown
        return "\n".join([*lines, f"... {more} more ranks"] if more else lines)


class Zigzag(Layout):
    name = "zigzag"

    def ranges(self, rank: int) -> Sequence[range]:
        if self.size == 1:  # a window over two chunks would need two kernel calls
            return [range(self.seq_len)]
        return [
            _chunk(self.seq_len, 2 * self.size, chunk) for chunk in (rank, 2 * self.size - 1 - rank)
        ]


class Striped(Layout):
    name = "striped"

    def ranges(self, rank: int) -> Sequence[range]:
        return [range(rank, self.seq_len, self.size)]


class Contiguous(Layout):
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
    """The layouts of a batch's rows as that of one sequence: (B, S_local) is (1, B * S_local)."""

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


class Tail(Layout):
    """The tokens of a layout from position `first` on. Positions count from there."""

    name = "tail"

    def __init__(self, layout: Layout, first: int):
        super().__init__(layout.seq_len - first, layout.size)
        self.layout, self.first = layout, first

    def ranges(self, rank: int) -> Sequence[range]:
        kept = _cut_ranges(self.layout.shards[rank], (self.first, self.layout.seq_len))
        return [range(r.start - self.first, r.stop - self.first, r.step) for r in kept]


class Chunked(Stacked):
    """See `Layout.chunks`. `spans` are the positions of each chunk."""

    name = "chunks"

    def __init__(self, seq_len: int, size: int, tokens: int, layout: str):
        whole, most = layout_class(layout)(seq_len, size), as_int("tokens", tokens)
        if most < 1:
            raise ValueError(f"expected chunks of at least one token, got tokens={most}")
        count = count_chunks(whole.seq_len, most)
        if (shortest := whole.seq_len // count) < whole.size:
            least = -(-whole.seq_len // (whole.seq_len // whole.size))
            chunk = f"a chunk of {shortest} of {whole.seq_len} tokens"
            expected = f"expected chunks of at least {least} tokens, got tokens={most}"
            raise ValueError(f"{chunk} is too short for {whole.size} ranks: {expected}")
        cut = [_chunk(whole.seq_len, count, index) for index in range(count)]
        self.spans = tuple((positions.start, positions.stop) for positions in cut)
        super().__init__([type(whole)(len(positions), whole.size) for positions in cut])

    @property
    def layout(self) -> Layout:
        """This layout: x, positions and labels are its shards."""
        return self

    def find_chunk(self, position: int) -> int:
        return bisect.bisect_right(self.spans, (position, self.seq_len)) - 1

    def since(self, first: int, number: int) -> Layout:
        """Return the layout from position `first`, counted as 0, to the end of chunk `number`."""
        begin = self.find_chunk(first)
        layouts, before = self.layouts[begin : number + 1], first - self.spans[begin][0]
        whole = layouts[0] if len(layouts) == 1 else Stacked(layouts)
        return Tail(whole, before) if before else whole

    def __repr__(self) -> str:
        kind, count = self.layouts[0].name, len(self.spans)
        return f"<{count} {kind} chunks of {self.seq_len} tokens on {self.size} ranks>"


LAYOUTS: dict[str, type[Layout]] = {layout.name: layout for layout in (Zigzag, Striped, Contiguous)}


def count_chunks(tokens: int, most: int) -> int:
    """Return the number of chunks of a sequence, if a chunk has at most `most` tokens."""
    return -(-tokens // most)


def layout_class(name: str) -> type[Layout]:
    check_choice("layout", name, LAYOUTS)
    return LAYOUTS[name]


def shard(x: Tensor, rank: int, size: int, dim: int = 1, layout: str = "zigzag") -> Tensor:
    """Cut `x` along `dim` into `size` shards, and return the shard of `rank`.

    Any dtype and shape works. `layout` is "zigzag", "striped" or "contiguous".
    """
    dim = check_dim(x, dim)
    return Layout.named(layout, x.shape[dim], size).shard(x, rank, dim)


def unshard(shards: Sequence[Tensor], dim: int = 1, layout: str = "zigzag") -> Tensor:
    """Join the shards of all ranks, in rank order: the inverse of `shard`. Differentiable."""
    seq_len = sum(_count_tokens(shards, dim))
    return Layout.named(layout, seq_len, len(shards)).unshard(shards, dim)


def _count_tokens(shards: Sequence[Tensor], dim: int) -> list[int]:
    dims = [check_dim(x, dim) for x in shards]  # before x.shape, which only tensors have
    return [x.shape[d] for x, d in zip(shards, dims, strict=True)]


def shift_labels(
    tokens: Tensor, dim: int = -1, *, mask: Mask | Sequence[Mask] | None = None
) -> Tensor:
    """Return the next-token labels of whole sequences: label t is token t + 1, and the last is
    IGNORE_INDEX (-100).

    tokens  integers of any shape, with the tokens of a sequence along `dim`
    mask    a mask for all sequences, or one for each row of tokens (B, S). The last token of each
            of its `parts` also gets IGNORE_INDEX.

    Call it before you shard: the successor of a shard's last token is on another rank. Raises
    TypeError for a dtype without negative numbers or anything but a Mask. Raises ValueError if
    there is no dimension `dim`, if masks have another number of tokens or rows, or if a token does
    not see the one before it in its document: in a tree of drafts the next token is not t + 1.
    """
    dim = check_dim(tokens, dim)
    if tokens.dtype not in SIGNED:
        raise TypeError(f"expected tokens of a signed integer dtype, got {tokens.dtype}")
    last = torch.full_like(tokens.narrow(dim, 0, 1), IGNORE_INDEX)
    labels = torch.cat([tokens.narrow(dim, 1, tokens.shape[dim] - 1), last], dim)
    if isinstance(mask, Sequence):
        if tokens.dim() != 2 or dim != 1 or len(mask) != len(tokens):
            got = f"{len(mask)} masks, tokens {tuple(tokens.shape)} and dim {dim}"
            raise ValueError(
                f"expected tokens (B, S) with a mask for each row and dim 1, got {got}"
            )
        for row, its_mask in zip(labels, mask, strict=True):
            row.index_fill_(0, _last_tokens(its_mask, len(row), row.device), IGNORE_INDEX)
    elif mask is not None:
        labels.index_fill_(dim, _last_tokens(mask, tokens.shape[dim], tokens.device), IGNORE_INDEX)
    return labels


def _chunk(seq_len: int, chunks: int, index: int) -> range:
    """Return the positions of one of `chunks` chunks."""
    small, longer = divmod(seq_len, chunks)
    start = index * small + min(index, longer)
    return range(start, start + small + (index < longer))


def _cut_ranges(ranges: Iterable[range], span: Span) -> Iterator[range]:
    """Yield the positions of each range that are in a span."""
    for r in ranges:
        first, stop = (max(-((r.start - edge) // r.step), 0) for edge in span)
        yield r[first:stop]


def _list_runs(runs: Sequence[range], rank: int) -> str:
    """Return the runs of a rank in one line: as many as fit, and how many more there are."""
    words = [describe_run(run) for run in runs[: _COLUMNS // 3]]
    line, most = "no tokens", _COLUMNS - len(f"rank {rank}: ")
    for shown in range(len(words), 0, -1):
        more = len(runs) - shown
        rest = [f"... {more} more run{'s' * (more > 1)}"] if more else []
        if len(line := ", ".join([*words[:shown], *rest])) <= most:
            break
    return line


def describe_run(run: range) -> str:
    """Return the first and last position of a run as text: "3", "3-9" or "3-9 by 2"."""
    step = f" by {run.step}" if run.step > 1 else ""
    return f"{run[0]}-{run[-1]}{step}" if len(run) > 1 else f"{run[0]}"


def _last_tokens(mask: Mask, seq_len: int, device: torch.device) -> Tensor:
    """Return the last position of each part of a mask: int64."""
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask or one for each row, got {type(mask).__name__}")
    if mask.seq_len != seq_len:
        raise ValueError(f"expected a mask of {seq_len} tokens, got one of {mask.seq_len}")
    mask.check_unbroken("shift_labels", "make the labels from each token's children")
    return torch.tensor([stop - 1 for _, stop in mask.parts], device=device)
