"""Masks, layouts and scores of a call: one for all rows of the batch, or one for each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ..scores import Scores
from ..sequence.layout import Balanced, Layout, Stacked
from ..sequence.mask import Mask

_MOST_KEPT = 64  # stacked masks, scores and balanced layouts


def expand_rows(
    name: str, given: Any, kind: type | tuple[type, ...], batch: int
) -> tuple[Any, ...]:
    """What is given for each row of the batch: one for all, or a sequence. Raises TypeError or
    ValueError.
    """
    if given is None or isinstance(given, kind):
        return (given,) * batch
    rows = tuple(given) if isinstance(given, list | tuple) else (given,)
    for row in rows:
        if not isinstance(row, kind) or row is given:
            raise TypeError(
                f"{name} must be a {name.capitalize()} or one for each row, got {type(row).__name__}"
            )
    if len(rows) != batch:
        raise ValueError(f"{name} has {len(rows)} entries for a batch of {batch} rows")
    return rows


@functools.lru_cache(maxsize=_MOST_KEPT)
def stack_rows(
    masks: tuple[Mask, ...], layouts: tuple[str | Layout, ...], size: int
) -> tuple[Mask, Layout]:
    """The rows of a batch as one sequence."""
    layouts = tuple(
        place_layout(layout, mask, size) for layout, mask in zip(layouts, masks, strict=True)
    )
    for mask, layout in zip(masks, layouts, strict=True):
        if mask.seq_len != layout.seq_len:
            raise ValueError(f"a row's mask has {mask.seq_len} tokens, its layout {layout.seq_len}")
        if any(layout.length(rank) != layouts[0].length(rank) for rank in range(size)):
            raise ValueError("the layouts of the rows must give a rank equally many tokens of each")
    return Mask.stacked(masks), Stacked(layouts)


@functools.lru_cache(maxsize=_MOST_KEPT)
def stack_scores(scores: tuple[Scores, ...]) -> Scores:
    """Those of a call whose rows have these: kept, with what follows from them, so that they can be
    made ahead.
    """
    return Scores.stacked(scores)


@functools.lru_cache(maxsize=_MOST_KEPT)
def balanced_layout(mask: Mask, size: int) -> Layout:
    return Layout.balanced(mask, size)


def place_layout(layout: str | Layout, mask: Mask, size: int) -> Layout:
    if isinstance(layout, Layout):
        return layout
    return (
        balanced_layout(mask, size)
        if layout == Balanced.name
        else Layout.named(layout, mask.seq_len, size)
    )


def check_lengths(layout: Layout, tokens: Sequence[int]) -> None:
    expected = [layout.length(rank) for rank in range(layout.size)]
    if sum(tokens) != layout.seq_len or list(tokens) != expected:
        raise ValueError(
            f"the ranks hold {tokens} tokens, but {layout.name} cuts {layout.seq_len} into {expected}; "
            "use bmt_burst.shard or the layout's, or torch.tensor_split's sizes"
        )
