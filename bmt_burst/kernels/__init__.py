"""Block kernels: attention of some queries to some keys, in the tiles of a `KernelCall`. One
backend a file.

The contract is `Kernel` below; `reference` is its specification. Kernels know nothing of rings and
layouts.

To add one: write `kernels/NAME.py` with a subclass of Kernel, list it in `_BACKENDS`, the fastest
first. One that knows no tiles is a subclass of `tile_by_tile.PlainKernel`; one of variable-length
functions finds its arguments in `packed`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..sequence.tile import KernelCall
from ..spec import Spec
from .bias import CallBias

logger = logging.getLogger("bmt_burst")

# Name -> class, the fastest first: the order in which "auto" tries them.
_BACKENDS = {
    "fa4": "Fa4Kernel",
    "cudnn": "CudnnKernel",
    "fa2": "Fa2Kernel",
    "aten": "AtenKernel",
    "triton": "TritonKernel",
    "cpu": "CpuKernel",
    "reference": "ReferenceKernel",
}

# Names of the official package: what they stand for, the best first.
_ALIASES = {"cuda": ("fa4", "fa2")}


class Kernel(ABC):
    """Attention of q (B, S, H, D) to k, v (B, T, G, D), H a multiple of G, all of one dtype and
    device.

    Query head h attends to kv head h // (H // G). A `KernelCall` says which query sees which key,
    in each of B alike; S and T are its q_tokens and kv_tokens. A `Spec` says what is computed of
    what is seen.

    takes_delta        whether `backward` can do with delta instead of out
    writes_new_memory  whether out and lse of `forward` are in memory that is new and that no torch
                       operator returned with them in it, so that nobody else holds them (a policy
                       of activation checkpointing may hold what operators return) and the caller
                       may write there
    runs_interpreted   whether tests may ask it directly about tensors on the CPU, in Triton's
                       interpreter
    """

    name: str
    takes_delta: bool = False
    writes_new_memory: bool = False
    runs_interpreted: bool = False

    @abstractmethod
    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        """Why this kernel cannot do this for such inputs on this machine, or None if it can,
        whatever the call.
        """

    def broken(self) -> str | None:
        """Why the package that it needs does not work though it is installed; None if it does."""
        return None

    @abstractmethod
    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of out, dq, dk and dv for inputs of `dtype`; at least as precise."""

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: KernelCall,
        spec: Spec,
        bias: CallBias | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns out (B, S, H, D) = softmax(scores) v and lse (B, H, S), the natural logsumexp of
        the scores.

        scores = scale q k^T, and with a bias + table[row of the pair, head]. A bias comes only
        where `spec.biased`. With a softcap they are softcap tanh(scale q k^T / softcap), bounded
        before anything is hidden.

        lse is fp32 (fp64 for fp64 inputs). A query that sees no key has an out of 0 (it may be NaN
        if some v is not finite) and an lse of -inf. A query that is not finite has an out of NaN
        and an lse that is NaN or -inf. One whose scores are all -inf has an lse of -inf, and its
        out counts only where no other call's does. With a softcap scores of inf may be finite, as
        tanh has them, or NaN.
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
        bias: CallBias | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns this call's share of dq, dk, dv, given the gradient of the output over *all* keys
        of the sequence.

        `lse` is the logsumexp over all keys, -inf for a query that sees none. Either `out` is the
        output over all keys, or any tensor of q's shape and dtype with the same rowsum(out * dout),
        and `delta` is None; or, for a kernel that takes it, `out` is None and `delta` (B, H, S),
        fp32 (fp64 for fp64 inputs), is that rowsum. Over the visible pairs, with P = exp(scores -
        lse) and dP = dout v^T:  dS = P (dP - delta), dq = scale dS k, dk = scale dS^T q, dv = P^T
        dout  (FlashAttention-2, arXiv 2307.08691, algorithm 2). What sees nothing, or is seen by
              nothing, has gradients of 0. With a softcap  dS = P (dP - delta) (1 - (scores /
              softcap)^2)  instead.

        "All keys" may include some that no call has, as an attention sink is one.

        With a bias it returns a fourth, dtable (R, H) in the table's dtype: for each row and head
        the sum of dS over the visible pairs with that row, and over B.
        """


def names() -> list[str]:
    """All kernels, the fastest first."""
    return list(_BACKENDS)


@functools.cache
def load(name: str) -> Kernel:
    """The kernel called `name`."""
    loaded: Kernel = getattr(importlib.import_module(f"{__name__}.{name}"), _BACKENDS[name])()
    return loaded


def pick(name: str, q: Tensor, k: Tensor, spec: Spec) -> Kernel:
    """The kernel for these inputs and this spec: the one asked for, or for "auto" the fastest that
    can.

    Raises ValueError, with every candidate's reason, if none can or the name is unknown.
    """
    candidates = names() if name == "auto" else _ALIASES.get(name, (name,))
    if unknown := [n for n in candidates if n not in _BACKENDS]:
        expected = ["auto", *_ALIASES, *_BACKENDS]
        raise ValueError(f"unknown kernel flash={unknown[0]!r}; expected one of {expected}")
    reasons = []
    for candidate in map(load, candidates):
        reason = candidate.refuses(spec, q, k) or candidate.broken()
        if reason is None:
            if name == "auto":
                _announce(candidate.name, q.dtype, q.device.type)
            return candidate
        reasons.append(f"{candidate.name}: {reason}")
    detail = "; ".join(reasons) or "this version has no kernel of that family"
    raise ValueError(
        f"no kernel for flash={name!r}, {q.dtype}, head size {q.shape[-1]} on {q.device}: {detail}"
    )


def pick_biased(kernel: Kernel, q: Tensor, k: Tensor, spec: Spec) -> Kernel:
    """The kernel for calls with a `CallBias` beside one for those without: the same if it can, else
    the fastest.
    """
    biased = replace(spec, biased=True)
    return pick("auto", q, k, biased) if kernel.refuses(biased, q, k) else kernel


NO_BIAS = "it adds no bias to the scores"
NO_SOFTCAP = "it has no soft cap of the scores"
NOT_BOTH = "it does not cap scores that have a bias"


def refuses_half(
    spec: Spec,
    q: Tensor,
    capability: tuple[int, int],
    head_sizes: Collection[int],
    caps: bool = False,
) -> str | None:
    """Why a 16-bit kernel for NVIDIA GPUs of a compute capability and above, without biases, cannot
    do q, or None.

    `caps`: whether it knows a softcap.
    """
    if spec.biased:
        return NO_BIAS
    if spec.softcap is not None and not caps:
        return NO_SOFTCAP
    if q.device.type != "cuda":
        return f"inputs are on {q.device}, not on an NVIDIA GPU"
    if torch.cuda.get_device_capability(q.device) < capability:
        return (
            f"{torch.cuda.get_device_name(q.device)} is older than compute capability {capability}"
        )
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"inputs are {q.dtype}, not fp16 or bf16"
    if q.shape[-1] not in head_sizes:
        return f"head size {q.shape[-1]} is not one of {list(head_sizes)}"
    return None


@functools.cache
def installed(module: str) -> bool:
    """Whether a module, and each package that it is in, can be found; cached, since looking takes
    long.

    To look into a package is to import it; where that fails it is there, and to import the module
    says why it fails.
    """
    parts = module.split(".")
    parents = (".".join(parts[: i + 1]) for i in range(len(parts)))
    try:
        return all(importlib.util.find_spec(name) is not None for name in parents)
    except Exception:  # noqa: BLE001 - packages fail as they like
        return True


@functools.cache
def import_failure(package: str, load: Callable[[], Any]) -> str | None:
    """Why `load`, which imports what a kernel needs of a package, fails, or None. Cached, so that
    it is logged once.
    """
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
