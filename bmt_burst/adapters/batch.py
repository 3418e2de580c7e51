"""The batch of whole sequences that the ranks' arguments of a model's forward are parts of.

A rank's tensors do not say how long the sequences are, nor where they are padded: the ranks tell
each other.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.arguments import check_tensor
from ..calls.masking import check_lengths, expand_rows
from ..calls.terms import compare_terms
from ..nn import Layouts, Masks
from ..ranks.agreement import gather_terms
from ..ranks.groups import SequenceParallel
from ..ranks.rings import make_rings
from ..scores import Scores
from ..sequence.layout import Layout
from ..sequence.mask import Mask, Slice
from ..sequence.span import Span, merged

# ranges of tokens, each with a number that all of its tokens have
Runs = tuple[tuple[Span, int], ...]

_MOST_MASKS = 256  # of padded rows that are kept
_FEW_ROWS = 16  # of a batch that are told to other ranks one by one
_MOST_SLICES = 1 << 16  # of a row's mask: of more, a plan would take minutes


@dataclass(frozen=True)
class Given:
    """What a rank's forward is given of its part of a batch.

    tensors         by name, those of this rank's tokens: (B, S_local, ...), or None, but not all of
                    them
    length          (B,) integers: tokens of the whole rows, without the padding after them
    attention_mask  (B, S_local), 0 where this rank's tokens are padding
    mask, layout    one for all rows or one for each; by default no mask, and sp's layout
    alike           what else must be equal on all ranks, as JSON has it, by the names that errors
                    say

    Integers of this rank's tokens, (B, S_local), or (S_local,) or (1, S_local) if rows do not
    differ:

    context         not 0 where all tokens that are no padding see a token, which sees only such
    span            tokens see those of the same number alone
    token_type_ids  numbers of any meaning, and
    position_ids    the same, most of them one more than the one before
    """

    tensors: Mapping[str, Tensor | None]
    length: Tensor | None = None
    attention_mask: Tensor | None = None
    mask: Masks | None = None
    layout: Layouts | None = None
    context: Tensor | None = None
    span: Tensor | None = None
    token_type_ids: Tensor | None = None
    position_ids: Tensor | None = None
    alike: Mapping[str, Any] = field(default_factory=dict)


class _Kind(NamedTuple):
    """What is known of some tokens of a row that says what they see."""

    where: Span
    valid: bool
    context: bool
    span: int


@dataclass(frozen=True)
class Row:
    """A whole sequence of S tokens.

    layout        how it lies on the ranks
    mask          what its tokens see, if that was given
    kinds         its tokens in ranges of one kind
    with_context  whether it was said which are context
    segments      token_type_ids, if they were given, and
    shifts        position_ids less the place in the sequence, if they were
    """

    layout: Layout
    mask: Mask | None
    kinds: tuple[_Kind, ...]
    with_context: bool
    segments: Runs | None
    shifts: Runs | None

    @property
    def valid(self) -> tuple[Span, ...]:
        """Where it is not padding: spans of positions, rising."""
        return merged(kind.where for kind in self.kinds if kind.valid)

    def positions(self) -> Tensor:
        """Of each token, which begin anew in each document of a mask: (S,) int64, on the CPU."""
        return torch.arange(self.layout.seq_len) if self.mask is None else self.mask.positions()

    def sees(self, causal: bool, padding_sees: bool) -> Mask | None:
        """The mask that was given or that padding, context and spans make; None without any of
        these.
        """
        if self.mask is not None or (
            len(self.kinds) == 1 and self.kinds[0].valid and not self.with_context
        ):
            return self.mask
        return _visible(self.kinds, self.layout.seq_len, self.with_context, causal, padding_sees)


@dataclass(frozen=True)
class Batch:
    """Whole sequences, which all ranks know alike: a row for each, or one for all if they do not
    differ.
    """

    rank: int
    rows: tuple[Row, ...]

    def cut(self, whole: Iterable[Tensor]) -> Tensor:
        """This rank's part of a tensor (S,) of each row: (S_local,), or (B, S_local) if rows
        differ.
        """
        parts = [
            row.layout.shard(x, self.rank, dim=0) for row, x in zip(self.rows, whole, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.stack(parts)

    def masking(self, causal: bool, padding_sees: bool) -> dict[str, Any]:
        """What burst_attn_func takes: layout, and causal or mask.

        Without a mask or padding tokens see all before them if `causal`, else all. No token sees
        padding; what is padding sees, if `padding_sees`, what it would see if it were none. With
        context it sees nothing.
        """
        layout = _one([row.layout for row in self.rows])
        if all(row.sees(causal, padding_sees) is None for row in self.rows):
            return {"causal": causal, "layout": layout}
        return {"mask": _one(self._masks(causal, padding_sees)), "layout": layout}

    def scoring(
        self, causal: bool, padding_sees: bool, scores: Callable[[Row, Mask], Scores]
    ) -> dict[str, Any]:
        """What burst_attn_func takes: layout, and the scores that go with each row and its mask."""
        masks = self._masks(causal, padding_sees)
        return {
            "scores": _one([scores(row, mask) for row, mask in zip(self.rows, masks, strict=True)]),
            "layout": _one([row.layout for row in self.rows]),
        }

    def _masks(self, causal: bool, padding_sees: bool) -> list[Mask]:
        everything = _everything(self.rows[0].layout.seq_len, causal)
        masks = [row.sees(causal, padding_sees) for row in self.rows]
        return [everything if mask is None else mask for mask in masks]


def agree(sp: SequenceParallel, doing: str, given: Callable[[], Given]) -> Batch:
    """The batch of which each rank gives its part; every rank of `sp` must call it.

    doing  what the ranks are about to do, for errors
    given  makes this rank's part, or raises what is wrong with it

    Raises, on every rank, ValueError or TypeError for arguments that are wrong on any rank or
    differ between ranks.
    """
    call: _Call | None = None

    def terms() -> dict[str, Any]:
        nonlocal call
        call = _Call(sp, given())
        return call.terms

    said = gather_terms(make_rings(sp.process_group, sp.double_group), doing, terms)
    return call.batch(compare_terms(said))


_GATHERED = ("attention_mask", "context", "span", "token_type_ids", "position_ids")


class _Call:
    """A rank's arguments. Raises ValueError or TypeError if they are wrong."""

    def __init__(self, sp: SequenceParallel, given: Given):
        self.sp, self.given = sp, given
        self.size, self.tokens = _shape(given.tensors)
        if given.attention_mask is not None:
            _check_padding(given.attention_mask, (self.size, self.tokens))
        _check_masking(given)
        self.lengths = None if given.length is None else _lengths(given.length, self.size)
        self.masks = expand_rows("mask", given.mask, (Mask,), self.size) or (None,) * self.size
        layouts: str | Layout | Sequence[str | Layout] = (
            sp.layout if given.layout is None else given.layout
        )
        self.layouts = expand_rows("layout", layouts, (str, Layout), self.size)
        self.placed = {row: sp.with_layout(row) for row in self.layouts}
        self.marks = {
            name: self._mark(name) for name in _GATHERED if getattr(given, name) is not None
        }
        if self.marks and len(self.placed) > 1:
            names = " and ".join(self.marks)
            raise ValueError(f"rows with layouts of their own have length or mask, but no {names}")

    @property
    def terms(self) -> dict[str, Any]:
        """What the call means; all but "tokens" must be equal on all ranks."""
        return {
            **self.given.alike,
            "batch": self.size,
            "tokens": self.tokens,
            "length": self.lengths and _of_all(self.lengths),
            **{name: "given" if name in self.marks else None for name in _GATHERED},
            "mask": _of_all([None if mask is None else mask.digest for mask in self.masks]),
            "layout": _of_all(
                [
                    x if isinstance(x, str) else f"{x.term} of {x.seq_len} tokens"
                    for x in self.layouts
                ]
            ),
        }

    def batch(self, tokens: list[int]) -> Batch:
        """Of what all ranks said, who have so many tokens. Raises ValueError, alike on every rank."""
        seq_len = sum(tokens)
        layouts = {row: sp.layout_of(seq_len) for row, sp in self.placed.items()}
        for row in layouts.values():
            check_lengths(row, tokens)
        for mask in self.masks:
            if mask is not None and mask.seq_len != seq_len:
                raise ValueError(
                    f"the mask has {mask.seq_len} tokens, the ranks hold {seq_len}: {tokens}"
                )
        marks = self._whole_marks(seq_len)
        if self.lengths is not None:
            marks["attention_mask"] = self._until_length(seq_len)
        rows = tuple(
            _row(layouts[layout], mask, {name: x[i] for name, x in marks.items()})
            for i, (layout, mask) in enumerate(zip(self.layouts, self.masks, strict=True))
        )
        return Batch(self.sp.rank, rows[:1] if len(set(rows)) == 1 else rows)

    def _mark(self, name: str) -> Tensor:
        """(B, S_local) int64."""
        x, shape = getattr(self.given, name), (self.size, self.tokens)
        check_tensor(name, x)
        if x.is_floating_point() and name != "attention_mask":
            raise ValueError(f"{name} must be integers, got {x.dtype}")
        if tuple(x.shape) not in (shape, (1, self.tokens), (self.tokens,)):
            raise ValueError(
                f"{name} must be of this rank's tokens, {shape}, got shape {tuple(x.shape)}"
            )
        return (x.ne(0) if name in ("attention_mask", "context") else x).long().expand(shape)

    def _whole_marks(self, seq_len: int) -> dict[str, Tensor]:
        """(B, S) int64 of all ranks' tokens, on the CPU."""
        if not self.marks:
            return {}
        [sp] = self.placed.values()
        return dict(
            zip(
                self.marks,
                sp.unshard(torch.stack([*self.marks.values()]), seq_len, 2).cpu(),
                strict=True,
            )
        )

    def _until_length(self, seq_len: int) -> Tensor:
        """(B, S) int64: 1 up to the length of each row."""
        if max(self.lengths) > seq_len:
            raise ValueError(
                f"length counts the tokens of whole rows, {seq_len} at most, got {max(self.lengths)}"
            )
        return torch.arange(seq_len).lt(torch.tensor(self.lengths).unsqueeze(1)).long()


