"""Block kernels: attention of some queries to some keys, in the tiles of a `KernelCall`.

`Kernel` below is the contract, `reference` its specification. Kernels that know no tiles derive
from `tile_by_tile.PlainKernel`. `packed` has the arguments of functions of variable length.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..base.registry import Registry
from ..sequence.tile import KernelCall
from ..spec import Spec

logger = logging.getLogger("bmt_burst")

# The fastest first. "auto" tries them in this order.
_BACKENDS: Registry[Kernel] = Registry(
    __name__,
    {
        "fa4": "fa4:Fa4Kernel",
        "cudnn": "torch_ops:CudnnKernel",
        "fa2": "fa2:Fa2Kernel",
        "aten": "torch_ops:AtenKernel",
        "triton": "triton:TritonKernel",
        "cpu": "torch_ops:CpuKernel",
        "reference": "reference:ReferenceKernel",
    },
)
load, names = _BACKENDS.load, _BACKENDS.names

# A name of the official package -> the kernels that it stands for, the fastest first.
_ALIASES = {"cuda": ("fa4", "fa2")}


class Kernel(ABC):
    """Attention of q (B, S, H, D) to k, v (B, T, G, D) of one dtype and device, H a multiple of G.

    Query head h attends to kv head h // (H // G). A `KernelCall` with S queries and T keys says
    which query sees which key, for each of B. A `Spec` says how scores are computed.

    writes_new_memory  whether the caller may write to the results of `forward`: their memory is
                       new, and activation checkpointing, which may keep what torch operators
                       return, does not keep it
    """

    name: str
    writes_new_memory: bool = False

    @abstractmethod
    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        """Return why this kernel cannot compute such inputs on this machine, or None if it can.

        The answer holds for any `KernelCall`. Refuse tensors without values (meta), and return
        NO_SOFTCAP for a spec that the kernel does not support.
        """

    def broken(self) -> str | None:
        """Return why the package that it needs is installed but does not work, or None."""
        return None

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of out, dq, dk and dv for inputs of `dtype`, at least as precise."""
        return dtype

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: Spec
    ) -> tuple[Tensor, Tensor]:
        """Compute out (B, S, H, D) = softmax(scores) v and lse (B, H, S) = logsumexp(scores).

        scores = scale q k^T, with a softcap = softcap tanh(scale q k^T / softcap), computed before
        pairs are hidden. lse is a natural logarithm in fp32 (fp64 for fp64 inputs). No later call
        writes to the memory of the results.

        - A query that sees no key has an lse of -inf and an out of 0. The out may be NaN if some v
          is not finite.
        - A query that is not finite has an out of NaN and an lse of NaN or -inf.
        - A query whose scores are all -inf has an lse of -inf. Its out is used only if no other
          call has a finite lse for it.
        - With a softcap scores of inf may become finite, as tanh does, or NaN.
        """

    @abstractmethod
    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        lse: Tensor,
        delta: Tensor | None,
        call: KernelCall,
        spec: Spec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute this call's share of dq, dk and dv.

        dout is the gradient of the output over *all* keys of the sequence, also those that no call
        has, such as attention sinks. `lse` is the logsumexp over all keys, -inf for a query that
        sees none. Callers pass one of two:

        - `out`, the output over all keys, or any tensor of q's shape and dtype with the same
          rowsum(out * dout). `delta` is None.
        - `delta` (B, H, S) fp32 (fp64 for fp64 inputs), that rowsum. `out` is None.

        Over the visible pairs, with P = exp(scores - lse) and dP = dout v^T (FlashAttention-2,
        arXiv 2307.08691, algorithm 2):

            dS = P (dP - delta), with a softcap times 1 - (scores / softcap)^2
            dq = scale dS k, dk = scale dS^T q, dv = P^T dout

        A query that sees nothing and a key that nothing sees have gradients of 0.
        """


def pick(name: str, q: Tensor, k: Tensor, spec: Spec) -> Kernel:
    """Return the kernel `name` or, for "auto", the fastest kernel that can compute these inputs.

    Raises ValueError if the name is unknown, or with every candidate's reason if none can.
    """
    found = _BACKENDS.pick(name, q, lambda x: x.refuses(spec, q, k) or x.broken(), _ALIASES)
    if name == "auto":
        _announce(found, q.dtype, q.device.type)
    return load(found)


NO_SOFTCAP = "it does not support a softcap"


def refuses_half(
    spec: Spec, q: Tensor, capability: tuple[int, int], most: int = 256, caps: bool = False
) -> str | None:
    """Return why a 16-bit kernel for GPUs, which may know `caps`, cannot compute q, or None."""
    if spec.softcap is not None and not caps:
        return NO_SOFTCAP
    return refuses_tensors(q, capability) or refuses_head_size(q, most)


def refuses_tensors(
    q: Tensor, capability: tuple[int, int], takes_single: bool = False
) -> str | None:
    """Return why a kernel for GPUs cannot compute tensors like q, of any head size, or None."""
    if not q.is_cuda:
        return f"inputs are on {q.device}, not on a GPU"
    has = torch.cuda.get_device_capability(q.device)
    if torch.version.hip is None and has < capability:
        needed, found = (".".join(map(str, x)) for x in (capability, has))
        name = torch.cuda.get_device_name(q.device)
        return f"it needs compute capability {needed}, {name} has {found}"
    if q.dtype in (torch.float16, torch.bfloat16) or (takes_single and q.dtype == torch.float32):
        return None
    return f"inputs are {q.dtype}, not {'fp16, bf16 or fp32' if takes_single else 'fp16 or bf16'}"


def refuses_head_size(q: Tensor, most: int) -> str | None:
    """Return why a kernel for head sizes up to `most` cannot compute q, or None."""
    if q.shape[-1] in range(8, most + 1, 8):
        return None
    return f"head size must be a multiple of 8 up to {most}, got {q.shape[-1]}"


@functools.cache
def installed(module: str) -> bool:
    """Return whether a module, and each package that it is in, can be found.

    The search, which is slow, imports these packages. If that fails, the answer is True: the import
    of the module will say why.
    """
    parents = itertools.accumulate(module.split("."), "{}.{}".format)
    try:
        return all(importlib.util.find_spec(name) is not None for name in parents)
    except Exception:  # noqa: BLE001 - packages raise any error
        return True


@functools.cache
def import_failure(package: str, load: Callable[[], Any]) -> str | None:
    """Return why `load`, which imports a package for a kernel, fails, or None. Log it once."""
    try:
        load()
    except Exception as error:  # noqa: BLE001 - packages raise any error, e.g. OSError
        what = f"{type(error).__name__}: {error}"
        reason = f"the package {package} is installed but cannot be used: {what}"
        logger.warning(reason)
        return reason
    return None


@functools.cache
def _announce(kernel: str, dtype: torch.dtype, device: str) -> None:
    """Log the kernel that "auto" chose, each choice once."""
    logger.info("flash='auto' took the %s kernel for %s on %s", kernel, dtype, device)
