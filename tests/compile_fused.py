"""Compiles the fused kernels, as they are launched, for GPUs that need not be there. Run by
compile_triton.py.
"""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from bmt_burst.merging import fused

CAPABILITIES = (80,)  # the oldest; compile_triton.py compiles for 90
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32"}


class Compiler:
    """In place of a kernel: compiles where that would launch, and prints the kernel's name."""

    def __init__(self, kernel):
        self.kernel, self.kinds = kernel, []

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args):
        kinds = kinds_of(self.kernel, args, {})
        if kinds in self.kinds:
            return
        self.kinds.append(kinds)
        named = dict(zip(self.kernel.arg_names, args, strict=True))
        constants = {x.name: named[x.name] for x in self.kernel.params if x.is_constexpr}
        signature = {name: kind(x) for name, x in named.items() if name not in constants}
        signature |= dict.fromkeys(constants, "constexpr")
        for capability in CAPABILITIES:
            source = ASTSource(self.kernel, signature, constants)
            assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
        print(self.kernel.__name__)


def kind(x):
    if isinstance(x, tuple):
        return tuple(map(kind, x))
    return POINTERS[x.dtype] if isinstance(x, torch.Tensor) else "i32"


def kinds_of(kernel, args, constants):
    """What Triton compiles a kernel anew for, if it differs."""
    bind = create_function_from_signature(
        kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    return bind(*args, **constants)[1]


def main():
    for name in ("_merge_outputs", "_sum_gradients", "_fill_lse_delta"):
        setattr(fused, name, Compiler(getattr(fused, name)))
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
