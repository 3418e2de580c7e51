"""Compiles the fused kernels, as they are launched, for GPUs that need not be there. Run by
compile_triton.py.
"""

from __future__ import annotations

import torch

from bmt_burst.merging import fused
from tests.compiler import Compiler

CAPABILITY = 80  # the oldest; compile_triton.py compiles for 90


def main():
    for name in ("_merge_outputs", "_sum_gradients", "_fill_lse_delta"):
        setattr(fused, name, Compiler(getattr(fused, name), CAPABILITY))
    for tokens, start in ((32, 16), (33, 1), (40, 0), (47, 3)):  # compiled once for all of them
        wide, half = (
            torch.zeros(1, tokens, 2, 80),
            torch.zeros(1, tokens - start, 2, 80, dtype=torch.bfloat16),
        )
        lse = torch.zeros(1, 2, tokens)
        for spans in ([(start, tokens)], [(0, start), (2 * start, tokens)]):
            fused.merge_outputs(
                wide, lse, [([(0, tokens)], wide, lse), (spans, half, lse[..., start:])]
            )
            fused.sum_gradients(wide, [([(0, tokens)], wide), (spans, half)])
        fused.fill_lse_delta(torch.zeros(1, tokens - start, 2, 2), half, half, lse[..., start:])


if __name__ == "__main__":
    main()
