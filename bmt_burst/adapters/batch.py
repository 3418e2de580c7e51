"""The batch of whole sequences, from the parts of it that the ranks pass to a model's forward.

A rank's tensors tell neither lengths nor padding of the whole sequences, so ranks exchange both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.arguments import check_tensor
from ..ranks.agreement import agree, describe_term
from ..ranks.sequence_parallel import SequenceParallel
from ..sequence.layout import Layout
from ..sequence.mask import Mask, Slice
from ..sequence.rows import (
    Layouts,
    Masks,
    check_lengths,
    check_seq_len,
    layouts_of_rows,
    masks_of_rows,
)
from ..sequence.span import Span, merged

_MOST_MASKS = 256  # of padded rows that are kept
_MOST_SLICES = 1 << 16  # of a row's mask: a plan of more would take minutes
# in the order of the fields of a _Kind
_MARKS = ("attention_mask", "context", "span", "token_type_ids", "position_ids")


class _Kind(NamedTuple):
    """A span of tokens with the same marks."""

    where: Span
    valid: bool
    context: int  # 1 or 0, or -1 in rows without a context
    span: int
    segment: int
    shift: int  # their position_ids minus their indices in the sequence


@dataclass(frozen=True)
class Row:
    """A whole sequence of S tokens."""

    layout: Layout  # on the ranks
    mask: Mask | None  # that was given
    kinds: tuple[_Kind, ...]  # its tokens in spans of one kind

    @property
    def valid(self) -> tuple[Span, ...]:
        """The spans of positions that are not padding, rising."""
        return merged(kind.where for kind in self.kinds if kind.valid)

    def positions(self) -> Tensor:
        """Return each token's position in its document of a mask, (S,) int64 on the CPU."""
        return torch.arange(self.layout.seq_len) if self.mask is None else self.mask.positions()

    def visible(self, causal: bool, padding_sees: bool) -> Mask:
        """Return the mask that was given, or that follows from padding, context and spans.

        No token sees padding. If `padding_sees`, padding sees as a token in its place would, but
        nothing in rows with a context.
        """
        if self.mask is not None:
            return self.mask
        return _make_mask(self.kinds, self.layout.seq_len, causal, padding_sees)


@dataclass(frozen=True)
class Batch:
    """Whole sequences, identical on all ranks: a row for each, or one for all if they are equal."""

    rank: int
    rows: tuple[Row, ...]

    def shard(self, whole: Iterable[Tensor]) -> Tensor:
        """Return this rank's part of (S,) for each row: (S_local,) or, if rows differ, (B, ...)."""
        pairs = zip(self.rows, whole, strict=True)
        parts = [row.layout.shard(x, self.rank, dim=0) for row, x in pairs]
        return parts[0] if len(parts) == 1 else torch.stack(parts)

    def options(self, name: str, of_row: Callable[[Row], Any]) -> dict[str, Any]:
        """Return options of burst_attn_func: the layout, and the option `name` of each row."""
        found = {name: [*map(of_row, self.rows)], "layout": [row.layout for row in self.rows]}
        return {key: rows[0] if len(rows) == 1 else rows for key, rows in found.items()}


def agree_on_batch(sp: SequenceParallel, doing: str, make_part: Callable[[], LocalPart]) -> Batch:
    """Return the batch that the ranks' parts make. Every rank of `sp` must call it.

    doing      the next step of the ranks, for errors

    Raises ValueError or TypeError on every rank for arguments that are wrong on any or differ.
    """
    make_part = functools.cache(make_part)
    everyone = agree(sp.rings, "", lambda: make_part().terms, but=("tokens",), doing=doing)
    return make_part().make_batch([theirs["tokens"] for theirs in everyone])


