"""The kernels' suite itself: it passes a right kernel and finds each of many subtle errors in a
wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bmt_burst import kernels
from bmt_burst.kernels.reference import ReferenceKernel
from bmt_burst.sequence.span import length
from tests.conformance import test_kernels as suite

RIGHT = ReferenceKernel()
CHECKS = [
    check
    for name, check in vars(suite).items()
    # the check of a bias would skip a kernel that has none, and the test with it
    if name.startswith("test_") and "registry" not in name and "bias" not in name
]
SUBJECTS = [suite.Subject("faulty", "cpu", dtype, 8) for dtype in (torch.float64, torch.float32)]


class Faulty(ReferenceKernel):
    """The reference, with an error: `after_forward` and `after_backward` change what it returns."""

    def __init__(
        self,
        before: Callable | None = None,
        forward: Callable | None = None,
        backward: Callable | None = None,
    ):
        self.before, self.after_forward, self.after_backward = before, forward, backward

    def forward(self, q, k, v, call, spec):
        call, spec = self.before(call, spec) if self.before else (call, spec)
        result = super().forward(q, k, v, call, spec)
        return self.after_forward(*result, q) if self.after_forward else result

    def backward(self, dout, q, k, v, out, lse, delta, call, spec):
        changed = self.before(call, spec) if self.before else (call, spec)
        result = super().backward(dout, q, k, v, out, lse, delta, *changed)
        if self.after_backward:
            result = self.after_backward(self, result, dout, q, k, v, out, lse, delta, call, spec)
        return result


def own_lse(self, result, dout, q, k, v, out, lse, delta, call, spec):
    """Use the lse of the call alone, as if it had all keys."""
    own = RIGHT.forward(q, k, v, call, spec)[1]
    return RIGHT.backward(dout, q, k, v, out, own, delta, call, spec)


def repeated_heads(self, result, dout, q, k, v, out, lse, delta, call, spec):
    """Give the gradients of kv heads to the wrong ones: h % G, not h // (H // G)."""
    dq, dk, dv = result
    return dq, dk.flip(2), dv


def no_tanh(self, result, dout, q, k, v, out, lse, delta, call, spec):
    """Forget the derivative of the soft cap."""
    if spec.softcap is None:
        return result
    dq, *others = result
    return dq * 1.01, *others


def aligned_to_the_first_key(call, spec):
    if call.right is None or len(call.tiles) > 1:
        return call, spec
    [(queries, keys)] = call.tiles
    return replace(call, right=call.right + length(keys) - length(queries), prepared={}), spec


def overwritten_inputs(out, lse, q):
    q.mul_(1.0000001)
    return out, lse


BUFFERS: dict[tuple[int, ...], torch.Tensor] = {}


def reused_memory(out, lse, q):
    """Return the out of each call in the same memory."""
    buffer = BUFFERS.setdefault((*out.shape, out.dtype.itemsize), torch.empty_like(out))
    return buffer.copy_(out), lse


def cached_delta(self, result, dout, q, k, v, out, lse, delta, call, spec):
    """Keep for a call what depends on its tensors."""
    delta = (out.to(lse.dtype) * dout).sum(-1).transpose(1, 2) if delta is None else delta
    known = call.prepared.setdefault(("delta", delta.dtype), delta)
    known = known if known.shape == delta.shape else delta
    return RIGHT.backward(dout, q, k, v, None, lse, known, call, spec)


def first_columns(self, result, dout, q, k, v, out, lse, delta, call, spec):
    """Compute 64 entries of a head at most."""
    for grad in result[:3]:
        grad[..., 64:] = 0
    return result


FAULTS = {
    "lse is NaN where it must be -inf": Faulty(
        forward=lambda out, lse, q: (out, lse.nan_to_num(neginf=torch.nan))
    ),
    "lse is finite where it must be -inf": Faulty(
        forward=lambda out, lse, q: (out, lse.clamp_min(-1e30))
    ),
    "lse is in base 2": Faulty(forward=lambda out, lse, q: (out, lse / math.log(2))),
    "lse is fp32 always": Faulty(forward=lambda out, lse, q: (out, lse.float().to(lse.dtype))),
    "out is NaN where nothing is seen": Faulty(
        forward=lambda out, lse, q: (
            out.masked_fill((lse == -torch.inf).transpose(1, 2).unsqueeze(-1), torch.nan),
            lse,
        )
    ),
    "an infinite lse hides a NaN": Faulty(forward=lambda out, lse, q: (out.nan_to_num(), lse)),
    "the inputs are overwritten": Faulty(forward=overwritten_inputs),
    "a window is one too wide": Faulty(
        lambda call, spec: (
            replace(call, left=None if call.left is None else call.left + 1, prepared={}),
            spec,
        )
    ),
    "causal is aligned to the first key": Faulty(aligned_to_the_first_key),
    "only the first tile is computed": Faulty(
        lambda call, spec: (replace(call, tiles=call.tiles[:1], prepared={}), spec)
    ),
    "the scale is 1 / sqrt(D)": Faulty(lambda call, spec: (call, replace(spec, scale=8**-0.5))),
    "the soft cap is ignored": Faulty(lambda call, spec: (call, replace(spec, softcap=None))),
    "the soft cap has no derivative": Faulty(backward=no_tanh),
    "the backward uses the call's own lse": Faulty(backward=own_lse),
    "gradients go to the wrong kv head": Faulty(backward=repeated_heads),
    "dk lacks the scale": Faulty(backward=lambda self, r, *given: (r[0], r[1] / 0.3, *r[2:])),
    "a gradient is in memory of the inputs": Faulty(
        backward=lambda self, r, dout, q, *given: (q.copy_(r[0]), *r[1:])
    ),
    "outputs share memory": Faulty(forward=reused_memory),
    "a call keeps what depends on its tensors": Faulty(backward=cached_delta),
    "heads above 64 are cut": Faulty(backward=first_columns),
    "results vary between runs": Faulty(
        backward=lambda self, r, *given: (r[0] + 1e-15 * torch.rand(()), *r[1:])
    ),
}


def first_to_fail(kernel: ReferenceKernel, monkeypatch) -> str | None:
    """Return the name of the first check that fails for a kernel, or None."""
    load = kernels.load
    monkeypatch.setattr(kernels, "load", lambda name: kernel if name == "faulty" else load(name))
    for check in CHECKS:
        for argument in ["faulty"] if "meaning" in check.__name__ else SUBJECTS:
            try:
                check(argument)
            except AssertionError:
                return check.__name__
    return None


def test_a_right_kernel_passes(monkeypatch):
    assert first_to_fail(Faulty(), monkeypatch) is None


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_is_found(fault, monkeypatch):
    assert first_to_fail(FAULTS[fault], monkeypatch)
