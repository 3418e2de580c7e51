"""The part of a sequence that a model computes, from the arguments of models and layers."""

from __future__ import annotations

from typing import Any

from ..base.compiled import not_compiled
from ..calls.refusal import CALL
from ..memories.protocol import Part
from ..parts.cache import Cache
from ..parts.chunks import Chunk
from ..ranks.agreement import refuse
from ..ranks.sequence_parallel import SequenceParallel, WholeSequence
from ..sequence.rows import Layouts, Masks


@not_compiled
def find_part(
    sp: SequenceParallel,
    cache: Part | None = None,
    mask: Masks | WholeSequence | None = None,
    layout: Layouts | None = None,
) -> Part:
    """Return the part of a sequence that a model over the ranks of `sp` computes.

    cache   a chunk of Chunks or of a Cache's prompt, or a Cache, whose tokens new ones continue.
            None: a whole sequence
    mask    the mask of the whole sequence, or one for each row. None: causal. Or the result of
            `sp.sequence`, which has a layout
    layout  how it lies on the ranks, or one for each row. None: sp's

    Raises ValueError on all ranks for a cache with a mask or a layout, or of other ranks than the
    model's, TypeError for another object.
    """
    try:
        if cache is not None:
            _check_cache(sp, cache, mask, layout)
            return cache
        if not isinstance(mask, WholeSequence):
            layout = sp.layout if layout is None else layout
            return WholeSequence.local(mask, layout, causal=mask is None).on(sp)
        if layout is not None:
            raise ValueError("expected mask=sequence alone, got a layout too: it has its own")
        _check_ranks(sp, mask)
        return mask
    except (TypeError, ValueError) as error:
        refuse(sp.rings, CALL, error)


def _check_cache(sp: SequenceParallel, cache: Any, mask: Any, layout: Any) -> None:
    if not all(hasattr(cache, name) for name in ("mix", "select", "longest", "saves_graph")):
        raise TypeError(
            "cache must be a chunk of bmt_burst.Chunks or a bmt_burst.Cache, got "
            f"{type(cache).__name__}: bmt_burst.Cache(None, layers, limit) is one of this process "
            "alone"
        )
    if mask is not None or layout is not None:
        name = {Chunk: "chunk", WholeSequence: "sequence"}.get(type(cache), "Cache")
        raise ValueError(f"expected a {name} or a mask and layout, got both: it has its own")
    _check_ranks(sp, cache)


def _check_ranks(sp: SequenceParallel, part: Part) -> None:
    if sp.size in (1, part.sp.size):
        return
    kind, instead = {
        WholeSequence: ("a sequence", "make it by sp.sequence"),
        Cache: ("Cache", "pass sp to Cache"),
    }.get(type(part), ("Chunks", "pass sp to Chunks"))
    raise ValueError(
        f"expected {kind} of this model's {sp.size} ranks, got {kind} of {part.sp.size}: {instead}"
    )
