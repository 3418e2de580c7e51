"""Lightning attention over ranks: linear attention with a decay, the mixer of MiniCPM-SALA.

A head has one state (D, D), so ranks send states instead of keys and values.

attention  `lightning_attn_func`, and the checks of its calls
plan       the part of a rank in a call: forward, backward, and the exchange of states
rates      how fast states decay
segments   which tokens have a state of their own, and which states ranks send
memory     states between chunks, and of generation
kernels    the contract of kernels, and the choice of one

Kernels: `reference` in torch, `triton_kernel` for GPUs, with its programs in `triton_blocks`.
"""

from .attention import lightning_attn_func
from .rates import alibi_slopes

__all__ = ["alibi_slopes", "lightning_attn_func"]