def _row(layout: Layout, mask: Mask | None, marks: dict[str, Tensor]) -> Row:
    """Of what is known of its tokens: (S,) int64 each."""
    segments, places = marks.get("token_type_ids"), marks.get("position_ids")
    return Row(
        layout,
        mask,
        _kinds(layout.seq_len, marks),
        with_context="context" in marks,
        segments=None if segments is None else _numbered(segments),
        shifts=None if places is None else _numbered(places - torch.arange(layout.seq_len)),
    )


def _kinds(seq_len: int, marks: dict[str, Tensor]) -> tuple[_Kind, ...]:
    defaults = {"attention_mask": 1, "context": 0, "span": 0}
    if not marks.keys() & defaults.keys():
        return (_Kind((0, seq_len), valid=True, context=False, span=0),)
    numbers = (
        marks.get(name, torch.tensor(default).expand(seq_len)) for name, default in defaults.items()
    )
    return tuple(
        _Kind(where, bool(valid), bool(context), span)
        for where, (valid, context, span) in _runs(*numbers)
    )


def _numbered(numbers: Tensor) -> Runs:
    return tuple((span, number) for span, [number] in _runs(numbers))


def _runs(*numbers: Tensor) -> list[tuple[Span, list[int]]]:
    """Ranges in which none of the numbers (S,) changes, and these."""
    rows = torch.stack(numbers)
    changes = (rows[:, 1:] != rows[:, :-1]).any(0).nonzero().flatten() + 1
    bounds = [0, *changes.tolist(), rows.shape[1]]
    return list(zip(itertools.pairwise(bounds), rows[:, bounds[:-1]].T.tolist(), strict=True))


