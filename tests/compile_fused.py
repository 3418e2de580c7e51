"""Compiles the fused kernels, as they are launched, for GPUs that need not be there. Run by test_fused.py."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bmt_burst import fused

CAPABILITIES = 80, 90, 100
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}


class Compiler:
    """In place of a kernel: compiles where that would launch, and prints the kernel's name."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, **constants):
        named = dict(zip(self.kernel.arg_names, args, strict=False))
        signature = {name: kind(x) for name, x in named.items()} | dict.fromkeys(constants, "constexpr")
        for capability in CAPABILITIES:
            source = ASTSource(self.kernel, signature, constants)
            assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
        print(self.kernel.__name__)


def kind(x):
    if isinstance(x, tuple):
        return tuple(map(kind, x))
    return POINTERS[x.dtype] if isinstance(x, torch.Tensor) else "i32"


def main():
    for name in ("_merge_outputs", "_sum_gradients", "_fill_query_rows"):
        setattr(fused, name, Compiler(getattr(fused, name)))
    wide, half = torch.zeros(1, 32, 2, 80), torch.zeros(1, 16, 2, 80, dtype=torch.bfloat16)
    lse = torch.zeros(1, 2, 32)
    fused.merge_outputs(wide, lse, [((0, 32), wide, lse), ((16, 32), half, lse[..., :16])])
    fused.sum_gradients(wide, [((0, 32), wide), ((16, 32), half)])
    fused.fill_query_rows(torch.zeros(1, 16, 2, 2), half, half, lse[..., :16])


main()