class LocalPart:
    """A rank's part of the inputs of a forward.

    tensors       by name, tensors of this rank's tokens: (B, S_local, ...), or None; at least one
    length        (B,) integers: tokens of the whole rows, without the padding after them
    mask, layout  one for all rows or one for each; by default no mask, and sp's layout
    marks         integers of this rank's tokens by name, or None: see below

    These are the marks, (B, S_local), or (S_local,) or (1, S_local) if rows are equal:

    attention_mask  only (B, S_local), 0 where this rank's tokens are padding
    context         not 0 for a token that all tokens except padding see. It sees only such tokens
    span            tokens see only tokens with the same number
    token_type_ids  any numbers
    position_ids    any numbers; most rise by one

    Raises ValueError or TypeError if an argument is wrong.
    """

    def __init__(
        self,
        sp: SequenceParallel,
        tensors: Mapping[str, Tensor | None],
        length: Tensor | None,
        mask: Masks | None,
        layout: Layouts | None,
        marks: Mapping[str, Tensor | None],
    ):
        self.sp = sp
        self.size, self.tokens = _check_shapes(tensors)
        given = {name: x for name, x in marks.items() if x is not None}
        _check_exclusive({"length": length, "mask": mask, **given})
        self.lengths = None if length is None else _read_lengths(length, self.size)
        self.masks = masks_of_rows(mask, self.size) or (None,) * self.size
        self.layouts = layouts_of_rows(sp.layout if layout is None else layout, self.size)
        self.placed = {row: sp.with_layout(row) for row in self.layouts}
        self.marks = {name: self._check_mark(name, x) for name, x in given.items()}
        if self.marks and len(self.placed) > 1:
            raise ValueError(
                f"rows with different layouts take length or mask, got {' and '.join(self.marks)}"
            )

    @property
    def terms(self) -> dict[str, Any]:
        """The arguments as JSON. All but "tokens" must be equal on all ranks."""
        return {
            "batch": self.size,
            "tokens": self.tokens,
            "length": self.lengths,
            **{name: "given" if name in self.marks else None for name in _MARKS},
            "mask": [mask and mask.digest for mask in self.masks],
            "layout": [describe_term(layout) for layout in self.layouts],
        }

    def make_batch(self, tokens: list[int]) -> Batch:
        """Return the batch of all ranks' numbers of tokens. Raises ValueError on every rank."""
        seq_len = sum(tokens)
        layouts = {row: sp.layout_of(seq_len) for row, sp in self.placed.items()}
        for layout in layouts.values():
            check_lengths(layout, tokens)
        for mask in self.masks:
            if mask is not None:
                check_seq_len(mask, tokens)
        marks = self._gather_marks(seq_len)
        if self.lengths is not None:
            marks["attention_mask"] = _mark_lengths(self.lengths, seq_len)
        rows = tuple(
            Row(layouts[layout], mask, _find_kinds(seq_len, {k: x[i] for k, x in marks.items()}))
            for i, (layout, mask) in enumerate(zip(self.layouts, self.masks, strict=True))
        )
        return Batch(self.sp.rank, rows[:1] if len(set(rows)) == 1 else rows)

    def _check_mark(self, name: str, x: Tensor) -> Tensor:
        """Return the numbers as (B, S_local) int64."""
        shape, is_padding = (self.size, self.tokens), name == "attention_mask"
        check_tensor(name, x)
        if x.is_floating_point() and not is_padding:
            raise ValueError(f"{name} must be integers, got {x.dtype}")
        of_equal_rows = () if is_padding else ((1, self.tokens), (self.tokens,))
        if tuple(x.shape) not in (shape, *of_equal_rows):
            hint = ", 0 where they are padding; to hide other tokens pass a mask" * is_padding
            raise ValueError(
                f"{name} must be of this rank's tokens, {shape}, got shape {tuple(x.shape)}{hint}"
            )
        return (x.ne(0) if name in ("attention_mask", "context") else x).long().expand(shape)

    def _gather_marks(self, seq_len: int) -> dict[str, Tensor]:
        """Return the numbers of all ranks' tokens, (B, S) int64 on the CPU."""
        if not self.marks:
            return {}
        [sp] = self.placed.values()
        whole = sp.unshard(torch.stack([*self.marks.values()]), seq_len, 2).cpu()
        return dict(zip(self.marks, whole, strict=True))


def _mark_lengths(lengths: list[int], seq_len: int) -> Tensor:
    """Return (B, S) int64, 1 up to the length of each row."""
    if max(lengths) > seq_len:
        raise ValueError(
            f"length must be of whole rows, {seq_len} tokens at most, got {max(lengths)}"
        )
    return torch.arange(seq_len).lt(torch.tensor(lengths).unsqueeze(1)).long()


