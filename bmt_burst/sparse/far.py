"""Attention to the chosen blocks beyond the window: the far part of sparse attention.

The window of query i are the keys i - window_size to i of its document. A dense kernel computes
them. The far part are the keys before i - window_size in the chosen blocks. So each pair is in one
part, and partial outputs merge by lse. Queries that see no more blocks than they may choose have no
far part: a dense kernel computes all of theirs (`queries.py`).

Neighbouring queries choose nearly the same blocks, so kernels load them for several queries at
once: `torch_far.py`, and `triton_far.py` for GPUs.

The keys at hand may be a part of the sequence. Blocks outside are left out, so parts add up.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from ..base.registry import Modules
from . import torch_far
from .blocks import FarKeys

_MODULES = Modules(__package__, {"triton": "triton_far", "torch": "torch_far"})


def find_kernels(q: Tensor, far: FarKeys) -> ModuleType:
    """Return the module with `add_far_outputs` and `add_far_gradients` for such tensors: Triton's
    on GPUs, unless for fp64 or too large heads or blocks. `torch_far.py` specifies both.
    """
    found = _MODULES.find(q)
    fits = found is torch_far or found.fits(q, far.k, far.blocks.block_size)
    return found if fits else torch_far
