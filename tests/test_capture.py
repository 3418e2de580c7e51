"""A CUDA graph cannot hold what the host does in a call: ranks refuse it before they begin."""

import pytest
import torch

from bmt_burst import Mask, burst_attn_func, simulate
from bmt_burst.base.streams import current_stream, send_to_device
from bmt_burst.transport import ALONE
from tests.cases import random_qkv


@pytest.fixture
def capturing(monkeypatch):
    """A switch that makes torch say that a graph is being captured, as on a GPU."""

    def switch(on):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: on, raising=False)

    return switch


def test_ranks_refuse_a_capture_and_go_on_after_it(capturing):
    q, k, v = random_qkv(1, 8, 2, 2, 16)[:3]

    def call(ring):
        return burst_attn_func(q, k, v, causal=True, process_group=ring)

    def work(ring):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="CUDA graph around a call of burst"):
                call(ring)

    capturing(True)
    simulate(2, work)
    capturing(False)
    assert all(out.isfinite().all() for out in simulate(2, call))


def test_a_backward_refuses_a_capture(capturing):
    tensors = [x.requires_grad_() for x in random_qkv(1, 8, 2, 2, 16)[:3]]

    def work(ring):
        out = burst_attn_func(*tensors, causal=True, process_group=ring)
        ring.messenger.gather(b"both are here")
        capturing(True)
        with pytest.raises(RuntimeError, match="around the backward of call 1"):
            torch.autograd.grad(out.sum(), tensors)
        ring.messenger.gather(b"both have raised")

    simulate(2, work)


def test_one_rank_may_capture_what_needs_no_tables(capturing):
    """Tables are refused where their memory is asked for, which CPUs never do."""
    capturing(True)
    q, k, v = random_qkv(1, 8, 2, 2, 16)[:3]
    out = burst_attn_func(q, k, v, mask=Mask.causal(8), process_group=ALONE)
    assert out.isfinite().all()
    gpu = torch.device("cuda", 0)
    for ask in (lambda: current_stream(gpu), lambda: send_to_device(torch.zeros(1), gpu)):
        with pytest.raises(RuntimeError, match="tables that are copied from host memory"):
            ask()
