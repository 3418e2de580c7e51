"""The names of yunchang's kernels."""

from __future__ import annotations

from enum import Enum


class AttnType(Enum):
    """A kernel of yunchang. Every exact one means flash="auto" here, the fastest kernel."""

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


def check_exact(attn_type: AttnType) -> None:
    """Raise TypeError if attn_type is not an AttnType, and ValueError if it is not exact."""
    if not isinstance(attn_type, AttnType):
        raise TypeError(f"attn_type must be an AttnType, got {attn_type!r}")
    if "sage" in attn_type.value:
        raise ValueError(
            f"{attn_type} approximates attention: expected an exact kernel, such as AttnType.FA"
        )