def _shape(tensors: Mapping[str, Tensor | None]) -> tuple[int, int]:
    """B and S_local, in which the tensors must agree."""
    given = {name: x for name, x in tensors.items() if x is not None}
    if not given:
        raise ValueError(f"no tokens were given: {' or '.join(tensors)}")
    shapes = {}
    for name, x in given.items():
        check_tensor(name, x)
        shapes[name] = tuple(x.shape)
        if x.dim() < 2 or x.shape[:2] != next(iter(given.values())).shape[:2]:
            raise ValueError(
                f"tensors of this rank's tokens must be (B, S_local, ...), alike, got {shapes}"
            )
    return next(iter(shapes.values()))[:2]


def _check_masking(given: Given) -> None:
    """Raises ValueError for what says the same twice."""
    names = [
        name for name in ("length", "attention_mask", "mask") if getattr(given, name) is not None
    ]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} all say what tokens see: give one of them")
    names = [name for name in ("context", "span") if getattr(given, name) is not None]
    if names and given.mask is not None:
        raise ValueError(
            f"a mask says all of what tokens see: it does not go with {' and '.join(names)}"
        )


def _check_padding(attention_mask: Tensor, shape: tuple[int, int]) -> None:
    check_tensor("attention_mask", attention_mask)
    if attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask must be {shape}, 0 where this rank's tokens are padding, got shape "
            f"{tuple(attention_mask.shape)}; for what tokens see of each other give a mask"
        )


