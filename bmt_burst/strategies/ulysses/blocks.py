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

from ...sequence.span import Span, length
from ...transport import Arrival, Place
from ...transport.regions import Region
from .heads import Heads

_ALIGNMENT = 256  # bytes; what kernels may expect


class Tokens(NamedTuple):
    """Equal runs of tokens: `runs` times `length` tokens, `step` tokens apart, from token `start`
    on.
    """

    start: int
    length: int
    step: int = 0
    runs: int = 1


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

    def region(self, batch: int, tokens: Tokens, heads: Span) -> Region:
        """Return the region of some tokens and heads, for all batch rows."""
        runs = self.token_dim, tokens.step, tokens.runs
        if self.head_size:
            starts = 0, tokens.start, heads[0], 0
            block = 1, 1, length(heads), self.head_size
            return Region(starts, block, ((0, 1, batch), runs, (1, 1, tokens.length)))
        axes = (0, 1, batch), runs, (1, 1, length(heads))
        return Region((0, heads[0], tokens.start), (1, 1, tokens.length), axes)


@dataclass(frozen=True)
class Block:
    """Fields of some tokens and heads, one after the other in memory from byte `start` on."""

    fields: Sequence[Field]
    batch: int
    tokens: int
    heads: Heads
    start: int = 0

    @functools.cached_property
    def parts(self) -> list[Place]:
        """The memory of each field."""
        parts, start = [], self.start
        for field in self.fields:
            shape = field.shape(self.batch, self.tokens, length(field.heads(self.heads)))
            stop = start + math.prod(shape) * field.dtype.itemsize
            parts.append(Place(start, field.dtype, shape))
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return parts

    @property
    def stop(self) -> int:
        """The first byte after it, where another block may begin."""
        last = self.parts[-1]
        return -(-(last.start + last.nbytes) // _ALIGNMENT) * _ALIGNMENT

    def arrival(self, peer: int, number: int, tokens: Tokens) -> Arrival:
        """Return the place of some tokens of a field, for all batch rows: the same rows as those of
        `Field.region`.
        """
        field = self.fields[number]
        heads, size = length(field.heads(self.heads)), field.dtype.itemsize
        if field.head_size:
            of_token = heads * field.head_size * size
            nbytes, rows, pitch = of_token, tokens.length, of_token
        else:
            of_token = size
            nbytes, rows, pitch = tokens.length * size, heads, self.tokens * size
        of_batch_row = heads * max(field.head_size, 1) * self.tokens * size
        return Arrival(
            peer,
            self.parts[number].start + tokens.start * of_token,
            nbytes,
            (self.batch, tokens.runs, rows),
            (of_batch_row, tokens.step * of_token, pitch),
        )
