"""Regions: parts of tensors that are copied as they lie, as data without tensors.

`Region` says which entries of a tensor are copied, for any tensor of a shape. `find_bytes` finds
where they lie in tensors with known strides, in the fewest copies that a GPU's copy engine can do:
equal rows at equal distances, in equal layers at equal distances.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_MOST_PITCH = (1 << 31) - 1  # bytes; CU_DEVICE_ATTRIBUTE_MAX_PITCH

Axis = tuple[int, int, int]
Geometry = tuple[tuple[int, ...], torch.dtype]  # strides and dtype of a tensor


class Region(NamedTuple):
    """Some entries of a tensor: equal blocks at equal distances.

    starts  the first entry in each dimension
    block   the length of a block in each dimension. Its entries must be contiguous.
    axes    (dimension, step, count): `count` times the block, each `step` entries further in a
            dimension. The outer axes come first.
    """

    starts: tuple[int, ...]
    block: tuple[int, ...]
    axes: tuple[Axis, ...] = ()

    @staticmethod
    def whole(shape: Sequence[int], outer: int) -> Region:
        """Return all entries of a tensor. Each x[i, j, ...] of `outer` indices is contiguous."""
        axes = tuple((dim, 1, shape[dim]) for dim in range(outer))
        return Region((0,) * len(shape), (1,) * outer + tuple(shape[outer:]), axes)

    @staticmethod
    def of_bytes(
        offset: int, nbytes: int, counts: Sequence[int] = (), pitches: Sequence[int] = ()
    ) -> Region:
        """Return some bytes of memory, (bytes,) uint8: blocks of `nbytes` at distances."""
        axes = tuple((0, pitch, count) for pitch, count in zip(pitches, counts, strict=True))
        return Region((offset,), (nbytes,), axes)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(count for _, _, count in self.axes)

    @property
    def entries(self) -> int:
        """The entries of a block."""
        return math.prod(self.block)

    def place(self, strides: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return the place of the first entry in a tensor with `strides`, and the stride of each
        axis.

        Raises ValueError for strides with which a block is not contiguous.
        """
        expected = 1
        for size, stride in zip(reversed(self.block), reversed(strides), strict=True):
            if size > 1 and stride != expected:
                raise ValueError(f"expected contiguous blocks {self.block}, got strides {strides}")
            expected *= size
        start = sum(at * stride for at, stride in zip(self.starts, strides, strict=True))
        return start, tuple(step * strides[dim] for dim, step, _ in self.axes)

    def view(self, x: Tensor) -> Tensor:
        """Return a view (*counts, entries) of a tensor. Raises ValueError as `place`."""
        start, strides = self.place(x.stride())
        shape = (*self.counts, self.entries)
        return x.as_strided(shape, (*strides, 1), x.storage_offset() + start)


class Copy(NamedTuple):
    """A copy of a region of a tensor to a region of another one. Tensors have numbers. Both regions
    have the same counts, and blocks of the same bytes.
    """

    target: int
    into: Region
    source: int
    region: Region


class ByteCopy(NamedTuple):
    """A copy of layers of rows of bytes, from byte `source_at` of a tensor to byte `target_at` of
    another one. The axes are (count, pitch of the target, pitch of the source) of layers, then of
    rows. There are at most two.
    """

    target: int
    target_at: int
    source: int
    source_at: int
    nbytes: int
    axes: tuple[tuple[int, int, int], ...] = ()


def find_bytes(
    copies: Sequence[Copy], targets: Sequence[Geometry], sources: Sequence[Geometry]
) -> list[ByteCopy]:
    """Return copies of bytes that do the `copies` between tensors of known geometry."""
    found: list[ByteCopy] = []
    for target, into, source, region in copies:
        (to, to_dtype), (of, of_dtype) = targets[target], sources[source]
        size, to_size = of_dtype.itemsize, to_dtype.itemsize
        (at, pitches), (to_at, to_pitches) = region.place(of), into.place(to)
        nbytes = region.entries * size
        assert (into.counts, into.entries * to_size) == (region.counts, nbytes), (into, region)
        axes = [
            (count, there * to_size, here * size)
            for count, there, here in zip(region.counts, to_pitches, pitches, strict=True)
        ]
        if nbytes and all(region.counts):
            whole = ByteCopy(target, to_at * to_size, source, at * size, nbytes)
            found += _cut_copy(*_merge_axes(whole, axes))
    return found


def _merge_axes(
    copy: ByteCopy, axes: Sequence[tuple[int, int, int]]
) -> tuple[ByteCopy, list[tuple[int, int, int]]]:
    """Return a copy along `axes` with the longest contiguous rows, and the fewest axes."""
    merged: list[tuple[int, int, int]] = []
    nbytes = copy.nbytes
    for count, there, here in reversed(axes):  # the inner ones first
        if count == 1:
            continue
        if not merged and there == here == nbytes:
            nbytes *= count
        elif merged and (there, here) == tuple(merged[0][0] * pitch for pitch in merged[0][1:]):
            merged[0] = (count * merged[0][0], *merged[0][1:])
        else:
            merged.insert(0, (count, there, here))
    return copy._replace(nbytes=nbytes), merged


def _cut_copy(copy: ByteCopy, axes: Sequence[tuple[int, int, int]]) -> Iterator[ByteCopy]:
    """Yield copies with at most two axes: rows, and the longest axis that can be layers of them."""
    if not axes:
        yield copy
        return
    *outer, rows = axes
    kept = [rows] if _are_rows(copy.nbytes, rows) else []
    if not kept:
        outer = list(axes)
    elif layers := [axis for axis in outer if _are_layers(rows, axis)]:
        longest = max(layers)
        outer.remove(longest)
        kept.insert(0, longest)
    if not outer:
        yield copy._replace(axes=tuple(kept))
        return
    (count, there, here), *others = outer
    for i in range(count):
        part = copy._replace(
            target_at=copy.target_at + i * there, source_at=copy.source_at + i * here
        )
        yield from _cut_copy(part, [*others, *kept])


def _are_rows(nbytes: int, axis: tuple[int, int, int]) -> bool:
    """Whether a copy engine takes rows at these distances."""
    return all(nbytes <= pitch <= _MOST_PITCH for pitch in axis[1:])


def _are_layers(rows: tuple[int, int, int], axis: tuple[int, int, int]) -> bool:
    """Whether layers of rows are a whole number of rows apart."""
    pairs = zip(axis[1:], rows[1:], strict=True)
    return all(pitch % row == 0 and pitch >= rows[0] * row for pitch, row in pairs)
