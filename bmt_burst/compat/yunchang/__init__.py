"""The modules of yunchang 0.6.4 (feifeibear/long-context-attention, also known as USP), computed by
this library.

    from bmt_burst.compat.yunchang import EXTRACT_FUNC_DICT, LongContextAttention,
    set_seq_parallel_pg from bmt_burst.compat.yunchang.kernels import AttnType

The names are where that package has them: `comm`, `globals`, `hybrid`, `kernels`, `ring` and
`ulysses` are modules here too. The functions of `ring` are at the top as well.
"""

from .comm import EXTRACT_FUNC_DICT, basic_extract_local, stripe_extract_local, zigzag_extract_local
from .globals import PROCESS_GROUP, set_seq_parallel_pg
from .hybrid import (
    RING_IMPL_QKVPACKED_DICT,
    AsyncLongContextAttention,
    LongContextAttention,
    LongContextAttentionQKVPacked,
)
from .kernels import AttnType
from .ring import *  # noqa: F403
from .ring import __all__ as _of_a_ring
from .ulysses import UlyssesAttention

__all__ = [
    "EXTRACT_FUNC_DICT",
    "PROCESS_GROUP",
    "RING_IMPL_QKVPACKED_DICT",
    "AsyncLongContextAttention",
    "AttnType",
    "LongContextAttention",
    "LongContextAttentionQKVPacked",
    "UlyssesAttention",
    "basic_extract_local",
    "set_seq_parallel_pg",
    "stripe_extract_local",
    "zigzag_extract_local",
    *_of_a_ring,
]
