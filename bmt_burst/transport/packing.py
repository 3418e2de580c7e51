"""The places of tensors (B, T, ...) in one piece of memory, for any number of tokens T.

Tensors that are sent together follow each other. Each is contiguous and starts at a multiple of 256
bytes. A message is a range of tokens of one tensor. Each batch row is contiguous at both ends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sequence.span import Span, length
from . import Arrival, Put

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

    def views(self, memory: Tensor, tokens: int) -> list[Tensor]:
        """Return the tensors (B, tokens, ...) that lie in memory, uint8."""
        found, count = [], self.batch * tokens
        for at, (shape, dtype) in zip(_starts(self, tokens), self.entries, strict=False):
            entries = memory.narrow(0, at, count * _entry_bytes((shape, dtype))).view(dtype)
            found.append(entries.view(self.batch, tokens, *shape))
        return found

    def puts(
        self, tensors: Sequence[Tensor], span: Span, peer: int, at: int, tokens: int
    ) -> Iterator[Put]:
        """Yield what sends the tokens `span` of tensors (B, T, ...), with contiguous batch rows, to
        a rank. They land from token `at` on in memory for `tokens`.
        """
        for tensor, row, offset, _ in self._rows((at, at + length(span)), tokens):
            yield Put(tensors[tensor][row, slice(*span)], peer, offset)

    def arrivals(self, peer: int, at: Span, tokens: int) -> Iterator[Arrival]:
        """Yield where such puts of a rank land, as the tokens `at`."""
        for _, _, offset, nbytes in self._rows(at, tokens):
            yield Arrival(peer, offset, nbytes)

    def empty(self, tokens: int, device: torch.device) -> tuple[Tensor, ...]:
        """Make new tensors (B, tokens, ...), each in its own memory."""
        shapes = [((self.batch, tokens, *shape), dtype) for shape, dtype in self.entries]
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)

    def _rows(self, at: Span, tokens: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (tensor, batch row, first byte, bytes) of tokens `at` in memory for `tokens`."""
        starts = _starts(self, tokens)
        for tensor, entry in enumerate(self.entries):
            start, size = starts[tensor], _entry_bytes(entry)
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
