"""Dense attention, the reference for the rings of the other examples."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmt_burst import Transport, simulate

RANKS, TOKENS, HEAD_SIZE = 3, 12, 8


def compare_with_dense(work: Callable[..., tuple[Tensor, ...]]) -> None:
    """Run `work(ring, q, k, v, mask, dout)` on each rank, with its part of a causal sequence.

    Its results are out and, if it computes a backward, dq, dk, dv. Raises AssertionError if one
    differs from dense attention by more than rounding.
    """
    q, k, v, dout = torch.randn(4, TOKENS, HEAD_SIZE, dtype=torch.float64)
    mask = torch.ones(TOKENS, TOKENS).tril().bool()

    def run(ring: Transport) -> tuple[Tensor, ...]:
        parts = [x.chunk(ring.size)[ring.rank] for x in (q, k, v, mask, dout)]
        # k, v, dk and dv of a rank are the most that a rank receives at once
        ring.reserve({"visit": 4 * parts[1].nbytes, "return": 0}, q.device)
        return work(ring, *parts)

    found = [torch.cat(parts) for parts in zip(*simulate(RANKS, run), strict=True)]
    for x in (q, k, v):
        x.requires_grad_()
    out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
    expected = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    for name, ours, dense in zip(("out", "dq", "dk", "dv"), found, expected, strict=False):
        error = float((ours - dense).abs().max())
        assert error < 1e-12, f"{name} differs from dense attention by {error}"
        print(f"{name} equals dense attention: the largest difference is {error:.1e}")
