"""Step 3 of 3: the forward of a ring that sends while it computes.

    python examples/overlapped_ring.py

    rank 0    compute kv0 | compute kv2 | compute kv1
              send    kv0 | send    kv2 |

A rank starts to send its block before it computes with it. Then it waits for the next block. So it
holds two blocks: it computes with one, which is also being sent, and it receives the other.
bmt_burst/strategies/ring also does this in the backward.
"""

import sys
from pathlib import Path

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from examples.dense import compare_with_dense
from examples.exchange import start
from examples.plain_ring import scores


def forward(ring, q, k, v, mask):
    out, lse = torch.zeros_like(q), torch.full_like(q[:, :1], -torch.inf)
    block, held = torch.stack((k, v)), None  # `held` is the delivery that owns the block
    for hop in range(ring.size):
        arriving = start(ring, block) if hop + 1 < ring.size else None
        s = scores(ring, hop, q, block[0], mask)
        total = torch.logaddexp(lse, s.logsumexp(1, keepdim=True))
        out = out * (lse - total).exp() + (s - total).exp() @ block[1]
        lse = total
        if arriving is not None:
            arriving.wait()
            arriving.wait_for_sends()  # the old block is sent, so its memory may be reused
            block = arriving.memory.view(block.dtype).view(block.shape)
        if held is not None:
            held.release()
        held = arriving
    return out, lse


def work(ring, q, k, v, mask, dout):
    return forward(ring, q, k, v, mask)[:1]


if __name__ == "__main__":
    compare_with_dense(work)
