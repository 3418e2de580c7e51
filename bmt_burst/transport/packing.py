"""The places of tensors (B, T, ...) in one piece of memory, for any number of tokens T.

Tensors that are sent together follow each other. Each is contiguous and starts at a multiple of 256
bytes. A message is one batch row of a range of tokens of one tensor, contiguous at both ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sequence.span import Span, length

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
        return self._starts(tokens)[-1]

    def views(self, memory: Tensor, tokens: int) -> tuple[Tensor, ...]:
        """Return the tensors (B, tokens, ...) in `memory`, uint8."""
        views = []
        for start, (shape, dtype) in zip(self._starts(tokens), self.entries, strict=False):
            size = self.batch * tokens * _entry_bytes((shape, dtype))
            views.append(memory[start : start + size].view(dtype).view(self.batch, tokens, *shape))
        return tuple(views)

    def empty(self, tokens: int, device: torch.device) -> tuple[Tensor, ...]:
        """Make new tensors (B, tokens, ...), each in its own memory."""
        return tuple(
            torch.empty(self.batch, tokens, *shape, dtype=dtype, device=device)
            for shape, dtype in self.entries
        )

    def messages(self, tokens: int, at: Span) -> Iterator[tuple[int, int, int, int]]:
        """Yield (tensor, batch row, byte offset, bytes) of each message of the tokens at[0] to
        at[1] - 1, in memory for `tokens`.
        """
        for index, (start, entry) in enumerate(
            zip(self._starts(tokens), self.entries, strict=False)
        ):
            size = _entry_bytes(entry)
            for batch in range(self.batch):
                yield index, batch, start + (batch * tokens + at[0]) * size, length(at) * size

    def rows(self, tokens: int, at: Span) -> Iterator[tuple[int, int, int, int]]:
        """Yield (tensor, byte offset, bytes of a batch row, pitch) of the tokens at[0] to at[1] - 1
        of each tensor, in memory for `tokens`. The pitch is 0 for a single row, see `Put`.
        """
        for index, (start, entry) in enumerate(
            zip(self._starts(tokens), self.entries, strict=False)
        ):
            size = _entry_bytes(entry)
            pitch = tokens * size if self.batch > 1 else 0
            yield index, start + at[0] * size, length(at) * size, pitch

    def _starts(self, tokens: int) -> list[int]:
        """Return the first byte of each tensor, and the end of the last one."""
        starts = [0]
        for entry in self.entries:
            size = self.batch * tokens * _entry_bytes(entry)
            starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        return starts


def _entry_bytes(entry: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = entry
    return math.prod(shape) * dtype.itemsize
