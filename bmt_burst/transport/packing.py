"""The places of tensors (B, T, ...) in one piece of memory, for any number of tokens T.

Tensors that are sent together follow each other. Each is contiguous and starts at a multiple of 256
bytes. A message is a range of tokens of one tensor. Each batch row is contiguous at both ends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sequence.span import Span, length
from . import Arrival, Manifest, Message, Place, Put

_ALIGNMENT = 256  # bytes; what GPU allocators give and kernels may expect


@dataclass(frozen=True)
class Packing:
    """Tensors of batch size `batch`; `entries` are (shape of a token's entries, dtype) of each."""

    batch: int
    entries: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def token_bytes(self) -> int:
        """Return the bytes of one token, over the batch."""
        return self.batch * sum(map(_entry_bytes, self.entries))

    def nbytes(self, tokens: int) -> int:
        return _starts(self, tokens)[-1]

    def places(self, tokens: int) -> list[Place]:
        """Return where the tensors (B, tokens, ...) lie in memory."""
        starts = _starts(self, tokens)[:-1]
        return [
            Place(start, dtype, (self.batch, tokens, *shape))
            for start, (shape, dtype) in zip(starts, self.entries, strict=True)
        ]

    def views(self, memory: Tensor, tokens: int) -> list[Tensor]:
        """Return the tensors (B, tokens, ...) that lie in memory, uint8."""
        return [place.view(memory) for place in self.places(tokens)]

    def puts(
        self,
        tensors: Sequence[Tensor],
        span: Span,
        peer: int,
        at: Span,
        tokens: int,
        start: int = 0,
    ) -> Iterator[Put]:
        """Yield what sends the tokens `span` of contiguous tensors (B, T, ...) to a rank. They land
        as the tokens `at` in memory for `tokens`, which begins at byte `start`.
        """
        for tensor, row, offset, _ in self._rows(at, tokens):
            yield Put(tensors[tensor][row, slice(*span)], peer, start + offset)

    def arrivals(self, peer: int, at: Span, tokens: int, start: int = 0) -> Iterator[Arrival]:
        """Yield where such puts of a rank land."""
        for _, _, offset, nbytes in self._rows(at, tokens):
            yield Arrival(peer, start + offset, nbytes)

    def empty(self, tokens: int, device: torch.device) -> tuple[Tensor, ...]:
        """Make new tensors (B, tokens, ...), each in its own memory."""
        return tuple(
            torch.empty(self.batch, tokens, *shape, dtype=dtype, device=device)
            for shape, dtype in self.entries
        )

    def manifest(
        self,
        tokens: int,
        sources: Iterable[tuple[int, Span]],
        sends: Iterable[tuple[int, Span, int, int]],
        apart: bool = False,
    ) -> Manifest:
        """Return the manifest of a delivery in which `tokens` land.

        sources  (rank, place) of what this rank receives
        sends    (rank, span, place there, tokens that land there) of what it sends: tokens of the
                 same tensors or, if each send has tensors of its own, `apart`, of the next ones
        """
        messages, size = [], len(self.entries)
        for number, (peer, (start, stop), at, total) in enumerate(sends):
            place = at, at + stop - start
            for tensor, row, offset, _ in self._rows(place, total):
                index = tensor + number * size * apart
                messages.append(Message(index, row, (start, stop), peer, offset))
        arrivals = [x for peer, at in sources for x in self.arrivals(peer, at, tokens)]
        return Manifest(self.nbytes(tokens), messages, arrivals, self.places(tokens))

    def _rows(self, at: Span, tokens: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (tensor, batch row, first byte, bytes) of the tokens `at` in memory for `tokens`.
        Nothing is yielded for no bytes.
        """
        for tensor, (start, entry) in enumerate(
            zip(_starts(self, tokens), self.entries, strict=False)
        ):
            size = _entry_bytes(entry)
            for row in range(self.batch if length(at) * size else 0):
                yield tensor, row, start + (row * tokens + at[0]) * size, length(at) * size


@functools.lru_cache(maxsize=1024)  # messages of one delivery lie in the same tensors
def _starts(packing: Packing, tokens: int) -> list[int]:
    """Return the first byte of each tensor, and the end of the last one."""
    starts = [0]
    for entry in packing.entries:
        size = packing.batch * tokens * _entry_bytes(entry)
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return starts


@functools.cache
def _entry_bytes(entry: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = entry
    return math.prod(shape) * dtype.itemsize
