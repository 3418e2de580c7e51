"""This rank's place among the ranks that share a sequence."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from ..base.arguments import as_bool, as_int, check_choice, check_dim, check_tensor
from ..base.compiled import not_compiled
from ..sequence.layout import LAYOUTS, Balanced, Layout, Stacked, layout_class, shift_labels
from ..sequence.mask import Mask
from ..sequence.rows import (
    Layouts,
    Masks,
    Rows,
    layouts_of_rows,
    masks_of_layouts,
    masks_of_rows,
    resolve_layouts,
    stack_rows,
)
from ..transport import ALONE
from .agreement import Terms, describe_term, refuse, run_agreed
from .collectives import Join, RankSum, apply_together
from .rings import Group, Rings, make_rings

Item = TypeVar("Item")
Placed = tuple[str | Layout, ...]  # by row

OF_LAYER = "the attention of a layer"  # in the ranks' messages
_MOST_LOCAL = 64  # sequences of single calls that are kept


@dataclass(frozen=True)
class SequenceParallel:
    """This rank's place among the ranks that share its sequence, and the sequence's layout. By
    default this rank is alone, while burst_attn_func without a group takes all ranks.

    rank    this rank's number, 0 to size - 1
    size    the number of ranks
    layout  the name of a layout, or a Layout, for sequences of its length

    A copy has the same groups. A pickle of several ranks has none, since groups do not outlive
    their process: it is read as DetachedGroups.
    """

    rank: int = 0
    size: int = 1
    layout: str | Layout = "zigzag"
    process_group: Group | None = ALONE
    double_group: tuple[Group | None, Group | None] = (None, None)

    def __deepcopy__(self, *_memo: Any) -> SequenceParallel:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        if self.process_group is ALONE:
            return SequenceParallel, (self.rank, self.size, self.layout)
        return DetachedGroups, (self.size,)

    @property
    def rings(self) -> Rings:
        """The rings between these ranks."""
        return make_rings(self.process_group, self.double_group)

    @property
    def groups(self) -> dict[str, Any]:
        """The keyword arguments with which burst_attn_func runs over these ranks."""
        names = "process_group", "double_group", "layout"
        return {name: getattr(self, name) for name in names}

    def with_layout(self, layout: str | Layout) -> SequenceParallel:
        """Return the same ranks and groups with another layout. Raises TypeError or ValueError for
        all but a known name, or a layout of as many ranks.
        """
        if not isinstance(layout, Layout):
            layout_class(layout)
        elif layout.size != self.size:
            raise ValueError(f"expected a layout on {self.size} ranks, got one on {layout.size}")
        return dataclasses.replace(self, layout=layout)

    def layout_of(self, seq_len: int) -> Layout:
        """Return the layout of a sequence of `seq_len` tokens. Raises ValueError if it has none."""
        if not isinstance(self.layout, Layout):
            return Layout.named(self.layout, seq_len, self.size)
        if self.layout.seq_len != as_int("seq_len", seq_len):
            expected = f"the layout is for sequences of {self.layout.seq_len} tokens"
            raise ValueError(f"{expected}, got one of {seq_len}")
        return self.layout

    def positions(self, seq_len: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of this rank's tokens of a sequence: (S_local,) int64."""
        return self.layout_of(seq_len).positions(self.rank, device)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of `x` along `dim`, a differentiable copy. `x` is whole and the
        same on every rank. Raises as `layout_of` does for its number of entries.
        """
        dim = check_dim(x, dim)
        return self.layout_of(x.shape[dim]).shard(x, self.rank, dim)

    @not_compiled
    def longest(self, positions: Tensor) -> Tensor:
        """Return the largest position on any rank, plus 1: () for `positions` (S_local,) int64,
        (B,) for (B, S_local). Rotary scalings may depend on it.

        Every rank must call it with its part. The host waits for a GPU. Raises on every rank if one
        has no positions, or has them in another dtype or on a device that the group cannot
        exchange. Raises RanksDisagree if ranks differ in B.
        """
        if self.size == 1:
            return _find_longest(positions)

        def check() -> tuple[Tensor, Join]:
            mine = _find_longest(positions).unsqueeze(0)  # one row of a whole
            return mine, Join(Layout.contiguous(self.size, self.size), 0, "longest")

        return apply_together(self.rings, "longest", check).amax(0)

    @not_compiled
    def unshard(self, x: Tensor, seq_len: int, dim: int = 1) -> Tensor:
        """Return the whole tensor that `shard` cut, on every rank. Every rank must call it with its
        part `x`.

        Differentiable once. The backward, in which every rank must take part, adds up all ranks'
        gradients of the whole tensor, and returns the gradient of this rank's part. So if every
        rank computes the same loss from whole tensors, the mean over ranks of the parameters'
        gradients is the gradient of the loss.

        Raises ValueError or TypeError on every rank if any rank's `x` is no tensor on a device of
        the group with that rank's tokens. Raises RanksDisagree if ranks differ in anything else, as
        dtype, or whether autograd records the call. Raises RuntimeError inside transforms of
        torch.func, in forward mode, and in a backward with create_graph.
        """

        def check() -> tuple[Tensor, Join]:
            check_tensor("x", x)
            return x, Join(self.layout_of(seq_len), check_dim(x, dim))

        return apply_together(self.rings, "unshard", check)

    @not_compiled
    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, such as parts of a loss, on every rank. Every rank must
        call it, with a tensor of the same shape and dtype.

        Half precision is added up in fp32, and the result has x's dtype. Integers and bools become
        int64. Differentiable once: the backward adds up the gradients of all ranks, as that of
        `unshard`. Raises the errors of `unshard`.
        """

        def check() -> tuple[Tensor, RankSum]:
            check_tensor("x", x)
            return x, RankSum()

        return apply_together(self.rings, "sum", check)

    @not_compiled
    def sequence(
        self, mask: Masks, layout: Layouts = Balanced.name, kv_layout: Layouts | None = None
    ) -> WholeSequence:
        """Return whole sequences, a batch, over these ranks. Every rank must call it once a batch.

        mask               the visible pairs, or a mask for each row of the batch
        layout, kv_layout  as burst_attn_func's

        Ranks compare masks and layouts once, and not in calls with the result. Raises ValueError or
        TypeError on all ranks if they do not fit, and RanksDisagree if ranks differ in them.
        """
        doing = "a call of sequence"

        def check() -> tuple[Terms, WholeSequence]:
            if mask is None:
                raise TypeError("mask must be a Mask or one for each row, got NoneType")
            whole = WholeSequence.local(mask, layout, kv_layout).resolve(self)
            rows = whole.find_rows(whole.batch, self.size)
            return Terms(doing, rows.terms, of=" of a sequence"), whole

        return run_agreed(self.rings, doing, check, lambda whole, _: whole)


