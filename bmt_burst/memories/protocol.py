"""Parts of a sequence, kinds of layers, and memories: what a model, a part and a layer agree on.

A model computes a part of a sequence in one go: the whole sequence, a chunk of it, or new tokens.
Layers pass their tensors to the part, with their kind:

    out = part.mix(layer, kind, q, k, v, *tensors)

A kind computes a whole sequence itself. For other parts it makes a memory, which holds what a layer
keeps of earlier tokens. Parts drive the phases of memories, and know no kind.

Letters: B batch, S tokens of this rank, H query heads, G kv heads, D head size, E model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import torch
from torch import Tensor

from ..ranks.sequence_parallel import SequenceParallel
from ..sequence.layout import Chunked
from ..sequence.mask import Mask

if TYPE_CHECKING:
    from .new_tokens import NewTokens


class Part(Protocol):
    """Tokens of a sequence that a model computes in one go.

    sp           the ranks that share the tokens
    saves_graph  whether a backward follows, so that blocks save tensors as their model says
    """

    @property
    def sp(self) -> SequenceParallel: ...

    @property
    def saves_graph(self) -> bool: ...

    def mix(self, layer: int, kind: Kind, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        """Return the attention of a layer: (B, S, H, D), in the dtype of q or of autocast.

        layer    the number of the layer
        q        (B, S, H, D) of this rank's tokens
        k, v     (B, S, G, D)
        tensors  others that the kind takes

        Raises ValueError or TypeError on all ranks for inputs that are wrong on any rank.
        """

    def select(self, x: Tensor) -> Tensor:
        """Return the tokens of x (B, S, E) that get a result."""

    def longest(self, positions: Tensor) -> Tensor:
        """Return the length by which rotary scalings choose frequencies: () for `positions` (S,)
        int64, (B,) for (B, S).
        """

    def check_positions(self, positions: Tensor) -> None:
        """Note the positions of this rank's tokens, (S,) or (B, S) int64, to check them."""

    def refuse(self, error: Exception, doing: str = ...) -> NoReturn:
        """Raise `error` instead of the call `doing`. The other ranks raise RanksDisagree, or in the
        middle of new tokens RankFailed.
        """


class Kind(Protocol):
    """A kind of attention with its constants. It is immutable, and equal kinds have equal hashes.

    name  what errors call it
    """

    name: ClassVar[str]

    def attend(self, part: Any, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        """Compute the attention of a whole sequence, as `Part.mix` does."""

    def check_tensors(self, tensors: Sequence[Any]) -> None:
        """Raise ValueError for tensors besides q, k and v that it does not take."""

    def memory(self, room: Room, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Memory:
        """Return the empty memory of a layer with such tensors. Raises ValueError for tensors that
        it cannot keep, and if there is not enough memory.
        """


@dataclass(frozen=True, eq=False)
class Room:
    """The tokens that a memory has room for.

    layer   the number of the layer
    masks   of a sequence that is computed in chunks, for each row or for all
    chunks  how its chunks lie on the ranks, or None if there is no such sequence
    limit   the most tokens, including new ones after the sequence. None: no new ones follow
    """

    layer: int
    sp: SequenceParallel
    masks: tuple[Mask, ...] = ()
    chunks: Chunked | None = None
    limit: int | None = None


@dataclass(frozen=True, eq=False)
class Turn:
    """One run of a layer on a chunk.

    number          of the chunk
    differentiates  whether Chunks.backward yielded it, so that its backward follows
    is_first        whether the chunk is computed for the first time there. A recomputation is not
    with_backward   whether the calls of all chunks will have a backward
    terms           what ranks compare of these calls, if memory for them is reserved now, or None
    begin           called when the backward of this run begins. Raises ValueError for a second one
    """

    number: int
    differentiates: bool
    is_first: bool
    with_backward: bool
    terms: dict[str, Any] | None
    begin: Callable[[], None]


class Memory(ABC):
    """The memory of a layer, which holds what it keeps of earlier tokens.

    difference     of the last chunk that was computed again from what was kept of it, (), relative
                   to the most that rounding does
    rows           the batch size
    keeps_results  whether the second run of a chunk takes what the first one kept (base/kept.py)
    """

    keeps_results: bool = True
    difference: Tensor
    rows: int

    @abstractmethod
    def check(self, kind: Kind, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> None:
        """Raise ValueError for a kind or tensors that do not fit those of the first call."""

    @abstractmethod
    def keep(
        self, turn: Turn, q: Tensor, k: Tensor, v: Tensor, *tensors: Any
    ) -> Callable[[], Tensor]:
        """Keep what later tokens need of a chunk. Return a function that all ranks call together,
        and that returns the chunk's attention. Raises ValueError on this rank only.
        """

    @abstractmethod
    def close(self, number: int) -> None:
        """End a chunk of a forward, and forget what no later one needs of it."""

    def finish(self, number: int) -> None:  # noqa: B027 - most have nothing to do
        """End a chunk of a backward."""

    @abstractmethod
    def attend(self, new: NewTokens, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        """Keep new tokens, which all ranks have, and return their attention to all so far: (B, S,
        H, D) without gradient, equal on all ranks.
        """

    def refuses_crop(self) -> str | None:
        """Return why this memory cannot take back its newest tokens, or None if it can."""
        return None

    @abstractmethod
    def select_rows(self, rows: Tensor, count: int) -> bool:
        """Keep the rows (N,) int64 of the batch, in this order, which have `count` keys on this
        rank. Return whether that is in place: as many rows as before stay where they are.
        """

    def variant(self, length: int) -> Hashable:
        """Return which computation the last token of `length` gets. A CUDA graph holds one."""
        return None

    def graph_obstacle(self) -> str | None:
        """Return why no CUDA graph can hold new tokens, or None if one can."""
        return None


def check_alike(layer: int, name: str, x: Tensor, rows: int, like: Tensor) -> None:
    """Raise ValueError unless x (B, S, H, D) has so many rows, and heads, head size, dtype and
    device as `like` (..., H, D), of earlier calls.
    """
    had, got = (rows, *like.shape[-2:]), (len(x), *x.shape[-2:])
    if got != had or x.dtype != like.dtype or x.device != like.device:
        raise ValueError(
            f"expected {name} of {had} rows, heads and head size, {like.dtype} on {like.device}, "
            f"as in earlier calls of layer {layer}, got {got}, {x.dtype} on {x.device}"
        )


def select_rows(x: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
    """Return the rows (N,) int64 of x along `dim`: x itself, changed in place, if it has N rows."""
    with torch.inference_mode(x.is_inference()):  # such tensors change only in this mode
        found = x.index_select(dim, rows.to(x.device))
        return x.copy_(found) if found.shape == x.shape else found


@contextmanager
def reserve_memory(tokens: int | None) -> Iterator[None]:
    """Raise ValueError instead of torch's RuntimeError if memory does not suffice for a cache of so
    many tokens. None: there is no cache, and torch's error says enough.
    """
    try:
        yield
    except RuntimeError as error:
        if tokens is None:
            raise
        raise ValueError(
            f"not enough memory for the keys and values of {tokens:,} tokens: expected a smaller "
            "limit of the cache, or more ranks"
        ) from error
