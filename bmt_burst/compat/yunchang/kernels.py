"""The names that yunchang has for its kernels."""

from __future__ import annotations

from enum import Enum
from typing import Any


class AttnType(Enum):
    """Kernels of yunchang. All that compute exact attention mean flash="auto" here: the fastest
    kernel there is.
    """

    AITER = "aiter"
    FA = "fa"
    FA3 = "fa3"
    FLASHINFER = "flashinfer"
    TORCH = "torch"
    TORCH_MATH = "torch_math"
    TORCH_FLASH = "torch_flash"
    TORCH_EFFICIENT = "torch_efficient"
    TORCH_CUDNN = "torch_cudnn"
    SAGE_AUTO = "sage_auto"
    SAGE_FP16 = "sage_fp16"
    SAGE_FP16_TRITON = "sage_fp16_triton"
    SAGE_FP8 = "sage_fp8"
    SAGE_FP8_SM90 = "sage_fp8_sm90"
    SPARSE_SAGE = "sparse_sage"
    NPU = "npu"

    @classmethod
    def from_string(cls, s: str) -> AttnType:
        """The one with this value. Raises ValueError for any other."""
        return cls(s)


def check_exact(attn_type: AttnType) -> None:
    """Raises TypeError for what is no AttnType, ValueError for one that computes something else
    than attention.
    """
    if not isinstance(attn_type, AttnType):
        raise TypeError(f"attn_type must be an AttnType, got {attn_type!r}")
    if "sage" in attn_type.value:
        raise ValueError(f"{attn_type} approximates attention, which is exact here; AttnType.FA is")


def check_no_processor(attn_processor: Any) -> None:
    """Raises ValueError for an attn_processor, which would compute attention in its own way."""
    if attn_processor is not None:
        raise ValueError(
            f"an attn_processor is not supported: got a {type(attn_processor).__name__}"
        )