def _find_kinds(seq_len: int, marks: dict[str, Tensor]) -> tuple[_Kind, ...]:
    """Return the longest spans in which no mark changes. `marks` are (S,) int64 each."""
    at, same = torch.arange(seq_len), torch.zeros(seq_len, dtype=torch.int64)
    defaults = {"attention_mask": same + 1, "context": same - 1, "position_ids": at}
    numbers = torch.stack([marks.get(name, defaults.get(name, same)) for name in _MARKS])
    numbers[-1] -= at
    changes = (numbers[:, 1:] != numbers[:, :-1]).any(0).nonzero().flatten() + 1
    bounds = [0, *changes.tolist(), seq_len]
    return tuple(
        _Kind(where, bool(valid), *others)
        for where, (valid, *others) in zip(
            itertools.pairwise(bounds), numbers[:, bounds[:-1]].T.tolist(), strict=True
        )
    )


def _check_shapes(tensors: Mapping[str, Tensor | None]) -> tuple[int, int]:
    """Return B and S_local. Raises ValueError if the tensors disagree about them."""
    shapes = {}
    for name, x in tensors.items():
        if x is not None:
            check_tensor(name, x)
            shapes[name] = tuple(x.shape)
    if not shapes:
        raise ValueError(f"expected tokens, as {' or '.join(tensors)}, got none")
    first = next(iter(shapes.values()))[:2]
    if len(first) < 2 or any(shape[:2] != first for shape in shapes.values()):
        raise ValueError(
            "tensors of this rank's tokens must be (B, S_local, ...), with equal sizes, "
            f"got {shapes}"
        )
    return first[0], first[1]


def _check_exclusive(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that say the same thing twice."""
    given = [name for name, x in arguments.items() if x is not None]
    masking = "length", "attention_mask", "mask"
    if len(names := [name for name in masking if name in given]) > 1:
        raise ValueError(f"expected one of {', '.join(masking)}, got {' and '.join(names)}")
    names = [name for name in ("context", "span") if name in given]
    if names and "mask" in given:
        raise ValueError(
            f"expected a mask alone, got {' and '.join(names)} too: a mask has all visible pairs"
        )


def _read_lengths(length: Tensor, size: int) -> list[int]:
    check_tensor("length", length)
    if length.shape != (size,) or length.is_floating_point() or length.dtype == torch.bool:
        raise ValueError(
            f"length must be integers ({size},), one for each whole row, "
            f"got shape {tuple(length.shape)} and {length.dtype}"
        )
    lengths = length.tolist()
    if min(lengths) < 0:
        raise ValueError(f"length must be 0 or more, got {min(lengths)}")
    return lengths


@functools.lru_cache(maxsize=_MOST_MASKS)
def _make_mask(kinds: tuple[_Kind, ...], seq_len: int, causal: bool, padding_sees: bool) -> Mask:
    """Return the mask of a row, once for all layers and calls, so that they share its plans."""
    of_span: dict[int, list[_Kind]] = {}
    for kind in kinds:
        of_span.setdefault(kind.span, []).append(kind)
    low = 0 if causal else None
    found = (_find_areas(same, low, padding_sees) for same in of_span.values())
    areas = [*itertools.chain.from_iterable(found)]
    count = sum(len(queries) * len(keys) for queries, keys, _ in areas)
    if count > _MOST_SLICES:
        raise ValueError(
            "padding, context and spans alternate too often: expected a mask of at most "
            f"{_MOST_SLICES} slices, got {count}"
        )
    slices = [Slice(q, kv, low) for queries, keys, low in areas for q in queries for kv in keys]
    return Mask(seq_len, tuple(slices))


def _find_areas(
    kinds: list[_Kind], low: int | None, padding_sees: bool
) -> list[tuple[tuple[Span, ...], tuple[Span, ...], int | None]]:
    """Return the queries of one span number, the keys that they see, and the least distance."""
    valid = merged(kind.where for kind in kinds if kind.valid)
    if kinds[0].context < 0:
        queries = merged(kind.where for kind in kinds) if padding_sees else valid
        return [(queries, valid, low)]
    first, rest = (
        merged(kind.where for kind in kinds if kind.valid and kind.context == context)
        for context in (1, 0)
    )
    return [(valid, first, None), (rest, rest, low)]
