"""FlashAttention-2: the `flash-attn` package, versions 2.6 to 2.8, for Ampere and newer."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..merging.surrogate import surrogate_out
from ..sequence.tile import KernelCall
from ..spec import Spec
from . import Kernel, import_failure, installed, refuses_half
from .packed import blind_queries, effective_band, pack, pack_rows, sequences, unpack, unpack_rows


class Fa2Kernel(Kernel):
    """FlashAttention-2's functions, dense or of variable length."""

    name = "fa2"

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        if not installed("flash_attn_2_cuda"):
            return "the package flash-attn (2.6 to 2.8) is not installed"
        reason = refuses_half(spec, q, capability=(8, 0), head_sizes=range(8, 257, 8), caps=True)
        asks = reason is None and spec.softcap is not None and not self.broken()
        if asks and not _package().caps_gradients:
            return "flash-attn before 2.6.2 does not apply the softcap to gradients: update it"
        return reason

    def broken(self) -> str | None:
        return import_failure("flash-attn", _package)

    def forward(self, q, k, v, call, spec):
        package = _package()
        options = package.options(call, spec) | {"dropout_p": 0.0, "return_softmax": False}
        if call.is_whole:
            return _out_and_lse(package.forward(q, k, v, **options))
        results = package.packed_forward(
            *pack(q, k, v), *_sizes(call, q), **options, block_table=None
        )
        out, lse = _out_and_lse(results)
        [out], lse = unpack(len(q), out), unpack_rows(lse, len(q))
        if (nothing := blind_queries(call, q.device)) is not None:  # where the package returns inf
            out = out.masked_fill(nothing[:, None, None], 0.0)
            lse = lse.masked_fill(nothing, -torch.inf)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, delta, call, spec):
        out = surrogate_out(dout, delta) if out is None else out
        package = _package()
        options = package.options(call, spec)
        options |= {"dropout_p": 0.0, "deterministic": spec.deterministic}
        if call.is_whole:
            grads = tuple(torch.empty_like(x) for x in (q, k, v))
            package.backward(dout, q, k, v, out, lse.contiguous(), *grads, **options)
            return grads
        # With an lse of inf all probabilities of a query are 0. The package does not define -inf.
        lse = pack_rows(lse.masked_fill(lse == -torch.inf, torch.inf)).contiguous()
        tensors = pack(dout, q, k, v, out)
        grads = [torch.zeros_like(x) for x in tensors[1:4]]
        package.packed_backward(*tensors, lse, *grads, *_sizes(call, q), **options)
        return tuple(unpack(len(q), *grads))


class Package(NamedTuple):
    """The functions of the installed version.

    two_arguments   whether a window is two arguments, as since 2.7
    caps_gradients  whether the backward knows a softcap, as since 2.6.2
    """

    forward: Callable
    backward: Callable
    packed_forward: Callable
    packed_backward: Callable
    two_arguments: bool
    caps_gradients: bool

    def options(self, call: KernelCall, spec: Spec) -> dict[str, Any]:
        """Return the options for a call's band, with -1 for no bound, and for its scores."""
        left, right = (-1 if x is None else x for x in effective_band(call))
        causal = left == -1 and right == 0
        window = (-1, -1) if causal else (left, right)
        names: dict[str, Any] = {"window_size_left": window[0], "window_size_right": window[1]}
        if not self.two_arguments:
            names = {"window_size": window}
        scores = {"softmax_scale": spec.scale, "softcap": spec.softcap or 0.0, "alibi_slopes": None}
        return {**names, **scores, "causal": causal}


def _sizes(call: KernelCall, q: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Return where sequences begin, and how long they are at most, on both sides.

    The package drops a bound of the band that is not below the longest keys, and replaces a missing
    one by that length. Both are wrong if there are more queries than keys. It also assumes one
    query in each sequence if the longest has one. Therefore both lengths are the longest of either
    side, at least 2.
    """
    packed = sequences(call, len(q), q.device)
    longest = max(packed.longest, 2)
    return packed.cu_seqlens_q, packed.cu_seqlens_k, longest, longest


def _out_and_lse(results: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return out and lse. Version 2.6 returns padded copies of the inputs between them."""
    return results[0], results[1] if len(results) == 4 else results[5]


@functools.cache
def _package() -> Package:
    """Import the package and find out what it supports."""
    import flash_attn
    from flash_attn import flash_attn_interface as interface

    # Since 2.7 torch wraps these functions, which hides their arguments. So the version decides.
    version = tuple(int(number) for number in re.findall(r"\d+", flash_attn.__version__)[:3])
    return Package(
        forward=interface._flash_attn_forward,
        backward=interface._flash_attn_backward,
        packed_forward=interface._flash_attn_varlen_forward,
        packed_backward=interface._flash_attn_varlen_backward,
        two_arguments=version >= (2, 7),
        caps_gradients=version >= (2, 6, 2),
    )
