"""Measures the constants by which "auto" predicts the speed of strategies.

    python -m bmt_burst.doctor --measure      on the GPUs of this host, in processes of its own

All ranks of a group call `measure`. Kernels are timed with two lengths: that tells the visible
pairs from what each query costs. Bytes are timed by an exchange of strategy "one-call". Host times
follow from three strategies with different numbers of kernel calls and deliveries.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from . import Layout, Mask, SequenceParallel, burst_attn_func
from .kernels import pick
from .ranks.rings import make_rings
from .spec import Spec
from .strategies import Problem, Sizes
from .strategies.machine import Machine, Rates
from .strategies.one_call import OneCallPlan
from .strategies.ring import RingPlan
from .transport import ALONE

_ROUNDS = 5
_CALLS = 8  # in a row
_SHORT = 256  # tokens of a call that takes the host longer than the device
_LEAST = 1e-7  # seconds: differences of noisy times may be negative
# Kernel calls, forward and backward, and deliveries in the host time of small causal calls over two
# or more ranks. Ulysses also unloads what returns, which counts as a delivery.
_ONE_CALL, _ULYSSES = (2, 3), (2, 6)


def measure(sp: SequenceParallel, device: torch.device, tokens: int, heads: int = 16) -> Machine:
    """Measure this machine's constants. Every rank of `sp`, two at least, must call it.

    tokens  a length for which kernels run at their full speed
    heads   the number of heads of size 128

    Constants are those of this rank. The rate between hosts is not measured.
    """
    if sp.size < 2:
        raise ValueError(f"expected at least two ranks, got {sp.size}")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = [tokens // 4, tokens]
    times = [_time_kernel(device, dtype, size, heads) for size in sizes]
    rates = [_fit(sizes, [t[way] for t in times], heads) for way in (0, 1)]
    (operations, keys), (backward, _) = rates
    sample = _random(device, dtype, 256, heads)
    return Machine(
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        kernel=pick("auto", sample, sample, Spec(128**-0.5)).name,
        rates=Rates(
            operations=operations,
            bytes=_measure_bytes(sp, device, dtype, tokens, heads),
            backward_operations=2.5 * backward,
            call_keys=keys,
        ),
        **_measure_host(sp, device, dtype),
    )


def _random(device: torch.device, dtype: torch.dtype, tokens: int, heads: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    shape = 1, tokens, heads, 128
    return torch.randn(shape, device=device, dtype=dtype, generator=generator).requires_grad_()


def _median(device: torch.device, work: Callable[[], object], waits: bool = True) -> float:
    """Return the median seconds of `work`, of rounds of several calls. Without `waits`, what the
    device has still to do does not count.
    """

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    found = []
    for _ in range(_ROUNDS):
        wait()
        start = time.perf_counter()
        for _ in range(_CALLS):
            work()
        if waits:
            wait()
        found.append((time.perf_counter() - start) / _CALLS)
        wait()
    return statistics.median(found)


def _time_kernel(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: int
) -> tuple[float, float]:
    """Return the seconds of a causal forward and of its backward on one rank."""
    q, k, v = (_random(device, dtype, tokens, heads) for _ in range(3))
    dout = torch.ones_like(q)

    def forward() -> Tensor:
        return burst_attn_func(q, k, v, causal=True, process_group=ALONE)

    alone = _median(device, forward)
    both = _median(device, lambda: torch.autograd.grad(forward(), (q, k, v), dout))
    return alone, max(both - alone, _LEAST)


def _fit(tokens: list[int], seconds: list[float], heads: int) -> tuple[float, float]:
    """Return the operations of a forward's pairs in a second, and how many pairs cost as much as a
    query, from causal calls of two lengths.
    """
    (a, b), (s, t) = tokens, seconds
    # seconds = (n (n + 1) / 2 + keys n) / rate
    per_query = [s / a, t / b]
    rate = (b - a) / 2 / max(per_query[1] - per_query[0], _LEAST / b)
    keys = max(per_query[0] * rate - (a + 1) / 2, 0.0)
    return 4 * heads * 128 * rate, keys


def _measure_bytes(
    sp: SequenceParallel, device: torch.device, dtype: torch.dtype, tokens: int, heads: int
) -> float:
    """Return the bytes that a rank receives in a second."""
    k, v = (_random(device, dtype, tokens, heads).detach() for _ in range(2))
    plan, rings = OneCallPlan(_problem(sp, k), sp.rank), make_rings(sp.process_group, (None, None))
    plan.reserve(rings, device, with_backward=False)

    def gather() -> None:
        with plan.gather_keys(rings, k, v):
            pass

    return 2 * k.nbytes * (sp.size - 1) / _median(device, gather)


def _measure_host(
    sp: SequenceParallel, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Return the host times of a machine, from those of calls that are short on the device."""
    q, k, v = (_random(device, dtype, _SHORT, 4) for _ in range(3))
    mask, dout = Mask.causal(_SHORT * sp.size), torch.ones_like(q)

    def time_host(strategy: str) -> float:
        def both() -> None:
            out = burst_attn_func(
                q,
                k,
                v,
                mask=mask,
                layout="zigzag",
                strategy=strategy,
                process_group=sp.process_group,
            )
            torch.autograd.grad(out, (q, k, v), dout)

        return _median(device, both, waits=False)

    ring, one_call, ulysses = map(time_host, ("ring", "one-call", "ulysses"))
    problem = _problem(sp, q, Layout.zigzag(mask.seq_len, sp.size), mask)
    programs = RingPlan(problem, sp.rank).timelines()
    calls, deliveries = sum(t.calls for t in programs), sum(t.deliveries for t in programs)
    per_delivery = max((ulysses - one_call) / (_ULYSSES[1] - _ONE_CALL[1]), _LEAST)
    more = ring - one_call - (deliveries - _ONE_CALL[1]) * per_delivery
    per_call = max(2 * more / (calls - _ONE_CALL[0]), _LEAST)
    step = one_call - per_call - _ONE_CALL[1] * per_delivery
    return {
        "step_seconds": max(step, _LEAST),
        "call_seconds": per_call,
        "delivery_seconds": per_delivery,
    }


def _problem(
    sp: SequenceParallel, x: Tensor, layout: Layout | None = None, mask: Mask | None = None
) -> Problem:
    """Return the problem in which each rank has q, k and v like x; without a mask, a full one."""
    tokens, heads, size = x.shape[1:]
    spec = Spec(size**-0.5)
    kernel = pick("auto", x, x, spec)
    partial = kernel.partial_dtype(x.dtype)
    return Problem(
        mask=mask or Mask.full(tokens * sp.size),
        layout=layout or Layout.contiguous(tokens * sp.size, sp.size),
        spec=spec,
        kernel=kernel,
        sizes=Sizes(1, heads, heads, size, x.dtype, partial),
        inner=sp.size,
        outer=1,
    )
