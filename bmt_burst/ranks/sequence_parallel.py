"""This rank's place among the ranks that share a sequence."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..base.arguments import as_int, check_dim, check_tensor
from ..base.compiled import not_compiled
from ..base.policies import without_policies
from ..errors import RanksDisagree
from ..sequence.layout import Layout, layout_class
from ..transport import ALONE
from .agreement import admit_one_thread, agree
from .collectives import Join, Sum, apply_together, describe_tensor
from .rings import Group, make_rings


@dataclass(frozen=True)
class SequenceParallel:
    """This rank's place among the ranks that share its sequence, and the sequence's layout. By
    default this rank is alone.

    rank    this rank's number, 0 to size - 1
    size    the number of ranks
    layout  the name of a layout, for sequences of any length, or a Layout, for sequences of its
            length
    groups  the keyword arguments with which burst_attn_func runs over these ranks

    A copy (copy.copy, copy.deepcopy) has the same groups. A pickle has none, since groups do not
    outlive their process: it is read as DetachedGroups. A rank alone is pickled as it is.
    """

    rank: int = 0
    size: int = 1
    layout: str | Layout = "zigzag"
    process_group: Group | None = ALONE
    double_group: tuple[Group | None, Group | None] = (None, None)

    def __copy__(self) -> SequenceParallel:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> SequenceParallel:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.process_group is ALONE:
            return SequenceParallel, (self.rank, self.size, self.layout)
        return DetachedGroups, (self.size,)

    @property
    def groups(self) -> dict[str, Any]:
        """process_group, double_group and layout, as keyword arguments of burst_attn_func."""
        return {
            "process_group": self.process_group,
            "double_group": self.double_group,
            "layout": self.layout,
        }

    def with_layout(self, layout: str | Layout) -> SequenceParallel:
        """Return the same ranks and groups with another layout.

        Raises ValueError for an unknown name or a layout of another number of ranks, TypeError for
        anything else.
        """
        if not isinstance(layout, Layout):
            layout_class(layout)
        elif layout.size != self.size:
            raise ValueError(f"expected a layout on {self.size} ranks, got one on {layout.size}")
        return dataclasses.replace(self, layout=layout)

    def layout_of(self, seq_len: int) -> Layout:
        """Return the layout of a sequence of `seq_len` tokens.

        Raises ValueError if it is too short, or if the layout is for another length.
        """
        if not isinstance(self.layout, Layout):
            return Layout.named(self.layout, seq_len, self.size)
        if self.layout.seq_len != as_int("seq_len", seq_len):
            raise ValueError(
                f"the layout is for sequences of {self.layout.seq_len} tokens, got one of {seq_len}"
            )
        return self.layout

    def positions(self, seq_len: int, device: torch.device | str | None = None) -> Tensor:
        """Return the global positions of this rank's tokens of a sequence of `seq_len`: (S_local,)
        int64.
        """
        return self.layout_of(seq_len).positions(self.rank, device)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of `x` along `dim`, a differentiable copy. `x` is whole and the
        same on every rank.

        Raises as `layout_of` for a number of entries that cannot be cut.
        """
        dim = check_dim(x, dim)
        return self.layout_of(x.shape[dim]).shard(x, self.rank, dim)

    @not_compiled
    def longest(self, positions: Tensor) -> Tensor:
        """Return the largest position on any rank, plus 1: () for `positions` (S_local,) int64,
        (B,) for (B, S_local).

        Rotary scalings that depend on a length use this one. Every rank must call it with its part.
        If positions are on a GPU, the host waits for it. Raises on every rank if one has no
        positions, or has them in another dtype or on a device that the group cannot exchange.
        Raises RanksDisagree if ranks differ in B.
        """
        if self.size == 1:
            return _find_longest(positions)
        rings = make_rings(self.process_group, self.double_group)
        find = functools.cache(lambda: _find_longest(positions).unsqueeze(0))  # one row of a whole
        with without_policies(), admit_one_thread(rings, "a call of longest"):
            agree(rings, "longest", lambda: describe_tensor(rings, "longest", find()))
            mine = find()
            one_each = Layout.contiguous(rings.size, rings.size)
            join = Join(one_each, 0, [mine.shape] * rings.size, "longest")
            return apply_together(rings, join, mine).amax(0)

    @not_compiled
    def unshard(self, x: Tensor, seq_len: int, dim: int = 1) -> Tensor:
        """Return the whole tensor that `shard` cut, on every rank. Every rank must call it with its
        part `x`.

        Differentiable once. The backward adds up all ranks' gradients of the whole tensor, and
        returns the gradient of this rank's part. So if every rank computes the same loss from whole
        tensors, the mean over ranks of the parameters' gradients is the gradient of the loss. Every
        rank must take part in the backward. Integers and bools have no gradient.

        Raises ValueError or TypeError on every rank if any rank's `x` is no tensor on a device of
        the group, or does not have that rank's tokens of a sequence of `seq_len`. Raises
        RanksDisagree if ranks differ in layout, dtype, whether autograd records the call, or
        anything else. Raises RuntimeError inside transforms of torch.func and in forward mode, and
        in a backward with create_graph.
        """
        rings = make_rings(self.process_group, self.double_group)

        def terms() -> dict[str, Any]:
            tensor = describe_tensor(rings, "unshard", x)
            layout = self.layout_of(seq_len)
            where = {"dim": check_dim(x, dim), "seq_len": layout.seq_len, "layout": layout.term}
            return tensor | where

        with without_policies(), admit_one_thread(rings, "a call of unshard"):
            everyone = agree(rings, "unshard", terms, but=["shape"])
            layout, dim = self.layout_of(seq_len), everyone[0]["dim"]
            shapes = [theirs["shape"] for theirs in everyone]
            for rank, shape in enumerate(shapes):
                expected = list(shapes[0])
                expected[dim] = layout.length(rank)
                if shape != expected:
                    raise RanksDisagree(
                        f"expected rank {rank}'s x, of {seq_len} tokens along {dim}, to be "
                        f"{expected}, got {shape}"
                    )
            return apply_together(rings, Join(layout, dim, [*map(torch.Size, shapes)]), x)

    @not_compiled
    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, on every rank. Every rank must call it, with a tensor
        of the same shape and dtype.

        For losses of whole sequences: add up each rank's part of a sum over tokens. Half precision
        is added up in fp32, and the result has x's dtype. Integers and bools become int64.

        Differentiable once, by the rule of `unshard`: the backward adds up the gradients of all
        ranks. Integers and bools have no gradient. Raises the errors of `unshard`.
        """
        rings = make_rings(self.process_group, self.double_group)
        with without_policies(), admit_one_thread(rings, "a call of sum"):
            agree(rings, "sum", lambda: describe_tensor(rings, "sum", x))
            return apply_together(rings, Sum(), x)


def check_sp(sp: Any) -> SequenceParallel:
    """Return sp. Raises TypeError if it is not a SequenceParallel."""
    if not isinstance(sp, SequenceParallel):
        raise TypeError(
            f"sp must be a SequenceParallel, from init_sequence_parallel, got {type(sp).__name__}"
        )
    return sp


def _find_longest(positions: Tensor) -> Tensor:
    """Return the largest position plus 1, of each row. Raises TypeError unless they are int64."""
    check_tensor("positions", positions)
    if positions.dtype != torch.int64:  # shorter numbers may overflow
        raise TypeError(f"positions must be int64, got {positions.dtype}")
    return positions.amax(-1) + 1


class DetachedGroups:
    """A SequenceParallel of `size` ranks that was read from a pickle. Using it raises RuntimeError.

    A layer that holds it needs `layer.attach(sp)`.
    """

    def __init__(self, size: int):
        self._size = size

    def __repr__(self) -> str:
        return f"DetachedGroups({self._size})"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # protocols of Python ask for them
            raise AttributeError(name)
        raise RuntimeError(
            f"this was read from a pickle, which has no groups: its {self._size} ranks shared a "
            "sequence in another process. Call attach(sp) of the layer or model first, with the sp "
            "that init_sequence_parallel returned here"
        )
