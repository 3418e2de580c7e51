"""FlashAttention-4 with a bias, on Hopper: a function of scores adds it.

The gradient of the table is computed by our own Triton kernel.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...base.streams import send_to_device
from ...kernels import installed
from ...kernels.fa4 import Fa4Kernel, functions
from ...kernels.packed import prepare_once
from ...sequence.span import length
from ...sequence.tile import KernelCall
from ...spec import Spec
from ..call_bias import CallBias
from . import TableKernel
from .triton import table_gradient

_LARGEST_HEAD = 128
_KERNEL = Fa4Kernel()


class Fa4TableKernel(TableKernel):
    """FlashAttention-4's functions of variable length, with a function of scores."""

    name = "fa4"
    writes_new_memory = True

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        if reason := super().refuses(spec, q, k):
            return reason
        if torch.cuda.get_device_capability(q.device)[0] != 9:
            return "it supports a bias only on GPUs of compute capability 9"
        if spec.deterministic:
            return "its backward with a bias is not deterministic"
        if q.shape[2] != k.shape[2]:
            got = f"got {k.shape[2]} and {q.shape[2]}"
            return f"with a bias it needs as many kv heads as query heads, {got}"
        if q.shape[-1] > _LARGEST_HEAD:
            return f"with a bias it supports head sizes up to {_LARGEST_HEAD}, got {q.shape[-1]}"
        if not installed("triton"):
            return "the gradient of a bias's table needs the package triton"
        if not _KERNEL.broken() and not all(map(_takes_scalars, functions())):
            return "this version of flash-attn-4 lacks aux_scalars, which a bias needs: update it"
        return None

    def forward(self, q, k, v, call, spec, bias):
        return _KERNEL.forward_once(q, k, v, call, spec, _bias_options(bias, call, len(q)))

    def backward(self, dout, q, k, v, out, lse, delta, call, spec, bias):
        from . import fa4_scores

        inputs = dout, q, k, v, out, lse, delta, call, spec
        table = table_gradient(*inputs, bias)
        added = _bias_options(bias, call, len(q))
        added["score_mod_bwd"] = fa4_scores.gradient_of_sum
        return *_KERNEL.backward_once(*inputs, added), table


def _bias_options(bias: CallBias, call: KernelCall, batch: int) -> dict[str, Any]:
    """Return the options for a function of `fa4_scores`. It gets addresses of tensors, which the
    bias and the call keep alive.
    """
    from . import fa4_scores

    if "fa4" not in bias.prepared:
        biases = torch.cat((bias.table[bias.distances], bias.table)).float().T.contiguous()
        bias.prepared["fa4"] = biases
    biases = bias.prepared["fa4"]
    device, width = biases.device, biases.shape[1]
    name = "places", batch, bias.reach, bias.apart
    places = prepare_once(
        call, name, device, lambda: send_to_device(_find_places(bias, call, batch), device)
    )
    if (of := bias.segments) is None:
        scalars = fa4_scores.scalars(biases, width, places)
        return {"score_mod": fa4_scores.add_by_distance, "aux_scalars": scalars}
    pairs = of.pairs if len(of.pairs) else bias.distances  # if no groups are equal
    numbers = biases, width, places, bias.reach, of.other, len(pairs) - 1
    queries = of.q_group, of.q_base, bias.q_position
    keys = of.kv_group, of.kv_segment, bias.kv_position
    scalars = fa4_scores.scalars(*numbers, *queries, *keys, pairs)
    return {"score_mod": fa4_scores.add_by_segments, "aux_scalars": scalars}


def _find_places(bias: CallBias, call: KernelCall, batch: int) -> Tensor:
    """Compute `places` of the functions of `fa4_scores`. Distances between tiles are arbitrary."""
    spans, rows = call.sequences(), list[tuple[int, ...]]()
    if bias.apart is None:
        rows += [(q[0], q[1] - 1, kv[0], kv[1] - 1) for q, kv in spans]
    else:
        apart = iter(bias.apart)
        first = (next(apart) if length(q) and length(kv) else 0 for q, kv in spans)
        rows += [(x + bias.reach, 2 * bias.reach) for x in first]
    return torch.tensor(rows * batch, dtype=torch.int32)


@functools.cache
def _takes_scalars(function: Callable) -> bool:
    """Return whether it passes numbers to a function of scores, as 4.0.0b36 does."""
    return "aux_scalars" in inspect.signature(function).parameters
