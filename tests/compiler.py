"""Compiles Triton kernels, as they are launched, for GPUs that need not be there."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

OPTIONS = "num_warps", "num_stages", "enable_fp_fusion"
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiler:
    """A kernel that is compiled instead of launched. It prints the kernel's name each time."""

    def __init__(self, kernel, capability: int = 90):
        self.kernel, self.target, self.kinds = kernel, GPUTarget("cuda", capability, 32), []
        self.__name__ = kernel.__name__

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, **constants):
        options = {name: constants.pop(name) for name in OPTIONS if name in constants}
        kinds = self.kinds_of(args, constants)
        if kinds in self.kinds:
            return
        self.kinds.append(kinds)
        names, signature, values = self.kernel.arg_names, {}, {}
        constant = {x.name for x in self.kernel.params if x.is_constexpr}
        for name, x in {**dict(zip(names, args, strict=False)), **constants}.items():
            at = (names.index(name),)
            if name in constant:
                signature[name], values[at] = "constexpr", x
            else:
                signature[name] = kind(x, at, values)
        source = ASTSource(self.kernel, signature, values)
        assert triton.compile(source, target=self.target, options=options).asm["cubin"]
        print(self.__name__)

    def kinds_of(self, args, constants):
        """Return the types and properties for which Triton compiles a kernel."""
        bind = create_function_from_signature(
            self.kernel.signature, self.kernel.params, make_backend(self.target)
        )
        return bind(*args, **constants)[1]


def kind(x, path, values):
    """Return the type of an argument. A None or a function is a constant in `values`."""
    if isinstance(x, tuple):
        kinds = [kind(y, (*path, i), values) for i, y in enumerate(x)]
        return type(x)(*kinds) if hasattr(x, "_fields") else tuple(kinds)
    if x is None or isinstance(x, JITFunction):
        values[path] = x
        return "constexpr"
    if isinstance(x, TensorDescriptor):
        return f"tensordesc<{POINTERS[x.base.dtype][1:]}{x.block_shape}>"
    if isinstance(x, torch.Tensor):
        return POINTERS[x.dtype]
    return "fp32" if isinstance(x, float) else "i32"
