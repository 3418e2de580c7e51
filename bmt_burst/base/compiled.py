"""Compilers: what torch.compile does for this library, and leaves alone; how Triton compiles a
kernel once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def not_compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return `function` as one that torch.compile leaves alone.

    It is for functions that ranks call together, or that do more than tensors show: a compiler
    would trace them again for other lengths, at other times on other ranks. torch.compiler.disable
    does the same, but it loads the compiler, which takes seconds and more than 100 MiB. Programs
    that compile nothing do not need that.
    """
    disabled = _disable_dynamo(function)  # loads the compiler when it is first called

    @functools.wraps(function)
    def call(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **named)

    # what torch.compiler.disable marks: no caller is compiled together with it
    call._torchdynamo_disable = True
    return call


def fused_on_gpus(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` of tensors, then numbers; where the first is on a GPU compiled, and then
    differentiable once.

    Compiled when first called, once more for sizes of 1, and with and without gradient.
    """
    compiled = functools.cache(lambda: torch.compile(function, dynamic=True))

    @functools.wraps(function)
    def call(x: Tensor, *args: Tensor | float) -> Tensor:
        outermost = x.is_cuda and not torch.compiler.is_compiling()
        return (compiled() if outermost else function)(x, *args)

    return call


def multiply_by_16(numbers: Iterable[int]) -> tuple[int, ...]:
    """Numbers that differ from call to call, for a Triton kernel that takes them in a tuple: each
    times 16.

    Triton compiles a kernel anew, for seconds, for numbers that are 1 and for multiples of 16, in a
    tuple whatever `do_not_specialize` says. So all are multiples; the kernel divides them.
    """
    return tuple(16 * x for x in numbers)
