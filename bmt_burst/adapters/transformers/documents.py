"""The documents that a forward's arguments name, as masks.

An attention_mask of numbers, cu_seq_lens, seq_idx and position_ids that fall back name documents.
If several are given, they must agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.arguments import check_tensor
from ...sequence.layout import IGNORE_INDEX
from ...sequence.mask import Mask, Slice, plain_mask, read_bounds
from ...sequence.span import Span, length

CU_SEQ_LENS = ("cu_seq_lens_q", "cu_seq_lens_k")
LONGEST = ("max_length_q", "max_length_k")
NAMING = ("attention_mask", *CU_SEQ_LENS, "seq_idx", "position_ids")
_WAYS = (
    "to separate documents there, let position_ids start again, or pass an attention_mask of "
    "numbers (1 1 1 2 2 0) or cu_seq_lens_q; to skip positions within a document, pass an "
    "attention_mask of ones"
)


def find_masks(
    arguments: Mapping[str, Any], size: int, seq_len: int, padding_sees: bool
) -> tuple[Mask, ...]:
    """Return one causal mask for all rows, or one for each. Tokens see their document, not padding.

    arguments     of a forward, by name, with tensors of the shapes that it takes
    size          B
    seq_len       S
    padding_sees  whether padding behind the last document sees it, as under transformers' masks.
                  Other padding sees nothing

    Raises ValueError or TypeError for arguments that name no documents or different ones.
    """
    # copies on the CPU, since each check on a GPU would make the host wait
    given = {name: arguments[name] for name in (*NAMING, *LONGEST) if name in arguments}
    given = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in given.items()}
    numbers = _read_numbers(given.get("attention_mask"))
    named = _find_borders(given, numbers, size, seq_len)
    inside = True if numbers is None else numbers[:, 1:].ne(0) & numbers[:, :-1].ne(0)
    borders = _check_agreement(named, inside)
    if "position_ids" in given:
        borders = _join_positions(given["position_ids"].diff(dim=-1), borders, inside, [*named])
    if borders is None:
        return (plain_mask(seq_len),)
    if numbers is None:
        numbers = F.pad(borders, (1, 0)).cumsum(1) + 1
    rows = _find_spans(borders.expand(size, -1), numbers.expand(size, -1), seq_len)
    masks = tuple(_make_mask(spans, seq_len, padding_sees) for spans in rows)
    return masks[:1] if len(set(masks)) == 1 else masks


def sees_nothing(mask: Mask, window: int | None) -> bool:
    """Whether some token sees nothing under a mask of `find_masks`, in a layer with this window."""
    at = 0
    for (start, stop), (_, last), *_ in mask.slices:
        if at < start or (window is not None and stop - last >= window):
            return True
        at = stop
    return at < mask.seq_len


def check_targets(valid: Tensor, labels: Tensor | None, shift_labels: Tensor | None) -> None:
    """Raise ValueError if padding has labels. `valid` (B, S) is False for padding."""
    if shift_labels is not None:  # the target in a token's place is its successor
        following = F.pad(valid[:, 1:], (0, 1))
        name, labels, valid = "shift_labels", shift_labels, valid | following
    else:
        name = "labels"
    if labels is not None and (labels.to(valid.device).ne(IGNORE_INDEX) & ~valid).any():
        raise ValueError(f"{name} must be {IGNORE_INDEX} where attention_mask is 0")


def _read_numbers(attention_mask: Tensor | None) -> Tensor | None:
    """Return the number of each token's document, (B, S) int64, 0 for padding."""
    if attention_mask is None:
        return None
    numbers = attention_mask.long()
    if (numbers.ne(attention_mask) | numbers.lt(0)).any():
        raise ValueError(
            "attention_mask must have whole numbers: 0 for padding, and 1 or the number of a "
            "token's document for others"
        )
    return numbers


