"""The functions of a ring alone: bmt_burst.compat.ring_flash_attn's, with the options that they
have in yunchang.

These are softcap, after window_size, and for batches attn_type, an exact one: see AttnType. `group`
are the ranks of the ring, by default all, with the tokens on them as ring_flash_attn has them.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ...ranks.rings import Group
from .. import ring_flash_attn as alone
from ..flash import Options, with_options
from .kernels import AttnType, check_exact, check_no_processor
from .options import OF_FUNCTIONS

__all__ = [
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "ring_flashinfer_attn_func",
    "ring_flashinfer_attn_kvpacked_func",
    "ring_flashinfer_attn_qkvpacked_func",
    "ring_npu_flash_attn_func",
    "ring_pytorch_attn_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]


@dataclass(frozen=True)
class KernelOptions(Options):
    """Also which kernel yunchang would take: an exact one, and no attn_processor."""

    attn_type: AttnType = AttnType.FA
    attn_processor: Any = None

    def band(self) -> tuple[int | None, int | None]:
        check_exact(self.attn_type)
        check_no_processor(self.attn_processor)
        return super().band()


_of_documents = functools.partial(with_options, names=OF_FUNCTIONS)
_packed = functools.partial(with_options, names=(*OF_FUNCTIONS, "attn_type"), options=KernelOptions)
_separate = functools.partial(
    with_options, names=(*OF_FUNCTIONS, "attn_type", "attn_processor"), options=KernelOptions
)

ring_flash_attn_func = _separate(alone.ring_flash_attn_func)
ring_flash_attn_kvpacked_func = _packed(alone.ring_flash_attn_kvpacked_func)
ring_flash_attn_qkvpacked_func = _packed(alone.ring_flash_attn_qkvpacked_func)
zigzag_ring_flash_attn_func = _separate(alone.zigzag_ring_flash_attn_func)
zigzag_ring_flash_attn_kvpacked_func = _packed(alone.zigzag_ring_flash_attn_kvpacked_func)
zigzag_ring_flash_attn_qkvpacked_func = _packed(alone.zigzag_ring_flash_attn_qkvpacked_func)
stripe_flash_attn_func = _separate(alone.stripe_flash_attn_func)
stripe_flash_attn_kvpacked_func = _packed(alone.stripe_flash_attn_kvpacked_func)
stripe_flash_attn_qkvpacked_func = _packed(alone.stripe_flash_attn_qkvpacked_func)

ring_flash_attn_varlen_func = _of_documents(alone.ring_flash_attn_varlen_func)
ring_flash_attn_varlen_kvpacked_func = _of_documents(alone.ring_flash_attn_varlen_kvpacked_func)
ring_flash_attn_varlen_qkvpacked_func = _of_documents(alone.ring_flash_attn_varlen_qkvpacked_func)
zigzag_ring_flash_attn_varlen_func = _of_documents(alone.zigzag_ring_flash_attn_varlen_func)
zigzag_ring_flash_attn_varlen_kvpacked_func = _of_documents(
    alone.zigzag_ring_flash_attn_varlen_kvpacked_func
)
zigzag_ring_flash_attn_varlen_qkvpacked_func = _of_documents(
    alone.zigzag_ring_flash_attn_varlen_qkvpacked_func
)

ring_flashinfer_attn_func = ring_flash_attn_func
ring_flashinfer_attn_kvpacked_func = ring_flash_attn_kvpacked_func
ring_flashinfer_attn_qkvpacked_func = ring_flash_attn_qkvpacked_func


@_separate
def ring_pytorch_attn_func(q, k, v, options):
    """ring_flash_attn_func, but out comes alone also with return_attn_probs, as there."""
    return inspect.unwrap(alone.ring_flash_attn_func)(
        q, k, v, replace(options, return_attn_probs=False)
    )


def ring_npu_flash_attn_func(
    group: Group | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    head_num: int | None = None,
    input_layout: str = "BSND",
    causal: bool = False,
    attn_type: AttnType = AttnType.NPU,
    attn_processor: Any = None,
) -> Tensor:
    """ring_flash_attn_func, and out alone. `head_num` is not looked at, as there; input_layout must
    be "BSND".
    """
    if input_layout != "BSND":
        raise ValueError(
            f"input_layout must be 'BSND', batch, tokens, heads, head size, got {input_layout!r}"
        )
    options = {"attn_type": attn_type, "attn_processor": attn_processor, "group": group}
    return ring_flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal, **options)
