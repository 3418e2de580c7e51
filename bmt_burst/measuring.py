"""Measures the constants by which "auto" predicts the speed of strategies.

    python -m bmt_burst.doctor --measure      on the GPUs of this host, in processes of its own

All ranks of a group call `measure`. Kernels are timed with two lengths: that tells the visible
pairs from what each query costs. Both lengths must take the GPU longer than the host. Bytes are
timed by an exchange of strategy "one-call", messages by deliveries with one and with many. The
other host times follow from three strategies, whose plans say how many kernel calls, deliveries and
messages they have.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import Layout, Mask, SequenceParallel, burst_attn_func
from .kernels import pick
from .ranks.rings import make_rings
from .spec import Spec
from .strategies import Problem, Sizes
from .strategies.machine import BACKWARD, HostWork, Machine, Rates
from .strategies.one_call import OneCallPlan
from .strategies.ring import RingPlan
from .strategies.ulysses import UlyssesPlan
from .transport import ALONE, Manifest
from .transport.packing import Packing

_ROUNDS = 5
_CALLS = 8  # in a row
_SHORT = 256  # tokens of a call that takes the host longer than the device
_MESSAGES = 64  # of a delivery
_MOST_HOST = 0.75  # of the seconds of a kernel call
# strategies whose host times tell those of a step, of calls and of deliveries
_PLANS = {"ring": RingPlan, "one-call": OneCallPlan, "ulysses": UlyssesPlan}


def measure(
    sp: SequenceParallel, device: torch.device, tokens: int, heads: int = 32
) -> Machine | None:
    """Measure this machine's constants, as rank 0 sees them. Return None on other ranks. Every rank
    of `sp`, two at least, must call it.

    tokens  four times a length for which kernels run at their full speed
    heads   the number of heads of size 128

    The rate between hosts is not measured.

    Raises RuntimeError on rank 0 if the times contradict each other, as on a machine that does
    other work, or if the host takes more than three quarters of a call that is to measure the GPU.
    """
    if sp.size < 2:
        raise ValueError(f"expected at least two ranks, got {sp.size}")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = [tokens // 4, tokens]
    times = [_time_kernel(device, dtype, size, heads) for size in sizes]
    gathering, nbytes = _measure_gathering(sp, device, dtype, tokens // 4, heads)
    message, steps, work = _measure_host(sp, device, dtype)
    if sp.rank:
        return None
    if device.type == "cuda":
        check_device_bound(gathering, "an exchange of keys")
        for size, ways in zip(sizes, times, strict=True):
            for way, call in zip(("forward", "backward"), ways, strict=True):
                check_device_bound(call, f"the {way} of {size} tokens")
    (operations, keys), (backward, _) = (
        fit_kernel(sizes, [call.seconds for call in calls], heads)
        for calls in zip(*times, strict=True)
    )
    sample = _random(device, dtype, 256, heads)
    return Machine(
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        kernel=pick("auto", sample, sample, Spec(128**-0.5)).name,
        rates=Rates(
            operations=operations,
            bytes=nbytes / gathering.seconds,
            backward_operations=BACKWARD * backward,
            call_keys=keys,
        ),
        **fit_host(message, steps, work),
    )


class Timed(NamedTuple):
    """The seconds of a call until the device is done, and until the host has enqueued it."""

    seconds: float
    host: float


def check_device_bound(call: Timed, what: str) -> None:
    """Raise RuntimeError if the host limits the speed of a call, so that nothing is known of the
    GPU's.
    """
    if call.host > _MOST_HOST * call.seconds:
        raise RuntimeError(
            f"expected {what} to take the GPU longer than the host, got {1e3 * call.seconds:.2f} "
            f"ms of which the host takes {1e3 * call.host:.2f}: measure again while the machine "
            "does nothing else"
        )


def fit_kernel(tokens: Sequence[int], seconds: Sequence[float], heads: int) -> tuple[float, float]:
    """Return the operations of a forward's pairs in a second, and how many pairs cost as much as a
    query, from causal calls of two lengths. Raises RuntimeError as `measure`.
    """
    (a, b), (s, t) = tokens, seconds
    # seconds = (n (n + 1) / 2 + keys n) / rate
    per_query = [s / a, t / b]
    more = _check_positive(per_query[1] - per_query[0], f"{b - a} more tokens")
    rate = (b - a) / 2 / more
    keys = max(per_query[0] * rate - (a + 1) / 2, 0.0)
    return 4 * heads * 128 * rate, keys


def fit_host(
    message: float, seconds: Sequence[float], work: Sequence[HostWork]
) -> dict[str, float]:
    """Return the host times of a Machine: that of a message, and those with which three kinds of
    `work` take these seconds. Raises RuntimeError as `measure`.
    """
    counts = [(1.0, w.calls / 2, float(w.deliveries)) for w in work]
    others = [t - w.messages * message for t, w in zip(seconds, work, strict=True)]
    step, call, delivery = torch.linalg.solve(
        torch.tensor(counts, dtype=torch.float64), torch.tensor(others, dtype=torch.float64)
    ).tolist()
    return {
        "step_seconds": _check_positive(step, "a forward and backward"),
        "call_seconds": _check_positive(call, "a kernel call"),
        "delivery_seconds": _check_positive(delivery, "a delivery"),
        "message_seconds": _check_positive(message, "a message"),
    }


def _check_positive(value: float, what: str) -> float:
    if value > 0:
        return value
    raise RuntimeError(
        f"expected {what} to take time, got {value:.1e} s as the difference of measured times: "
        "measure again while the machine does nothing else"
    )


def _random(device: torch.device, dtype: torch.dtype, tokens: int, heads: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    shape = 1, tokens, heads, 128
    return torch.randn(shape, device=device, dtype=dtype, generator=generator).requires_grad_()


def _medians(device: torch.device, works: Sequence[Callable[[], object]]) -> list[Timed]:
    """Return the median times of each work, of rounds of several calls in turns."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def time_round(work: Callable[[], object]) -> Timed:
        wait()
        start = time.perf_counter()
        for _ in range(_CALLS):
            work()
        enqueued = time.perf_counter()
        wait()
        return Timed((time.perf_counter() - start) / _CALLS, (enqueued - start) / _CALLS)

    for work in works:
        work()
    rounds = [[time_round(work) for work in works] for _ in range(_ROUNDS)]
    return [
        Timed(*map(statistics.median, zip(*found, strict=True)))
        for found in zip(*rounds, strict=True)
    ]


