"""Names of yunchang 0.6.4 (feifeibear/long-context-attention, also known as USP), computed by this
library.

    from bmt_burst.compat.yunchang import EXTRACT_FUNC_DICT, LongContextAttention
    from bmt_burst.compat.yunchang.kernels import AttnType

They are in the same modules as in that package: `comm`, `globals`, `hybrid`, `kernels`, `ring` and
`ulysses`. docs/migrate.md lists them.
"""

from .comm import EXTRACT_FUNC_DICT, basic_extract_local, stripe_extract_local, zigzag_extract_local
from .globals import PROCESS_GROUP, set_seq_parallel_pg
from .hybrid import RING_IMPL_QKVPACKED_DICT, LongContextAttention
from .kernels import AttnType
from .ring import *  # noqa: F403
from .ring import __all__ as _ring_functions
from .ulysses import UlyssesAttention

__all__ = [
    "EXTRACT_FUNC_DICT",
    "PROCESS_GROUP",
    "RING_IMPL_QKVPACKED_DICT",
    "AttnType",
    "LongContextAttention",
    "UlyssesAttention",
    "basic_extract_local",
    "set_seq_parallel_pg",
    "stripe_extract_local",
    "zigzag_extract_local",
    *_ring_functions,
]
