"""The seam between a call of attention and an extension of it.

An extension narrows what queries attend to, or adds to their scores, by tensors of its own. One
that only computes pairs in another way returns the plan of a strategy, with a
`Scoring` in its problem. An extension that moves tensors of its own has its own `Plan`, which may
contain a strategy's. Such a plan uses `Rings.gather_tensors` and `Rings.sum_for_each`, or
`exchange` and `deliver` of the rings' transports. It calls `Rings.reserve` even if it never
delivers. Either may have inputs with gradients: `Plan.forward` and `Plan.backward`.

The seam is for softmax attention: sinks and return_lse need the lse of a plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from ..kernels import Kernel
from ..sequence.mask import Mask
from ..spec import Spec
from . import Plan, Problem, choose
from .compute import Tensors as Tensors


class DenseCall(NamedTuple):
    """A checked call without its extension. Without a mask it has any length."""

    q: Tensor
    k: Tensor
    mask: Mask | None
    causal: bool
    kernel: Kernel
    spec: Spec


class Extension(ABC):
    """An extension of attention, as a call asks for it. Its tensors are passed separately.

    It is immutable and hashable. Checked calls are kept. So `check`, `bind` and `terms` depend on
    what tensors are and on whether the call is recomputed, but not on values.

    name               what messages call it
    kind               the name in a configuration (`register_extension`), None if it has none
    brings             the argument that brings a mask, if any
    takes_two_lengths  whether queries and keys may be other tokens, or lie elsewhere
    memory             the class of a layer's memory, None if there are no chunks and new tokens
    """

    name: str
    kind: ClassVar[str | None] = None
    brings: str = "nothing"
    takes_two_lengths: bool = False
    memory: ClassVar[Any] = None

    @property
    def mask(self) -> Mask | None:
        """The visible pairs, if the extension brings a mask."""
        return None

    @abstractmethod
    def check(self, tensors: Tensors, q: Tensor, k: Tensor) -> None:
        """Raise TypeError or ValueError if tensors are wrong. q and k are those of the user."""

    def for_layer(self, *, rotary: bool, window: int | None, softcap: float | None) -> Self:
        """Return the extension of a layer with these options. Raises ValueError if it excludes one.

        rotary  whether the layer rotates q and k
        """
        return self

    def of_layer(self, q: Tensor, k: Tensor) -> Tensors:
        """Return the tensors that a layer passes, from q (B, S, H, D) and k (B, S, G, D) before
        they are rotated.
        """
        return ()

    def work_mask(self, mask: Mask) -> Mask:
        """Return a mask with about the work of each query, by which layouts are balanced."""
        return mask

    def to_dict(self) -> dict[str, Any]:
        """Return the values of a configuration, as JSON takes them: those of `from_dict`."""
        raise TypeError(f"{type(self).__name__} has no place in a configuration")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the extension with these values. Raises TypeError or ValueError for wrong ones."""
        raise TypeError(f"{cls.__name__} has no place in a configuration")

    def prepare(self, tensors: Tensors, q: Tensor) -> Tensors:
        """Return the plan's inputs. q (B, S, H, D) is prepared."""
        return tensors

    def of_rows(self, batch: int) -> Sequence[Self]:
        """Return the extension of each row of the batch."""
        return (self,) * batch

    @classmethod
    def join(cls, rows: Sequence[Self]) -> Self:
        """Return one extension for all rows as one sequence, in which no token sees another row."""
        return rows[0]

    def join_rows(self, tensors: Tensors) -> Tensors:
        """Return the plan's inputs if all rows of the batch are computed as one sequence."""
        return tensors

    @abstractmethod
    def bind(self, tensors: Tensors, call: DenseCall) -> Self:
        """Return the extension for a call with these inputs, on this rank.

        Raises ValueError if it does not fit the call.
        """

    def in_chunks(self, masks: Sequence[Mask]) -> Self | None:
        """Return the extension for chunks of a sequence with these masks, one for each row or one
        for all, or for new tokens if there are none. None: they are dense.
        """
        return self

    @abstractmethod
    def terms(self, tensors: Tensors) -> dict[str, Any]:
        """Return the values that must be equal on all ranks, as JSON takes them."""

    def plan(self, problem: Problem, rank: int, strategy: str) -> Plan:
        """Return the plan of a rank. `problem` is the dense one.

        Raises ValueError if the strategy refuses.
        """
        return choose(strategy, problem).plan(problem, rank)