class WholeSequence:
    """A whole sequence, or a batch of them, as all layers of a model get it. It prints itself, and
    it is immutable. It is no dataclass, since wrappers of models would rebuild it in each forward.

    mask       the visible pairs, of all rows or of each. None: all pairs are visible, or with
               `causal` the earlier ones, and the length is not known
    layout     a layout or the name of one, of all rows or of each
    kv_layout  that of the keys, or None for `layout`
    packed     whether the mask was made of the cu_seqlens that the user passed
    sp         the ranks that share it. A sequence of a single call has none: the call names them
    """

    saves_graph: ClassVar[bool] = True
    sp: SequenceParallel

    def __init__(
        self,
        mask: Mask | tuple[Mask, ...] | None = None,
        layout: str | Layout | tuple[str | Layout, ...] = "zigzag",
        kv_layout: str | Layout | tuple[str | Layout, ...] | None = None,
        causal: bool = False,
        packed: bool = False,
    ):
        self.mask, self.layout, self.kv_layout = mask, layout, kv_layout
        self.causal, self.packed = as_bool("causal", causal), packed
        if layout is None:
            raise TypeError("layout must be a Layout or one for each row, got NoneType")
        for name, given in (("layout", layout), ("kv_layout", kv_layout)):
            for row in layouts_of_rows(given, _count_rows(given), name):
                if isinstance(row, str):
                    check_choice(name, row, (*LAYOUTS, Balanced.name))
        if masks_of_rows(mask, _count_rows(mask)) and causal:
            raise ValueError(
                "expected mask or causal, got both: use a mask as Mask.documents(..., causal=True)"
            )

    @staticmethod
    def local(
        mask: Masks | None = None,
        layout: Layouts = "zigzag",
        kv_layout: Layouts | None = None,
        causal: bool = False,
        packed: bool = False,
    ) -> WholeSequence:
        """Return the sequence that these arguments name, without messages. The latest are kept.
        Raises TypeError or ValueError if an argument is wrong.
        """
        rows = (tuple(x) if isinstance(x, list) else x for x in (mask, layout, kv_layout))
        given: tuple[Any, ...] = (*rows, causal, packed)
        try:
            return _find_local(*given)
        except TypeError:  # nothing that has no hash is a mask or a layout
            return WholeSequence(*given)

    @functools.cached_property
    def digest(self) -> str:
        """A text that is equal for equal sequences of this process, whoever shares them."""
        arguments = self.mask, self.layout, self.kv_layout
        return json.dumps([*arguments, self.causal, self.packed], default=describe_term)

    @property
    def batch(self) -> int:
        """The number of rows that masks or layouts name, 1 if they name none."""
        return max(map(_count_rows, (self.mask, self.layout, self.kv_layout)))

    @property
    def seq_len(self) -> int:
        """The number of queries of a row, once layouts are known."""
        return self._layouts[0].seq_len

    def on(self, sp: SequenceParallel) -> WholeSequence:
        """Return this sequence as one of the ranks of `sp`, which have not compared it."""
        found = copy.copy(self)
        found.sp = sp
        return found

    def resolve(self, sp: SequenceParallel) -> WholeSequence:
        """Return this sequence, which has masks, with Layouts over the ranks of `sp`."""
        masks, layouts, kv_layouts = self._expand(self.batch)
        rows = zip(layouts, kv_layouts or (None,) * len(layouts), masks, strict=True)
        found = [resolve_layouts(*row, sp.size) for row in rows]
        of_queries, of_keys = zip(*found, strict=True)
        keys = [x or y for x, y in zip(of_keys, of_queries, strict=True)]
        kv_layout = _join_equal(keys) if any(of_keys) else None
        return WholeSequence(_join_equal(masks), _join_equal(of_queries), kv_layout).on(sp)

    def find_rows(self, batch: int, size: int, extensions: Sequence[Any] = ()) -> Rows:
        """Return the masks and layouts of a batch on `size` ranks, as those of one sequence.

        extensions  the extension of each row, which may bring a mask

        Raises TypeError or ValueError for a mask, a layout or rows that do not fit together.
        """
        masks, layouts, kv_layouts = self._expand(batch)
        brought = tuple(row.mask for row in extensions if row.mask is not None)
        if brought and (self.causal or masks):
            what = f"expected {extensions[0].brings} alone"
            raise ValueError(f"{what}, got mask or causal too: they have a mask")
        for name, given in (("layout", layouts), ("kv_layout", kv_layouts)):
            for layout in given:
                if isinstance(layout, Layout) and layout.size != size:
                    raise ValueError(f"expected a {name} on {size} ranks, got one on {layout.size}")
        masks = masks or brought
        if all(len(set(rows)) <= 1 for rows in (extensions, masks, layouts, kv_layouts)):
            mask, kv_layout = masks[0] if masks else None, kv_layouts[0] if kv_layouts else None
            return Rows(mask, self.causal, layouts[0], kv_layout, packed=self.packed)
        masks = masks or masks_of_layouts(layouts, kv_layouts, self.causal)
        mask, layout, kv_layout = stack_rows(masks, layouts, kv_layouts, size)
        return Rows(mask, self.causal, layout, kv_layout, stacked=batch)

    @not_compiled
    def mix(self, layer: int, kind: Any, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        """Return the attention of a layer: (B, S_local, H, D). Its kind may take more `tensors`."""
        try:
            check_kind(kind, tensors)
        except (TypeError, ValueError) as error:
            self.refuse(error)
        out: Tensor = kind.attend(self, q, k, v, *tensors)
        return out

    def refuse(self, error: Exception, doing: str = OF_LAYER) -> NoReturn:
        """Raise `error` instead of the call `doing`. The other ranks raise RanksDisagree."""
        refuse(self.sp.rings, doing, error)

    def select(self, x: Tensor) -> Tensor:
        """Return x: all tokens get a result."""
        return x

    def check_positions(self, positions: Tensor) -> None:
        """Accept positions: shards of a whole sequence are not checked."""

    def longest(self, positions: Tensor) -> Tensor:
        """Return `SequenceParallel.longest` of the positions."""
        return self.sp.longest(positions)

    def sum(self, x: Tensor) -> Tensor:
        """Return `SequenceParallel.sum` of x."""
        return self.sp.sum(x)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a whole tensor, (S_local) entries along `dim`.

        Raises ValueError if rows differ in their layouts, unless x is (B or 1, S, ...) and `dim` 1.
        """
        rank = self.sp.rank
        if isinstance(self.layout, Layout):
            return self.layout.shard(x, rank, dim)
        _check_rows(x, dim, self.batch)
        rows = zip(self._layouts, x.expand(self.batch, *x.shape[1:]), strict=True)
        return torch.stack([layout.shard(row, rank, 0) for layout, row in rows])

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the whole of all ranks' parts, as `SequenceParallel.unshard`. If rows differ in
        their layouts, x is (B, S_local, ...), and `dim` 1.
        """
        sp = self.sp
        if isinstance(self.layout, Layout):
            return sp.with_layout(self.layout).unshard(x, self.layout.seq_len, dim)
        _check_rows(x, dim, self.batch)
        stacked = Stacked(self._layouts)
        whole = sp.with_layout(stacked).unshard(x.flatten(0, 1), stacked.seq_len, 0)
        # unflatten would return a view, and FSDP2 loses the gradient of one that changes in place
        shape = len(x), self.seq_len, *whole.shape[1:]
        joined: Tensor = torch.ops.aten._unsafe_view(whole, shape)
        return joined

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of this rank's tokens in their documents, for rotary embedding:
        (S_local,) int64, or (B, S_local) if rows differ.

        Raises the errors of `Mask.positions`.
        """
        found = [mask.positions(device) for mask in self._expand(self.batch)[0]]
        return self.shard(torch.stack(found)) if len(found) > 1 else self.shard(found[0], 0)

    def shift_labels(self, tokens: Tensor) -> Tensor:
        """Return the next-token labels of the whole tokens (B, S), as `shift_labels` with masks."""
        return shift_labels(tokens, mask=self.mask)

    @property
    def _layouts(self) -> tuple[Layout, ...]:
        return tuple(x for x in self._expand(self.batch)[1] if isinstance(x, Layout))

    def _expand(self, batch: int) -> tuple[tuple[Mask, ...], Placed, Placed]:
        """Return the mask, the layout and the kv_layout of each row, or none if none was given."""
        layouts = layouts_of_rows(self.layout, batch)
        kv_layouts = layouts_of_rows(self.kv_layout, batch, "kv_layout")
        return masks_of_rows(self.mask, batch), layouts, kv_layouts

    def __str__(self) -> str:
        """Draw the mask and list the runs of each rank. If rows differ, show the first."""
        masks, layouts, keys = self._expand(self.batch)
        rows = f"{len(masks)} rows, the first:\n" if len(masks) > 1 else ""
        return f"{rows}{masks[0]}\n{layouts[0]}" + (f"\nkeys:\n{keys[0]}" if keys else "")


def _check_rows(x: Tensor, dim: int, batch: int) -> None:
    """Raise ValueError unless x (batch or 1, S, ...) is to be cut or joined along S."""
    if check_dim(x, dim) != 1 or len(x) not in (1, batch):
        expected = f"a tensor of {batch} rows and dim=1, since rows have layouts of their own"
        raise ValueError(f"expected {expected}, got shape {tuple(x.shape)} and dim={dim}")


_find_local = functools.lru_cache(maxsize=_MOST_LOCAL, typed=True)(WholeSequence)


def _count_rows(given: Any) -> int:
    return len(given) if isinstance(given, tuple) else 1


def _join_equal(rows: Sequence[Item]) -> Item | tuple[Item, ...]:
    return rows[0] if len(set(rows)) == 1 else tuple(rows)


def check_sp(sp: Any) -> SequenceParallel:
    """Return sp. Raises TypeError if it is not a SequenceParallel."""
    if not isinstance(sp, SequenceParallel):
        expected = "sp must be a SequenceParallel, from init_sequence_parallel"
        raise TypeError(f"{expected}, got {type(sp).__name__}")
    return sp


def check_kind(kind: Any, tensors: Sequence[Any]) -> None:
    """Raise TypeError unless this is a kind of attention, ValueError unless it takes `tensors`."""
    if isinstance(kind, type) or not hasattr(kind, "check_tensors"):
        got = (kind if isinstance(kind, type) else type(kind)).__name__
        raise TypeError(f"kind must be a kind of attention, such as layer.kind, got {got}")
    kind.check_tensors(tensors)


def _find_longest(positions: Tensor) -> Tensor:
    """Return the largest position plus 1, of each row. Raises TypeError unless they are int64."""
    check_tensor("positions", positions)
    if positions.dtype != torch.int64:  # shorter numbers may overflow
        raise TypeError(f"positions must be int64, got {positions.dtype}")
    return positions.amax(-1) + 1


class DetachedGroups:
    """A SequenceParallel of `size` ranks, read from a pickle. Using it raises RuntimeError."""

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
