"""FlashAttention-2: the `flash-attn` package, version 2.7 or newer, for Ampere and newer."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ..base.policies import seen_by_policies
from ..merging.surrogate import surrogate_out
from ..sequence.tile import KernelCall
from ..spec import Spec
from . import Kernel, import_failure, installed, refuses_half
from .packed import blind_queries, effective_band, pack, pack_rows, sequences, unpack, unpack_rows


class Fa2Kernel(Kernel):
    name = "fa2"

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        if not installed("flash_attn_2_cuda"):
            return "the package flash-attn (2.7 or newer) is not installed"
        return refuses_half(spec, q, (8, 0), caps=True)

    def broken(self) -> str | None:
        return import_failure("flash-attn", interface)

    def forward(self, q, k, v, call, spec):
        options = _options(call, spec) | {"return_softmax": False}
        if call.is_whole:
            return _forward(q, k, v, **options)[:2]
        packed = *pack(q, k, v), *_sizes(call, q)
        out, lse, *_ = _varlen_forward(*packed, **options, block_table=None)
        [out], lse = unpack(len(q), out), unpack_rows(lse, len(q))
        if (nothing := blind_queries(call, q.device)) is not None:  # where the package returns inf
            out = out.masked_fill(nothing[:, None, None], 0.0)
            lse = lse.masked_fill(nothing, -torch.inf)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, delta, call, spec):
        out = surrogate_out(dout, delta) if out is None else out
        options = _options(call, spec) | {"deterministic": spec.deterministic}
        if call.is_whole:
            grads = tuple(torch.empty_like(x) for x in (q, k, v))
            rows = lse.contiguous()
            interface()._flash_attn_backward(dout, q, k, v, out, rows, *grads, **options)
            return grads
        # With an lse of inf all probabilities of a query are 0. The package does not define -inf.
        lse = pack_rows(lse.masked_fill(lse == -torch.inf, torch.inf)).contiguous()
        tensors = pack(dout, q, k, v, out)
        grads = [torch.zeros_like(x) for x in tensors[1:4]]
        packed = *tensors, lse, *grads, *_sizes(call, q)
        interface()._flash_attn_varlen_backward(*packed, **options)
        return tuple(unpack(len(q), *grads))


@seen_by_policies
def _forward(*tensors: Tensor, **options: Any) -> Any:
    return interface()._flash_attn_forward(*tensors, **options)


@seen_by_policies
def _varlen_forward(*tensors: Any, **options: Any) -> Any:
    return interface()._flash_attn_varlen_forward(*tensors, **options)


def _options(call: KernelCall, spec: Spec) -> dict[str, Any]:
    """Return the options for a call's band, with -1 for no bound, and for its scores."""
    left, right = (-1 if x is None else x for x in effective_band(call))
    causal = left == -1 and right == 0
    return {
        "dropout_p": 0.0,
        "softmax_scale": spec.scale,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": -1 if causal else right,
        "softcap": spec.softcap or 0.0,
        "alibi_slopes": None,
    }


def _sizes(call: KernelCall, q: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Return where sequences begin, and how long they are at most, on both sides."""
    packed = sequences(call, len(q), q.device)
    # The package drops a bound of the band that is not below the longest keys, and replaces a
    # missing one by that length. Both are wrong if there are more queries than keys. It also
    # assumes one query in each sequence if the longest has one.
    longest = max(packed.longest, 2)
    return packed.cu_seqlens_q, packed.cu_seqlens_k, longest, longest


@functools.cache
def interface() -> ModuleType:
    """Import the package's functions. Raises ImportError for versions with other arguments."""
    import flash_attn

    if TorchVersion(flash_attn.__version__) < "2.7":
        raise ImportError(f"expected version 2.7 or newer, got {flash_attn.__version__}: update it")
    functions: ModuleType = flash_attn.flash_attn_interface
    return functions
