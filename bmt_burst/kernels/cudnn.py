"""cuDNN's fused attention, called through torch.ops.aten.

It also works if torch.backends.cudnn.enabled is False, as BMTrain leaves it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.policies import seen_by_policies
from ..spec import Spec
from . import refuses_half
from .tile_by_tile import PlainKernel

_forward = seen_by_policies(torch.ops.aten._scaled_dot_product_cudnn_attention)
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


class CudnnKernel(PlainKernel):
    """cuDNN's attention, which does not support blocks of one key."""

    name = "cudnn"
    fewest_keys = 2

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        if spec.deterministic:
            return "its backward is not deterministic"
        # torch computes gradients with cuDNN up to these head sizes
        hopper = q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0)
        most = 256 if hopper and torch.backends.cudnn.version() >= 91000 else 128
        return refuses_half(spec, q, capability=(9, 0), head_sizes=range(8, most + 1, 8))

    def block_forward(self, q, k, v, causal, spec):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = _forward(q, k, v, None, True, 0.0, causal, False, scale=spec.scale)
        return out.transpose(1, 2), lse.squeeze(-1)

    def block_backward(self, dout, q, k, v, out, lse, causal, spec):
        sizes = None, None, q.shape[1], k.shape[1]
        # Torch keeps cuDNN's graphs by the strides of q, k and v. A call whose out and dout have
        # other strides than those of the first call with such a graph gets wrong gradients.
        dout, out = dout.contiguous(), out.contiguous()
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        lse = lse.contiguous().unsqueeze(-1)
        # dropout's RNG state
        unused = q.new_empty(1, dtype=torch.int64), q.new_empty(1, dtype=torch.int64)
        grads = _backward(
            dout, q, k, v, out, lse, *unused, None, *sizes, 0.0, causal, scale=spec.scale
        )
        return tuple(grad.transpose(1, 2) for grad in grads)
