"""Block kernels: attention of one q block against one kv block. One backend a file.

The contract is `Kernel` below; `reference` is its specification. Kernels know nothing of rings and layouts.

To add one: write `kernels/NAME.py` with a subclass of Kernel, list it in `_BACKENDS`, the fastest first.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("bmt_burst")

# Name -> class, the fastest first: the order in which "auto" tries them.
_BACKENDS = {
    "fa4": "Fa4Kernel",
    "cudnn": "CudnnKernel",
    "fa2": "Fa2Kernel",
    "aten": "AtenKernel",
    "cpu": "CpuKernel",
    "reference": "ReferenceKernel",
}

# Names of the official package: what they stand for, the best first.
_ALIASES = {"cuda": ("fa4", "fa2"), "triton": ()}


class Kernel(ABC):
    """Attention of q (B, S, H, D) against k, v (B, T, G, D), H a multiple of G, all of one dtype and device.

    Query head h attends to kv head h // (H // G). If `causal`, S equals T and query i sees keys 0..i.

    takes_delta  whether `backward` can do with delta instead of out
    """

    name: str
    takes_delta: bool = False

    @abstractmethod
    def refuses(self, q: Tensor, k: Tensor, deterministic: bool) -> str | None:
        """Why this kernel cannot do such inputs on this machine, or None if it can."""

    def broken(self) -> str | None:
        """Why the package that it needs does not work though it is installed; None if it does."""
        return None

    @abstractmethod
    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of out, dq, dk and dv for inputs of `dtype`; at least as precise."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns out (B, S, H, D) = softmax(scale q k^T) v and lse (B, H, S), the natural logsumexp of the scores.

        lse is fp32 (fp64 for fp64 inputs). Of a query that is not finite all is NaN; one whose scores are all -inf has
        an lse of -inf and its out counts only where no other block's does.
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
        delta: Tensor | None = None,
        *,
        scale: float,
        causal: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this block's share of dq, dk, dv, given the gradient of the output over *all* kv blocks.

        `lse` is the logsumexp over all kv blocks. Either `out` is the output over all kv blocks, or any tensor of q's
        shape and dtype with the same rowsum(out * dout); or, for a kernel that takes it, `out` is None and `delta`
        (B, H, S), fp32 (fp64 for fp64 inputs), is that rowsum. With P = exp(scale q k^T - lse) and dP = dout v^T:
        dS = P (dP - delta), dq = scale dS k, dk = scale dS^T q, dv = P^T dout
        (FlashAttention-2, arXiv 2307.08691, algorithm 2).
        """


def names() -> list[str]:
    """All kernels, the fastest first."""
    return list(_BACKENDS)


@functools.cache
def load(name: str) -> Kernel:
    """The kernel called `name`."""
    return getattr(importlib.import_module(f"{__name__}.{name}"), _BACKENDS[name])()


def pick(name: str, q: Tensor, k: Tensor, deterministic: bool = False) -> Kernel:
    """The kernel for these inputs: the one asked for, or for "auto" the fastest that can.

    Raises ValueError, with every candidate's reason, if none can or the name is unknown.
    """
    candidates = names() if name == "auto" else _ALIASES.get(name, (name,))
    if unknown := [n for n in candidates if n not in _BACKENDS]:
        expected = ["auto", *_ALIASES, *_BACKENDS]
        raise ValueError(f"unknown kernel flash={unknown[0]!r}; expected one of {expected}")
    reasons = []
    for candidate in map(load, candidates):
        reason = candidate.refuses(q, k, deterministic) or candidate.broken()
        if reason is None:
            if name == "auto":
                _announce(candidate.name, q.dtype, q.device.type)
            return candidate
        reasons.append(f"{candidate.name}: {reason}")
    detail = "; ".join(reasons) or "this version has no kernel of that family"
    raise ValueError(f"no kernel for flash={name!r}, {q.dtype}, head size {q.shape[-1]} on {q.device}: {detail}")


def refuses_half(q: Tensor, capability: tuple[int, int], head_sizes: Container[int]) -> str | None:
    """Why a 16-bit kernel for NVIDIA GPUs of a compute capability and above cannot do q, None if it can."""
    if q.device.type != "cuda":
        return f"inputs are on {q.device}, not on an NVIDIA GPU"
    if torch.cuda.get_device_capability(q.device) < capability:
        return f"{torch.cuda.get_device_name(q.device)} is older than compute capability {capability}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"inputs are {q.dtype}, not fp16 or bf16"
    if q.shape[-1] not in head_sizes:
        return f"head size {q.shape[-1]} is not one of {list(head_sizes)}"
    return None


@functools.cache
def installed(module: str) -> bool:
    """Whether a module, and each package that it is in, can be found; cached, since looking takes long.

    To look into a package is to import it; where that fails it is there, and to import the module says why it fails.
    """
    parts = module.split(".")
    parents = (".".join(parts[: i + 1]) for i in range(len(parts)))
    try:
        return all(importlib.util.find_spec(name) is not None for name in parents)
    except Exception:  # noqa: BLE001 - packages fail as they like
        return True


@functools.cache
def import_failure(package: str, load: Callable[[], Any]) -> str | None:
    """Why `load`, which imports what a kernel needs of a package, fails, or None. Cached, so that it is logged once."""
    try:
        load()
    except Exception as error:  # noqa: BLE001 - ImportError, OSError, AttributeError: packages fail as they like
        reason = f"the package {package} is installed but cannot be used: {type(error).__name__}: {error}"
        logger.warning(reason)
        return reason
    return None


@functools.cache
def _announce(kernel: str, dtype: torch.dtype, device: str) -> None:
    """Cached, so that each choice is logged once."""
    logger.info("flash='auto' took the %s kernel for %s on %s", kernel, dtype, device)
