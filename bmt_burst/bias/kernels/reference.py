"""The specification of all kernels with a bias: attention written out."""

from __future__ import annotations

from ...kernels.reference import ReferenceKernel
from . import TableKernel

_KERNEL = ReferenceKernel()


class ReferenceTableKernel(TableKernel):
    """Attention with a bias written out. It computes and returns fp32, or fp64 for fp64 inputs."""

    name = "reference"

    def forward(self, q, k, v, call, spec, bias):
        return _KERNEL.forward(q, k, v, call, spec, bias.table[bias.rows()])

    def backward(self, dout, q, k, v, out, lse, delta, call, spec, bias):
        added = bias.table[bias.rows()]
        *grads, dscores = _KERNEL.gradients(dout, q, k, v, out, lse, delta, call, spec, added)
        by_pairs = dscores.sum(0).flatten(1).T  # (B, H, S, T), 0 for hidden pairs
        total = by_pairs.new_zeros(bias.table.shape)
        # On GPUs index_put_ sorts and so sums in the same order each time. index_add_ does not.
        total.index_put_((bias.rows().flatten(),), by_pairs, accumulate=True)
        return *grads, total.to(bias.table.dtype)
