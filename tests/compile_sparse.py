"""Compiles the kernels of sparse attention, as they are launched, for a GPU that need not be there.
Run by test_sparse_kernels.py.
"""

from __future__ import annotations

import sys

import torch

from bmt_burst import InfLLMV2
from bmt_burst.sparse import tiles, triton_choice, triton_far
from bmt_burst.sparse.blocks import FarBlocks, FarKeys
from bmt_burst.sparse.compressed import CompressedKeys
from tests.compiler import Compiler

NAMES = {
    tiles: ("_sort_keys", "_unite"),
    triton_far: ("_forward", "_dq", "_dkdv", "_add_parts"),
    triton_choice: ("_normalize", "_fill_scores", "_take"),
}


def main():
    for module, names in NAMES.items():
        for name in names:
            setattr(module, name, Compiler(getattr(module, name)))
    tiles._SHORTEST = 4  # lists have several parts
    for queries in (32, 33, 40):  # compiled once for all of them
        starts = torch.zeros(queries, 2, 4, dtype=torch.int32)
        blocks = FarBlocks(starts, torch.arange(queries), 48)
        q, k = (
            torch.zeros(tokens, heads, 24, dtype=torch.bfloat16)
            for tokens, heads in ((queries, 6), (queries + 1, 2))
        )
        lse, lse_delta, dq = (torch.zeros(s) for s in ((6, queries), (queries, 6, 2), q.shape))
        triton_far.add_far_outputs(q, FarKeys(k, k, blocks, 1, 0.3), q.clone(), lse)
        triton_far.add_far_gradients(q, q, FarKeys(k, k, blocks, 1, 0.3), lse_delta, dq)
        places, keys = torch.arange(queries), CompressedKeys(*torch.zeros(2, queries - 2, 2, 24))
        triton_choice.choose_by_score(q, places, keys, InfLLMV2(), 0.3)


if __name__ == "__main__":
    sys.exit(main())
