"""Blocks: the tensors that are exchanged, one after the other in memory.

Letters: B batch, S tokens of a rank or a host, D head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...sequence.span import Span, length
from ...transport import Arrival
from .heads import Heads

_ALIGNMENT = 256  # bytes; what kernels may expect
Index = tuple[int, slice, slice]  # of some rows of a tensor


class Field(NamedTuple):
    """A tensor that is exchanged: (B, S, heads, D), or (B, heads, S) for a `head_size` of 0.

    kv  whether its heads are kv heads
    """

    kv: bool
    head_size: int
    dtype: torch.dtype

    @property
    def token_dim(self) -> int:
        return 1 if self.head_size else 2

    @property
    def head_dim(self) -> int:
        return 2 if self.head_size else 1

    def heads(self, heads: Heads) -> Span:
        """Return which of some heads it has."""
        return heads.kv if self.kv else heads.q

    def shape(self, batch: int, tokens: int, heads: int) -> tuple[int, ...]:
        if self.head_size:
            return batch, tokens, heads, self.head_size
        return batch, heads, tokens

    def at(self, row: int, tokens: Span, heads: Span) -> Index:
        """Return the index of some tokens and heads of a batch row."""
        parts = slice(*tokens), slice(*heads)
        return (row, *parts) if self.head_size else (row, *reversed(parts))


class Part(NamedTuple):
    """A tensor in memory, from byte `start` to `stop`."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor in `memory`, uint8."""
        return memory[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Block:
    """Fields of some tokens and heads, one after the other in memory from byte `start` on."""

    fields: Sequence[Field]
    batch: int
    tokens: int
    heads: Heads
    start: int = 0

    @functools.cached_property
    def parts(self) -> list[Part]:
        """The memory of each field."""
        parts, start = [], self.start
        for field in self.fields:
            shape = field.shape(self.batch, self.tokens, length(field.heads(self.heads)))
            stop = start + math.prod(shape) * field.dtype.itemsize
            parts.append(Part(start, stop, field.dtype, shape))
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return parts

    @property
    def stop(self) -> int:
        """The first byte after it, where another block may begin."""
        return -(-self.parts[-1].stop // _ALIGNMENT) * _ALIGNMENT

    def arrival(self, peer: int, number: int, row: int, tokens: Span) -> Arrival:
        """Return the place of some tokens of a batch row of a field."""
        field = self.fields[number]
        heads, size = length(field.heads(self.heads)), field.dtype.itemsize
        if field.head_size:
            of_token = heads * field.head_size * size
            first = (row * self.tokens + tokens[0]) * of_token
            nbytes, rows, pitch = of_token, length(tokens), of_token
        else:
            first = (row * heads * self.tokens + tokens[0]) * size
            nbytes, rows, pitch = length(tokens) * size, heads, self.tokens * size
        return Arrival(peer, self.parts[number].start + first, nbytes, rows, pitch)