def _lengths(length: Tensor, size: int) -> list[int]:
    check_tensor("length", length)
    if length.shape != (size,) or length.is_floating_point() or length.dtype == torch.bool:
        raise ValueError(
            f"length must be integers ({size},), one for each whole row, got shape {tuple(length.shape)} and "
            f"{length.dtype}"
        )
    lengths = length.tolist()
    if min(lengths) < 0:
        raise ValueError(f"length counts tokens, got {min(lengths)}")
    return lengths


@functools.lru_cache(maxsize=_MOST_MASKS)
def _visible(
    kinds: tuple[_Kind, ...], seq_len: int, with_context: bool, causal: bool, padding_sees: bool
) -> Mask:
    """What is seen of a row with padding, context or spans; made once for all layers and calls, and
    all that comes of a mask with it.
    """
    of_span: dict[int, list[_Kind]] = {}
    for kind in kinds:
        of_span.setdefault(kind.span, []).append(kind)
    areas = [
        area
        for same in of_span.values()
        for area in (_areas(same, with_context, 0 if causal else None, padding_sees))
    ]
    count = sum(len(queries) * len(keys) for queries, keys, _ in areas)
    if count > _MOST_SLICES:
        raise ValueError(
            f"padding, context and spans alternate so often that what tokens see are {count} ranges of pairs: at most "
            f"{_MOST_SLICES} are planned"
        )
    slices = (
        Slice(q, kv, low)
        for queries, keys, low in areas
        for q, kv in itertools.product(queries, keys)
    )
    return Mask(seq_len, tuple(slices))


def _areas(
    kinds: list[_Kind], with_context: bool, low: int | None, padding_sees: bool
) -> list[tuple[tuple[Span, ...], tuple[Span, ...], int | None]]:
    """Of the tokens of one span: queries, the keys that they see, and how far behind them these
    must be.
    """
    valid = merged(kind.where for kind in kinds if kind.valid)
    if not with_context:
        return [(merged(kind.where for kind in kinds) if padding_sees else valid, valid, low)]
    first, rest = (
        merged(kind.where for kind in kinds if kind.valid and kind.context == context)
        for context in (True, False)
    )
    return [(valid, first, None), (rest, rest, low)]


@functools.lru_cache(maxsize=_MOST_MASKS)
def _everything(seq_len: int, causal: bool) -> Mask:
    return (Mask.causal if causal else Mask.full)(seq_len)


def _one(rows: list[Any]) -> Any:
    return rows[0] if len(rows) == 1 else rows


def _of_all(rows: Sequence[Any]) -> Any:
    """What is said of all rows of a batch: of many that differ a digest, so that a message has few
    bytes.
    """
    if len(set(rows)) == 1:
        return rows[0]
    if len(rows) <= _FEW_ROWS:
        return list(rows)
    return f"{len(rows)} rows, digest {hashlib.blake2b(repr(rows).encode(), digest_size=12).hexdigest()}"
