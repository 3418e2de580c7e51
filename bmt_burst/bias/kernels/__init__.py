"""Kernels with a bias: attention of one call, with a row of a table added to each pair's score.

`TableKernel` is the contract, `reference` its specification.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod

from torch import Tensor

from ... import kernels
from ...kernels import Kernel
from ...sequence.tile import KernelCall
from ...spec import Spec
from ..call_bias import CallBias

# Name of a kernel -> class of the same kernel with a bias, the fastest first.
_BACKENDS = {
    "fa4": "Fa4TableKernel",
    "triton": "TritonTableKernel",
    "reference": "ReferenceTableKernel",
}


class TableKernel(ABC):
    """Attention as a `Kernel` computes it, with a `CallBias`.

    Attributes and methods are those of `Kernel`. scores = scale q k^T + table[row of the pair,
    head], never with a softcap: `Bias.bind` refuses both.
    """

    name: str
    writes_new_memory: bool = False

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        """Return why this kernel cannot compute such inputs with a bias, or None if it can."""
        return kernels.load(self.name).refuses(spec, q, k)

    def broken(self) -> str | None:
        """Return why the package that it needs is installed but does not work, or None."""
        return kernels.load(self.name).broken()

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, spec: Spec, bias: CallBias
    ) -> tuple[Tensor, Tensor]:
        """Compute out (B, S, H, D) and lse (B, H, S)."""

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
        bias: CallBias,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute this call's share of dq, dk, dv, and of dtable (R, H) in the table's dtype.

        All kernels accept delta = rowsum(out * dout) instead of out.

        dtable is the sum of dS for each row and head, over the visible pairs with that row and over
        B.
        """


@functools.cache
def load(name: str) -> TableKernel:
    """Import and return the kernel called `name`."""
    module = importlib.import_module(f"{__name__}.{name}")
    loaded: TableKernel = getattr(module, _BACKENDS[name])()
    return loaded


def pick(kernel: Kernel, q: Tensor, k: Tensor, spec: Spec) -> TableKernel:
    """Return the kernel for pairs with a bias, where `kernel` computes those without.

    It is the same kernel if that knows biases, otherwise the fastest that does. Raises ValueError
    with every candidate's reason if none can.
    """
    candidates = sorted(_BACKENDS, key=lambda name: name != kernel.name)  # the same one first
    reasons = []
    for candidate in map(load, candidates):
        reason = candidate.refuses(spec, q, k) or candidate.broken()
        if reason is None:
            return candidate
        reasons.append(f"{candidate.name}: {reason}")
    raise ValueError(
        f"no kernel with a bias for {q.dtype}, head size {q.shape[-1]} on {q.device}: "
        f"{'; '.join(reasons)}"
    )
