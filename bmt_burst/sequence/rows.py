"""Masks and layouts of a batch: one for all rows, or one for each.

If rows differ in these, all are computed as one sequence, in which no token sees another row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from ..base.arguments import expand_rows
from .layout import Balanced, Layout, Stacked
from .mask import Mask, plain_mask

# Each is one for the whole batch, or one for each of its rows.
Masks: TypeAlias = Mask | Sequence[Mask]
Layouts: TypeAlias = str | Layout | Sequence[str | Layout]

_MOST_KEPT = 64  # stacked masks, resolved layouts and masks within a window, each


class Rows(NamedTuple):
    """The masks and layouts of a batch, as those of one sequence.

    mask       the mask, or None for sequences of any length: then all pairs are visible, or with
               `causal` the pairs of Mask.causal
    layout     a layout of the queries, or the name of one
    kv_layout  that of the keys, or None for `layout`
    stacked    the batch size if the rows were stacked as one sequence, otherwise 0
    window     queries see no key `window` or more positions before them
    packed     whether the mask was made of the cu_seqlens that the user passed
    """

    mask: Mask | None
    causal: bool
    layout: str | Layout
    kv_layout: str | Layout | None = None
    stacked: int = 0
    window: int | None = None
    packed: bool = False

    @property
    def terms(self) -> dict[str, Any]:
        """The terms that ranks compare."""
        of_mask = "cu_seqlens, causal or window" if self.packed else "mask or causal"
        return {
            "masks or layouts by row": self.stacked > 0,
            of_mask: self.mask or ("causal" if self.causal else "full"),
            "window": self.window,
            "layout": self.layout,
            "kv_layout": self.kv_layout,
        }

    def place(self, tokens: list[int], keys: list[int]) -> tuple[Mask, Layout, Layout | None]:
        """Return the mask and the layouts, if rank r holds tokens[r] queries and keys[r] keys. No
        second layout stands for keys that lie as queries do.

        Raises ValueError if these numbers do not fit the mask and the layouts.
        """
        if not (sum(tokens) and sum(keys)):
            raise ValueError("expected q, k and v with tokens, got none on any rank")
        kv_len = None if sum(keys) == sum(tokens) else sum(keys)
        mask = self.mask or plain_mask(sum(tokens), self.causal, kv_len)
        is_one = tokens == keys and mask.kv_len == mask.seq_len
        name = "cu_seqlens" if self.packed else "the mask"
        check_seq_len(mask, tokens, name, "tokens" if is_one else "queries")
        if not is_one:
            name = "cu_seqlens_k (by default cu_seqlens)" if self.packed else "the mask"
            hint = "; for keys of other tokens, pass a mask with their kv_len, or a kv_layout"
            ending = hint if mask.kv_len == mask.seq_len and not self.packed else ""
            check_seq_len(mask.transposed, keys, name, "keys", ending)
        # tokens lie in one layout in all layers, whatever their windows
        layout, kv_layout = resolve_layouts(self.layout, self.kv_layout, mask, len(tokens))
        is_one = kv_layout is None and tokens == keys
        check_lengths(layout, tokens, "tokens" if is_one else "queries")
        if not is_one:
            check_lengths(kv_layout or layout, keys, "keys")
        return limit_mask(mask, self.window), layout, kv_layout


def check_seq_len(
    mask: Mask, tokens: Sequence[int], name: str = "the mask", kind: str = "tokens", hint: str = ""
) -> None:
    """Raise ValueError, which `hint` ends, unless the mask is as long as the ranks' sequence.

    tokens  the number of tokens of each rank; `kind` says what these are
    name    what the user passed
    """
    if mask.seq_len != (seq_len := sum(tokens)):
        got = f"{name} has {mask.seq_len} {kind}, the ranks hold {seq_len}: {tokens}"
        expected = f"{name.removeprefix('the ')} of the whole sequence, identical on every rank"
        raise ValueError(f"{got}; expected {expected}{hint}")


def check_lengths(layout: Layout, tokens: Sequence[int], kind: str = "tokens") -> None:
    """Raise ValueError unless each rank holds as many tokens as the layout gives it."""
    expected = [layout.length(rank) for rank in range(layout.size)]
    if sum(tokens) != layout.seq_len or list(tokens) != expected:
        cut = f"{layout.name} cuts {layout.seq_len} into {expected}"
        hint = "cut tensors with bmt_burst.shard or with the layout's shard"
        raise ValueError(f"the ranks hold {tokens} {kind}, but {cut}; {hint}")


def masks_of_rows(masks: Masks | None, batch: int) -> tuple[Mask, ...]:
    """Return a mask for each row, or none for None. Raises TypeError or ValueError."""
    hint = ": make one of documents, windows or slices, such as Mask.documents(cu_seqlens)"
    return expand_rows("mask", masks, (Mask,), batch, hint)


def layouts_of_rows(
    layouts: Layouts | None, batch: int, name: str = "layout"
) -> tuple[str | Layout, ...]:
    """Return a layout or the name of one for each row. Raises TypeError or ValueError."""
    hint = ": pass its name, such as 'zigzag', or make one, such as Layout.zigzag(n, size)"
    return expand_rows(name, layouts, (str, Layout), batch, hint)


def masks_of_layouts(
    layouts: Sequence[str | Layout], kv_layouts: Sequence[str | Layout], causal: bool
) -> tuple[Mask, ...]:
    """Return a causal or full mask for each layout, as long as that.

    Raises ValueError for the name of a layout, which has no length.
    """

    def find_length(name: str, layout: str | Layout) -> int:
        if isinstance(layout, Layout):
            return layout.seq_len
        raise ValueError(
            f"a rank does not know the length of a sequence with {name}={layout!r}: expected a "
            "mask for it, such as Mask.causal(seq_len), or a Layout"
        )

    queries = [find_length("layout", x) for x in layouts]
    keys = [find_length("kv_layout", x) for x in kv_layouts] or queries
    return tuple(
        plain_mask(n, causal, None if n == m else m) for n, m in zip(queries, keys, strict=True)
    )


@functools.lru_cache(maxsize=_MOST_KEPT)
def stack_rows(
    masks: tuple[Mask, ...],
    layouts: tuple[str | Layout, ...],
    kv_layouts: tuple[str | Layout, ...],
    size: int,
) -> tuple[Mask, Layout, Layout | None]:
    """Return the mask and the layouts of all rows as one sequence."""
    rows = zip(layouts, kv_layouts or (None,) * len(masks), masks, strict=True)
    resolved = [resolve_layouts(*row, size) for row in rows]
    queries = [layout for layout, _ in resolved]
    keys = [layout if kv_layout is None else kv_layout for layout, kv_layout in resolved]
    for name, kind, of_rows, lengths in (
        ("layout", "tokens", queries, [mask.seq_len for mask in masks]),
        ("kv_layout", "keys", keys, [mask.kv_len for mask in masks]),
    ):
        for length, layout in zip(lengths, of_rows, strict=True):
            if length != layout.seq_len:
                raise ValueError(f"a row's mask has {length} {kind}, its {name} {layout.seq_len}")
        for rank in range(size):
            held = [layout.length(rank) for layout in of_rows]
            if len(set(held)) > 1:
                raise ValueError(
                    f"{name}s of rows must give a rank the same number of tokens of each row, got "
                    f"{held} for rank {rank}"
                )
    is_one = all(kv_layout is None for _, kv_layout in resolved)
    return Mask.stacked(masks), Stacked(queries), None if is_one else Stacked(keys)


@functools.lru_cache(maxsize=_MOST_KEPT)
def resolve_layout(layout: str | Layout, mask: Mask, size: int) -> Layout:
    """Return the layout, or the one that it names for the mask's sequence. Results are kept."""
    if isinstance(layout, Layout):
        return layout
    if layout == Balanced.name:
        return Layout.balanced(mask, size)
    return Layout.named(layout, mask.seq_len, size)


def resolve_layouts(
    layout: str | Layout, kv_layout: str | Layout | None, mask: Mask, size: int
) -> tuple[Layout, Layout | None]:
    """Return the layouts of the queries and of the keys, or None for keys that lie as queries do.

    Raises ValueError for a mask of two lengths and only one Layout.
    """
    queries = resolve_layout(layout, mask, size)
    if kv_layout is None:
        if mask.kv_len == mask.seq_len:
            return queries, None
        if isinstance(layout, Layout):
            hint = f"a Layout, such as this of {layout.seq_len} tokens, is for its own length"
            raise ValueError(f"expected a kv_layout for {mask.kv_len} keys, got none: {hint}")
    keys = resolve_layout(layout if kv_layout is None else kv_layout, mask.transposed, size)
    return queries, None if keys == queries else keys


@functools.lru_cache(maxsize=_MOST_KEPT)
def limit_mask(mask: Mask, window: int | None) -> Mask:
    """Return the mask within a window, if there is one. Results are kept, as plain_mask's are."""
    return mask if window is None else mask.windowed(window)