def _time_kernel(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: int
) -> tuple[Timed, Timed]:
    """Return the times of a causal forward and of its backward on one rank."""
    q, k, v = (_random(device, dtype, tokens, heads) for _ in range(3))
    dout = torch.ones_like(q)

    def forward() -> Tensor:
        return burst_attn_func(q, k, v, causal=True, process_group=ALONE)

    def both() -> object:
        return torch.autograd.grad(forward(), (q, k, v), dout)

    alone, whole = _medians(device, [forward, both])
    return alone, Timed(whole.seconds - alone.seconds, whole.host - alone.host)


def _measure_gathering(
    sp: SequenceParallel, device: torch.device, dtype: torch.dtype, tokens: int, heads: int
) -> tuple[Timed, int]:
    """Return the time in which all ranks gather all keys, and the bytes that each receives."""
    k, v = (_random(device, dtype, tokens, heads).detach() for _ in range(2))
    plan, rings = OneCallPlan(_problem(sp, k), sp.rank), make_rings(sp.process_group, (None, None))
    plan.reserve(rings, device, with_backward=False)

    def gather() -> None:
        with plan.gather_keys(rings, k, v):
            pass

    [timed] = _medians(device, [gather])
    return timed, 2 * k.nbytes * (sp.size - 1)


def _measure_host(
    sp: SequenceParallel, device: torch.device, dtype: torch.dtype
) -> tuple[float, list[float], list[HostWork]]:
    """Return the host time of a message, and those of three kinds of work: forwards and backwards
    that are short on the device.
    """
    q, k, v = (_random(device, dtype, _SHORT, 4) for _ in range(3))
    mask, dout = Mask.causal(_SHORT * sp.size), torch.ones_like(q)

    def both(strategy: str) -> object:
        out = burst_attn_func(
            q,
            k,
            v,
            mask=mask,
            layout="zigzag",
            strategy=strategy,
            process_group=sp.process_group,
        )
        return torch.autograd.grad(out, (q, k, v), dout)

    times = _medians(device, [functools.partial(both, name) for name in _PLANS])
    problem = _problem(sp, q, Layout.zigzag(mask.seq_len, sp.size), mask)
    work = [plan(problem, sp.rank).host_work() for plan in _PLANS.values()]
    return _measure_message(sp, device, dtype), [found.host for found in times], work


def _measure_message(sp: SequenceParallel, device: torch.device, dtype: torch.dtype) -> float:
    """Return the host time of each message of a delivery to the next rank."""
    tokens, place = 2 * _MESSAGES, sp.rank
    k = _random(device, dtype, tokens, 1).detach()
    packing = Packing(1, ((tuple(k.shape[2:]), dtype),))
    rings = make_rings(sp.process_group, (None, None))
    rings.reserve({"visit": packing.nbytes(tokens), "return": 0}, device)
    after, before = (place + 1) % sp.size, (place - 1) % sp.size

    def deliver(manifest: Manifest) -> None:
        delivery = rings.inner.deliver_manifest("visit", manifest, (k,), device)
        delivery.wait()
        delivery.release()

    def cut(count: int) -> Manifest:
        ends = [tokens * i // count for i in range(count + 1)]
        spans = list(itertools.pairwise(ends))
        return packing.manifest(
            tokens, [(before, x) for x in spans], [(after, x, x[0], tokens) for x in spans]
        )

    works = [functools.partial(deliver, cut(count)) for count in (1, _MESSAGES)]
    one, many = _medians(device, works)
    return (many.host - one.host) / (_MESSAGES - 1)


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
