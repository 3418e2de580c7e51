"""Step 1 of 3: an exchange. Each rank sends tensors to the next rank of a ring.

    python examples/exchange.py

`simulate` runs the ranks as threads of this process. Between processes the same code runs over
gloo, NCCL or copy engines. Next: examples/plain_ring.py.
"""

import sys
from pathlib import Path

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from bmt_burst import Transport, simulate
from bmt_burst.transport import Arrival, Delivery, Put


def start(ring: Transport, block: Tensor) -> Delivery:
    """Begin to send a block to the next rank, and to receive the previous rank's. Do not wait."""
    after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    sent = [Put(block, after, offset=0)]  # to the beginning of the next rank's memory
    expected = [Arrival(before, offset=0, nbytes=block.nbytes)]
    return ring.deliver("visit", block.nbytes, sent, expected, block.device)


def pass_on(ring: Transport, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Send tensors of one shape to the next rank. Return those of the previous rank."""
    block = torch.stack(tensors)
    delivery = start(ring, block)
    delivery.wait()
    received = delivery.memory.view(block.dtype).view(block.shape).clone()
    delivery.release()  # later deliveries may overwrite its memory, so the result is a copy
    return received.unbind()


def main() -> None:
    sent = torch.randn(4, 10)  # a row for each rank

    def work(ring: Transport) -> Tensor:  # what each rank does
        ring.reserve({"visit": sent[0].nbytes, "return": 0}, sent.device)
        return pass_on(ring, sent[ring.rank])[0]

    received = torch.stack(simulate(4, work))
    assert received.equal(sent.roll(1, 0)), "expected the row of the previous rank"
    print("each rank received what the previous one sent")


if __name__ == "__main__":
    main()
