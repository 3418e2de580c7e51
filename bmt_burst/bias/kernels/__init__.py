"""Kernels with a bias: attention of one call, with a row of a table added to each pair's score.

`TableKernel` is the contract, `reference` its specification.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ... import kernels
from ...base.registry import Registry
from ...kernels import Kernel
from ...sequence.tile import KernelCall
from ...spec import Spec
from ..call_bias import CallBias

# Each has the name of the same kernel without a bias. The fastest first.
_BACKENDS: Registry[TableKernel] = Registry(
    __name__,
    {
        "fa4": "fa4:Fa4TableKernel",
        "triton": "triton:TritonTableKernel",
        "reference": "reference:ReferenceTableKernel",
    },
)
load, names = _BACKENDS.load, _BACKENDS.names


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

        dtable is the sum of dS for each row and head, over B and the visible pairs with that row.
        """


def pick(kernel: Kernel, q: Tensor, k: Tensor, spec: Spec) -> TableKernel:
    """Return the kernel for pairs with a bias: `kernel`, which computes those without, or else the
    fastest that can. Raises ValueError with every candidate's reason if none can.
    """

    def refuses(x: TableKernel) -> str | None:
        return x.refuses(spec, q, k) or kernels.load(x.name).broken()

    candidates = sorted(names(), key=lambda name: name != kernel.name)  # the same one first
    return load(_BACKENDS.first(candidates, q, refuses, "kernel with a bias for"))
