"""Masks and layouts of a call: one for the whole batch, or one for each of its rows.

If rows differ in these, or in an extension, all rows are computed as one sequence. No token sees
another row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..base.arguments import expand_rows
from ..sequence.layout import Balanced, Layout, Stacked
from ..sequence.mask import Mask, plain_mask
from ..strategies.extension import Extension
from .options import Layouts, Masks, Options

_MOST_KEPT = 64  # stacked masks and resolved layouts, each


@dataclass(frozen=True)
class Masking:
    """The visible pairs of a call, and where its tokens lie.

    mask       the mask, or None for sequences of any length: then all pairs are visible, or with
               `causal` the pairs of Mask.causal
    layout     a layout, or the name of one
    extension  the extension, if any. It may have brought the mask.
    rows       the batch size if the rows were stacked as one sequence, otherwise 0
    packed     whether the mask was made of the cu_seqlens that the user passed
    """

    mask: Mask | None
    causal: bool
    layout: str | Layout
    extension: Extension | None
    rows: int
    packed: bool = False

    @property
    def arguments(self) -> str:
        """The arguments that the mask follows from."""
        return "cu_seqlens, causal or window" if self.packed else "mask or causal"

    def mask_of(self, tokens: Sequence[int]) -> Mask:
        """Return the mask. Raises ValueError if it is not as long as the sequence of all ranks."""
        seq_len = sum(tokens)
        if not seq_len:
            raise ValueError("expected q, k and v with tokens, got none on any rank")
        mask = self.mask or plain_mask(seq_len, self.causal)
        check_seq_len(mask, tokens, "cu_seqlens" if self.packed else "the mask")
        return mask


def check_seq_len(mask: Mask, tokens: Sequence[int], name: str = "the mask") -> None:
    """Raise ValueError unless the mask is as long as the sequence of all ranks.

    tokens  the number of tokens of each rank
    name    what the user passed
    """
    if mask.seq_len != (seq_len := sum(tokens)):
        raise ValueError(
            f"{name} has {mask.seq_len} tokens, the ranks hold {seq_len}: {tokens}; expected "
            f"{name.removeprefix('the ')} of the whole sequence, identical on every rank"
        )


def find_masking(options: Options, extension: Extension | None, batch: int, size: int) -> Masking:
    """Return the masking of a call with `batch` rows on `size` ranks.

    Raises TypeError or ValueError for a mask, layout or extension that do not fit together.
    """
    causal = options.causal
    masks = masks_of_rows(options.mask, batch)
    layouts = layouts_of_rows(options.layout, batch)
    extensions = extension.of_rows(batch) if extension else ()
    if masks and causal:
        raise ValueError(
            "expected mask or causal, got both: use Mask.documents(..., causal=True) or the like"
        )
    brought = tuple(row.mask for row in extensions if row.mask is not None)
    if brought and (causal or masks):
        raise ValueError(
            f"expected {extensions[0].brings} alone, got mask or causal too: "
            f"{extensions[0].brings} have a mask"
        )
    for layout in layouts:
        if isinstance(layout, Layout) and layout.size != size:
            raise ValueError(f"expected a layout on {size} ranks, got one on {layout.size}")
    masks = masks or brought
    if all(len(set(rows)) <= 1 for rows in (masks, layouts, extensions)):
        mask = masks[0] if masks else None
        same = extensions[0] if extensions else None
        return Masking(mask, causal, layouts[0], same, 0, options.is_packed)
    mask, layout = _stack_rows(masks or masks_of_layouts(layouts, causal), layouts, size)
    joined = extension.join(extensions) if extension else None
    return Masking(mask, causal, layout, joined, rows=batch)


def masks_of_rows(masks: Masks | None, batch: int) -> tuple[Mask, ...]:
    """Return a mask for each row, or none for None. Raises TypeError or ValueError."""
    hint = ": make one of documents, windows or slices, such as Mask.documents(cu_seqlens)"
    return expand_rows("mask", masks, (Mask,), batch, hint)


def layouts_of_rows(layouts: Layouts, batch: int) -> tuple[str | Layout, ...]:
    """Return a layout or the name of one for each row. Raises TypeError or ValueError."""
    hint = ": pass its name, such as 'zigzag', or make one, such as Layout.zigzag(n, size)"
    return expand_rows("layout", layouts, (str, Layout), batch, hint)


def masks_of_layouts(
    layouts: Sequence[str | Layout], causal: bool = True, seq_len: int | None = None
) -> tuple[Mask, ...]:
    """Return a causal or full mask for each layout, as long as that.

    seq_len  the length of sequences whose layout is a name, if it is known

    Raises ValueError if a length is not known.
    """
    lengths = [x.seq_len if isinstance(x, Layout) else seq_len for x in layouts]
    if None in lengths:
        name = layouts[lengths.index(None)]
        raise ValueError(
            f"a rank does not know the length of a sequence with layout={name!r}: expected a mask "
            "for it, such as Mask.causal(seq_len), or a Layout"
        )
    return tuple(plain_mask(length, causal) for length in lengths if length is not None)


@functools.lru_cache(maxsize=_MOST_KEPT)
def _stack_rows(
    masks: tuple[Mask, ...], layouts: tuple[str | Layout, ...], size: int
) -> tuple[Mask, Layout]:
    """Return the mask and the layout of all rows as one sequence."""
    of_rows = [
        resolve_layout(layout, mask, size) for layout, mask in zip(layouts, masks, strict=True)
    ]
    for mask, layout in zip(masks, of_rows, strict=True):
        if mask.seq_len != layout.seq_len:
            raise ValueError(f"a row's mask has {mask.seq_len} tokens, its layout {layout.seq_len}")
    for rank in range(size):
        lengths = [layout.length(rank) for layout in of_rows]
        if len(set(lengths)) > 1:
            raise ValueError(
                "layouts of rows must give a rank the same number of tokens of each row, got "
                f"{lengths} for rank {rank}"
            )
    return Mask.stacked(masks), Stacked(of_rows)


@functools.lru_cache(maxsize=_MOST_KEPT)
def resolve_layout(layout: str | Layout, mask: Mask, size: int) -> Layout:
    """Return the layout, or the one that it names for the mask's sequence. Results are kept."""
    if isinstance(layout, Layout):
        return layout
    if layout == Balanced.name:
        return Layout.balanced(mask, size)
    return Layout.named(layout, mask.seq_len, size)


def check_lengths(layout: Layout, tokens: Sequence[int]) -> None:
    """Raise ValueError unless each rank holds as many tokens as the layout gives it."""
    expected = [layout.length(rank) for rank in range(layout.size)]
    if sum(tokens) != layout.seq_len or list(tokens) != expected:
        raise ValueError(
            f"the ranks hold {tokens} tokens, but {layout.name} cuts {layout.seq_len} into "
            f"{expected}; cut tensors with bmt_burst.shard or with the layout's shard"
        )
