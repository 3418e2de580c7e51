"""The extensions of attention that public functions take. Nothing else names all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from .bias.extension import Bias
from .bias.scores import Scores
from .memories.keys import Softmax
from .sparse.config import InfLLMV2
from .sparse.extension import Sparse
from .strategies.extension import Extension

AllScores: TypeAlias = Scores | Sequence[Scores]  # one for the batch, or one for each row


def find_extension(
    scores: AllScores | None,
    bias: Tensor | None,
    sparse: InfLLMV2 | None,
    choose_by: tuple[Tensor, Tensor] | None,
) -> tuple[Extension | None, tuple[Any, ...]]:
    """Return the extension that a call's arguments ask for, and its tensors, unchecked.

    Raises ValueError if they ask for two, TypeError for a choose_by that is no pair.
    """
    by_table = scores is not None or bias is not None
    if sparse is None and choose_by is None:
        if not by_table:
            return None, ()
        rows = scores if scores is None or isinstance(scores, Scores) else tuple(scores)
        return Bias(rows), (bias,)
    if by_table:
        raise ValueError("expected sparse or a bias, got both: sparse attention adds no bias")
    if choose_by is not None and not isinstance(choose_by, list | tuple):
        raise TypeError(
            f"choose_by must be a pair of queries and keys, got {type(choose_by).__name__}"
        )
    return Sparse(sparse), tuple(choose_by or ())


def find_kind(
    window: int | None, options: dict[str, Any]
) -> tuple[Softmax, tuple[Tensor | None, ...]]:
    """Return softmax attention with options of burst_attn_func, and the tensors that it takes.

    Raises TypeError for an option that it does not have.
    """
    known = {**options, "window": window}
    scale, sinks = known.pop("softmax_scale", None), known.pop("sinks", None)
    by = known.pop("sparse", None), known.pop("choose_by", None)
    extension, tensors = find_extension(None, None, *by)
    return Softmax(scale=scale, extension=extension, **known), (sinks, *tensors)
