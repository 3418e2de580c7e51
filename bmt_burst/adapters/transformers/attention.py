"""Attention over ranks, under a name that transformers knows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NoReturn

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ...base.compiled import not_compiled
from ...base.dtypes import accumulator_dtype
from ...calls.refusal import CALL
from ...calls.softmax import SoftmaxAttention
from ...extensions import read_extension
from ...ranks.agreement import refuse
from ...strategies.extension import Extension
from .configs import ATTENTION
from .inputs import ForwardInputs


def refuse_part(part: nn.Module) -> NoReturn:
    """Raise TypeError for a call of a part of an enabled model."""
    raise TypeError(
        f"a {type(part).__name__} was called without its model: call the model that was enabled, "
        "not a part of it such as its `model`. With output_hidden_states=True it returns hidden "
        "states"
    )


@not_compiled
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    bmt_burst: ForwardInputs | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer, (B, S_local, H, D_v), from query (B, H, S_local, D), key
    (B, G, S_local, D) and value (B, G, S_local, D_v). It is sparse if the configuration has a
    `sparse_config`, as MiniCPM4's.

    attention_mask  the result of `_make_window`
    s_aux           (H,) sinks, as in GptOss
    """
    if bmt_burst is None:
        refuse_part(module)
    sequence = bmt_burst.sequence
    try:
        _check_layer(module, dropout, sliding_window, attention_mask)
        sparse = _find_sparse(module)
        is_limited = sliding_window is not None and sliding_window < sequence.seq_len
        kind = SoftmaxAttention(
            scaling,
            softcap=softcap,
            window=sliding_window if is_limited else None,
            extension=sparse,
            **bmt_burst.options,
        )
    except (TypeError, ValueError) as error:
        refuse(sequence.sp.rings, CALL, error)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    sinks = None if s_aux is None else s_aux.to(accumulator_dtype(q.dtype))
    # Layers are checkpointed in training only.
    keeps = sparse is not None and module.training
    with bmt_burst.choices.of(module) if keeps else nullcontext():
        return sequence.mix(0, kind, q, k, v, sinks), None


def _make_window(*_args: Any, local_size: int | None = None, **_named: Any) -> int | None:
    """Return the window of a mask, instead of the mask that models pass on."""
    return local_size


def _find_sparse(module: nn.Module) -> Extension | None:
    """Return the extension in the sparse_config of a layer's configuration. Raises ValueError for a
    wrong one, and if it takes what transformers does not pass.
    """
    constants = getattr(module.config, "sparse_config", None)
    if constants is None:
        return None
    try:
        sparse = read_extension(constants)
    except (TypeError, ValueError) as error:
        raise ValueError(f"sparse_config: {error}") from error
    if getattr(sparse, "use_nope", False):
        raise ValueError(
            "sparse_config: expected use_nope=False, since transformers passes rotated queries and "
            "keys alone, got True"
        )
    return sparse


def _check_layer(
    module: nn.Module, dropout: float, window: int | None, window_of_model: int | None
) -> None:
    """Raise ValueError if a layer or its configuration asks for something that is not supported."""
    if dropout:
        raise ValueError(
            f"attention over ranks cannot drop probabilities, and attention_dropout is {dropout}: "
            "set it to 0 in the configuration, or call the model's eval()"
        )
    if window is not None and window < 1:
        raise ValueError(
            f"sliding_window, of the configuration, must be at least 1 or None, got {window}"
        )
    name = type(module).__name__
    if window != window_of_model:
        raise ValueError(
            f"a {name} has a window of {window}, and its model makes masks with one of "
            f"{window_of_model}: some of transformers' attentions follow the layer and some the "
            "mask; make them equal"
        )
    if not getattr(module, "is_causal", True):
        raise ValueError(
            f"is_causal is False in a {name}: attention to both sides is not supported"
        )


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, _make_window)
