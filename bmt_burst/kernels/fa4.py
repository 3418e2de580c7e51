"""FlashAttention-4: the `flash-attn-4` package (CuTe DSL), for Hopper and Blackwell.

Kernels are compiled when a process first uses a combination of dtype, head size and mask (seconds); the package keeps
them on disk if the environment variable FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is 1.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from . import Kernel, import_failure, installed, refuses_half

# 4.0.0b36 computes wrong gradients for other sizes, 80 among them, and says nothing. On Blackwell it lacks 192, and for
# 256 the gradient of lse, by which delta is handed over.
_HEAD_SIZES = (64, 96, 128)
_HEAD_SIZES_HOPPER = (*_HEAD_SIZES, 192, 256)


class Fa4Kernel(Kernel):
    name = "fa4"
    takes_delta = True

    def refuses(self, q: Tensor, k: Tensor, deterministic: bool) -> str | None:
        if not installed("flash_attn.cute"):
            return "the package flash-attn-4 is not installed"
        generation = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 0
        if deterministic and generation == 12:
            return "its backward adds up in no fixed order on GPUs of compute capability 12"
        return refuses_half(q, (9, 0), _HEAD_SIZES_HOPPER if generation == 9 else _HEAD_SIZES)

    def broken(self) -> str | None:
        return import_failure("flash-attn-4", _functions)

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(self, q, k, v, *, scale, causal, deterministic):
        out, lse, *_ = _functions()[0](q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, delta=None, *, scale, causal, deterministic):
        options = {"softmax_scale": scale, "causal": causal, "deterministic": deterministic}
        if out is None:
            # The kernel works with rowsum(out * dout) - dlse, where dlse is meant for the gradient of lse.
            out = q.new_zeros(1, 1, 1, q.shape[-1]).expand_as(q)
            options["dlse"] = -delta
        return _functions()[1](q, k, v, out, dout, lse.contiguous(), **options)[:3]


@functools.cache
def _functions() -> tuple[Callable, Callable]:
    """Forward and backward."""
    from flash_attn.cute import interface

    # Every process says so for every kernel that it compiles, of an argument of the package's own that is not in use.
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning, module="cutlass")
    return interface._flash_attn_fwd, interface._flash_attn_bwd
