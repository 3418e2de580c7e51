"""Memory that attention takes in addition to its inputs, for lengths that no CPU computes.

Allocations have no values.

One rank runs alone over fake tensors; what would arrive from its peers has its size and nothing
else.
"""

import itertools
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmt_burst import burst_attn_func, calls, kernels
from bmt_burst.kernels import Kernel
from bmt_burst.merging import parts as plain
from bmt_burst.transport.imagined import ImaginedRing

GIB = 1 << 30


class Allocations(TorchDispatchMode):
    """Bytes of the storages that come into being while it is on: now, and at most."""

    def __init__(self, before):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in before}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.known:
                storage = x.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return results

    def gone(self, storage, nbytes):
        self.known.remove(storage)
        self.now -= nbytes


class Allocator(Kernel):
    """Allocates what FlashAttention-4 (4.0.0b36) does on Hopper, for lengths that its tiles
    divide.
    """

    name = "allocator"

    def refuses(self, spec, q, k):
        return None

    def partial_dtype(self, dtype):
        return dtype

    def forward(self, q, k, v, call, spec):
        return torch.empty_like(q), q.new_empty(
            q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32
        )

    def backward(self, dout, q, k, v, out, lse, delta, call, spec):
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        sums = [q, lse, lse] if q.shape[2] == k.shape[2] else [q, lse, lse, k, v]
        _held = [torch.empty_like(x, dtype=torch.float32) for x in sums]
        return grads


def address(x):
    """What tells where a FakeTensor lies, which has a storage but no memory."""
    return x.untyped_storage()._cdata, x.storage_offset()


def peak_extra_gib(monkeypatch, rank, tokens, heads, kv_heads, **options):
    """As bench/attention.py counts it: of a forward and backward, with what the transport holds."""
    monkeypatch.setattr(kernels, "load", lambda name: Allocator())
    for name in ("merge_outputs", "sum_gradients", "fill_lse_delta"):  # fused ones need no memory
        monkeypatch.setattr(plain, name, lambda *args: None)
    monkeypatch.setattr(torch.Tensor, "data_ptr", address)
    # refuses FakeTensors, which have no values
    monkeypatch.setattr(calls.inputs, "check_tensor", lambda name, x: None)
    with FakeTensorMode():
        q, dout = (torch.empty(1, tokens, heads, 128, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.empty(1, tokens, kv_heads, 128, dtype=torch.bfloat16) for _ in range(2))
        inputs, ring = [x.requires_grad_() for x in (q, k, v)], ImaginedRing(rank, 8)
        options = {"causal": True, "process_group": ring, "flash": "reference", **options}
        burst_attn_func(*inputs, **options)  # makes the plan
        with Allocations([*inputs, dout, *itertools.chain(*ring.slots.values())]) as allocations:
            torch.autograd.grad(burst_attn_func(*inputs, **options), inputs, dout)
    return (allocations.peak + ring.held_bytes) / GIB


@pytest.mark.parametrize(
    ("rank", "tokens", "kv_heads", "options", "limit"),
    [
        (0, 16384, 32, {}, 2.5),
        (3, 16384, 32, {"backward": "kv"}, 2.6),
        (7, 16384, 32, {"group_bytes": 128 << 20}, 1.94),
        # the benchmark's "low memory"; the official BurstAttention: 1.94
        (0, 16384, 32, {"group_bytes": 9 << 24}, 1.94),
        (3, 16384, 8, {}, 2.1),
        (7, 32768, 32, {}, 3.0),
        (3, 131072, 32, {"group_bytes": 9 << 24}, 6.6),
    ],
)
def test_peak_memory_on_8_gpus(monkeypatch, rank, tokens, kv_heads, options, limit):
    """128K tokens to a million over 8 ranks; 32 heads of 128."""
    assert peak_extra_gib(monkeypatch, rank, tokens, 32, kv_heads, **options) < limit
