"""The extensions of attention that public functions take. Nothing else names all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from .bias.extension import Bias
from .bias.scores import Scores
from .memories.keys import Softmax
from .sparse import InfLLMV2
from .strategies.extension import Extension

_REGISTERED: dict[str, type[Extension]] = {"infllm-v2": InfLLMV2}

AllScores: TypeAlias = Scores | Sequence[Scores]  # one for the batch, or one for each row


def find_extension(
    scores: AllScores | None,
    bias: Tensor | None,
    sparse: Extension | None,
    choose_by: Sequence[Tensor] | None,
) -> tuple[Extension | None, tuple[Any, ...]]:
    """Return the extension that a call's arguments ask for, and its tensors, unchecked.

    Raises ValueError if they ask for two or for none, TypeError for a `sparse` that is no Extension
    and a choose_by that is no sequence.
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
        got = type(choose_by).__name__
        raise TypeError(f"choose_by must be a pair of queries and keys, got {got}")
    if sparse is None:
        raise ValueError("expected sparse together with choose_by, got choose_by alone")
    return check_extension(sparse), tuple(choose_by or ())


def check_extension(sparse: Any) -> Extension:
    """Return `sparse`. Raises TypeError unless it is an Extension."""
    if not isinstance(sparse, Extension):
        got = type(sparse).__name__
        raise TypeError(f"sparse must be an Extension, such as InfLLMV2(), got {got}")
    return sparse


def register_extension(extension: type[Extension]) -> None:
    """Let configurations name an extension: {"kind": extension.kind, **extension.to_dict()}.

    A configuration that is read later may have it. Reading imports nothing. Raises ValueError for a
    class without a kind, or if another class has it.
    """
    kind = extension.kind
    if kind is None or _REGISTERED.setdefault(kind, extension) is not extension:
        taken = f"{kind!r}, which {_REGISTERED[kind].__name__} has" if kind else "None"
        raise ValueError(f"expected a kind of {extension.__name__} of its own, got {taken}")


def read_extension(values: Mapping[str, Any]) -> Extension:
    """Return the extension in a configuration. Without a "kind" it is an InfLLMV2, as in
    MiniCPM4's `sparse_config`.

    Raises ValueError for a kind that nobody registered, and what from_dict raises for wrong values.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"expected names and values, got {values!r}")
    kind = values.get("kind", InfLLMV2.kind)
    if not isinstance(kind, str) or kind not in _REGISTERED:
        raise ValueError(
            f"unknown kind {kind!r}: expected one of {sorted(_REGISTERED)}; "
            "bmt_burst.extensions.register_extension adds one, before the configuration is read"
        )
    return _REGISTERED[kind].from_dict({n: x for n, x in values.items() if n != "kind"})


def write_extension(extension: Extension) -> dict[str, Any]:
    """Return the values that `read_extension` reads."""
    named = {} if isinstance(extension, InfLLMV2) else {"kind": extension.kind}
    return {**named, **extension.to_dict()}


def find_kind(
    window: int | None, options: dict[str, Any]
) -> tuple[Softmax, tuple[Tensor | None, ...]]:
    """Return softmax attention with options of burst_attn_func, and the tensors that it takes.

    Raises TypeError for an option that it does not have.
    """
    known = {**options, "window": window}
    scale, sinks = known.pop("softmax_scale", None), known.pop("sinks", None)
    asked = (known.pop(name, None) for name in ("scores", "bias", "sparse", "choose_by"))
    extension, tensors = find_extension(*asked)
    return Softmax(scale=scale, extension=extension, **known), (sinks, *tensors)
