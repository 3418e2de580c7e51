"""Step 2 of 3: ring attention of one head, without overlap.

    python examples/plain_ring.py

Each rank keeps its queries, q (S, D). Each block of keys and values visits all ranks in `size`
hops. In the backward, its gradients travel with it. `mask` (S, all tokens) is True where a query
attends to a key. Next: examples/overlapped_ring.py.
"""

import sys
from pathlib import Path

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from examples.dense import compare_with_dense
from examples.exchange import pass_on


def scores(ring, hop, q, k, mask):
    visible = mask.chunk(ring.size, 1)[(ring.rank - hop) % ring.size]  # the block's owner
    return (q @ k.T / q.shape[1] ** 0.5).masked_fill(~visible, -torch.inf)


def forward(ring, q, k, v, mask):
    out, lse = torch.zeros_like(q), torch.full_like(q[:, :1], -torch.inf)
    for hop in range(ring.size):
        s = scores(ring, hop, q, k, mask)
        total = torch.logaddexp(lse, s.logsumexp(1, keepdim=True))
        out = out * (lse - total).exp() + (s - total).exp() @ v
        lse = total
        k, v = pass_on(ring, k, v)
    return out, lse


def backward(ring, q, k, v, mask, out, lse, dout):
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    delta = (out * dout).sum(1, keepdim=True)
    for hop in range(ring.size):
        p = (scores(ring, hop, q, k, mask) - lse).exp()
        ds = p * (dout @ v.T - delta) / q.shape[1] ** 0.5
        dq, dk, dv = dq + ds @ k, dk + ds.T @ q, dv + p.T @ dout
        k, v, dk, dv = pass_on(ring, k, v, dk, dv)
    return dq, dk, dv  # all blocks are back at their owners


def work(ring, q, k, v, mask, dout):  # what each rank does, with its part of each tensor
    out, lse = forward(ring, q, k, v, mask)
    return out, *backward(ring, q, k, v, mask, out, lse, dout)


if __name__ == "__main__":
    compare_with_dense(work)