def _find_borders(
    arguments: Mapping[str, Any], numbers: Tensor | None, size: int, seq_len: int
) -> dict[str, Tensor]:
    """Return by argument whether each token begins a document, without the first: (B, S - 1)."""
    found = {}
    if numbers is not None:
        found["attention_mask"] = numbers.diff(dim=-1).ne(0)
    for name, longest in zip(CU_SEQ_LENS, LONGEST, strict=True):
        if (bounds := arguments.get(name)) is not None:
            spans = _read_bounds(name, bounds, size, seq_len)
            most, given = max(map(length, spans)), arguments.get(longest)
            if given is not None and int(given) < most:
                raise ValueError(
                    f"{longest} is {int(given)}, but {name} has a document of {most} tokens"
                )
            starts = [start - 1 for start, _ in spans[1:]]
            found[name] = torch.zeros(1, seq_len - 1, dtype=torch.bool)
            found[name][0, starts] = True
        elif arguments.get(longest) is not None:
            raise ValueError(f"{longest} needs {name}, which names the documents")
    if (index := arguments.get("seq_idx")) is not None:
        found["seq_idx"] = index.diff(dim=-1).ne(0)
    return found


def _read_bounds(name: str, bounds: Tensor, size: int, seq_len: int) -> list[Span]:
    """Return the documents of cu_seq_lens."""
    check_tensor(name, bounds)
    if size > 1:
        raise ValueError(
            f"{name} names documents of one row, got a batch of {size}: pass position_ids or an "
            "attention_mask of numbers for several rows"
        )
    numbers = read_bounds(name, bounds)
    if numbers[-1] != seq_len:
        raise ValueError(f"{name} must end at {seq_len}, the number of tokens, got {numbers[-1]}")
    return [*itertools.pairwise(numbers)]


def _check_agreement(named: Mapping[str, Tensor], inside: Tensor | bool) -> Tensor | None:
    """Return the borders that all arguments name. `inside` (B, S - 1) is False beside padding."""
    if not named:
        return None
    (first, borders), *others = named.items()
    for name, theirs in others:
        if (theirs.ne(borders) & inside).any():
            raise ValueError(
                f"{first} and {name} name different documents: pass one of them, or make them agree"
            )
    return borders


def _join_positions(
    steps: Tensor, borders: Tensor | None, inside: Tensor | bool, names: list[str]
) -> Tensor:
    """Return the borders of documents, once position_ids agree. `steps` are their differences."""
    if borders is None:
        if (steps > 1).any():
            raise ValueError(f"position_ids skip forward, and nothing says what it means: {_WAYS}")
        return steps < 1
    by = " and ".join(names)
    if ((steps < 1) & ~borders & inside).any():
        raise ValueError(
            f"position_ids start again within a document of {by}: name this border there too, or "
            f"leave {by} out"
        )
    if (steps.eq(1) & borders & inside).any():
        raise ValueError(
            f"position_ids rise by one across a border of {by}: let them start again there, or "
            "leave them out"
        )
    return borders


def _find_spans(borders: Tensor, numbers: Tensor, seq_len: int) -> list[list[Span]]:
    """Return the documents of each row, without padding: the numbers 0 of its documents.

    Raises ValueError if padding or another document is within a document of attention_mask.
    """
    found = []
    for row, (is_border, of_row) in enumerate(zip(borders, numbers, strict=True)):
        starts = [0, *(is_border.nonzero().flatten() + 1).tolist()]
        named = zip(of_row[starts].tolist(), itertools.pairwise([*starts, seq_len]), strict=True)
        real = [(name, span) for name, span in named if name]
        if len(dict(real)) < len(real):
            raise ValueError(
                "attention_mask has padding or another document between tokens of one document, in "
                f"row {row}: pad on the left or right, and give each document a number of its own"
            )
        found.append([span for _, span in real])
    return found


def _make_mask(spans: list[Span], seq_len: int, padding_sees: bool) -> Mask:
    """Return the mask of a row with documents at `spans`."""
    if sum(stop - start for start, stop in spans) == seq_len:
        return Mask.documents((0, *(stop for _, stop in spans)))
    queries = list(spans)
    if padding_sees and spans:
        queries[-1] = (spans[-1][0], seq_len)
    return Mask(seq_len, tuple(Slice(q, kv, 0) for q, kv in zip(queries, spans, strict=True)))
