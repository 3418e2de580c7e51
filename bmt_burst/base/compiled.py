"""Functions that torch.compile leaves alone or compiles on GPUs, and arguments for Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def not_compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return `function` as one that torch.compile leaves alone.

    Ranks call such functions together, or the functions do more than compute tensors. A compiler
    would trace them again for other lengths, at other times on other ranks. torch.compiler.disable
    does the same, but it loads the compiler, which takes seconds and more than 100 MiB, and it
    takes the host time in each call.
    """
    disabled = _disable_dynamo(function)  # loads the compiler when it is first called

    @functools.wraps(function)
    def call(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
        # there is a callback only while a compiled function runs on this thread
        is_compiling = is_dynamo_compiling() or get_eval_frame_callback() is not None
        return (disabled if is_compiling else function)(*args, **named)

    # torch.compiler.disable sets it too: no caller is compiled together with this function
    call.__dict__["_torchdynamo_disable"] = True
    return call


def fused_on_gpus(
    function: Callable[..., Tensor], keeps_casts: bool = False
) -> Callable[..., Tensor]:
    """Return `function`, which is compiled if its first tensor is on a GPU.

    keeps_casts  whether a cast to half precision rounds, although the number is cast back.
                 Otherwise the compiler leaves out such pairs of casts.

    The other arguments are tensors and numbers. A compiled function is differentiable once. It is
    compiled at its first call, again for sizes of 1, and for calls with and without gradient.
    """
    options: Any = {"emulate_precision_casts": True} if keeps_casts else None
    compiled = functools.cache(lambda: torch.compile(function, dynamic=True, options=options))

    @functools.wraps(function)
    def call(x: Tensor, *args: Tensor | float) -> Tensor:
        outermost = x.is_cuda and not torch.compiler.is_compiling()
        return (compiled() if outermost else function)(x, *args)

    return call


def multiply_by_16(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return 16 times each number, for a Triton kernel that takes them in a tuple and divides them.

    Triton compiles a kernel again for numbers that are 1 and for multiples of 16, in a tuple
    whatever `do_not_specialize` says. So numbers that differ between calls are all multiples of 16.
    """
    return tuple(16 * x for x in numbers)
