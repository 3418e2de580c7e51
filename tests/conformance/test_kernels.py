"""The contract of `Kernel`, for each registered kernel, on each device and in each dtype that it
does not refuse.

Everything is compared with the reference in float64. Bounds are multiples of a dtype's rounding of
the terms that are added up, never of a result that may be zero.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bmt_burst import kernels
from bmt_burst.bias import kernels as bias_kernels
from bmt_burst.kernels import Kernel
from bmt_burst.kernels.reference import visible
from bmt_burst.sequence.tile import KernelCall
from bmt_burst.spec import Spec
from tests.cases import call_tensors, moved, named_calls, random_bias, random_call
from tests.reference import kernel_errors

CALLS = named_calls(5)
SPEC, CAPPED = Spec(scale=0.3), Spec(scale=0.3, softcap=1.5)
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HEADS = [(4, 4), (4, 2), (6, 1)]
INTERPRETED = (
    os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Subject(NamedTuple):
    """A kernel on a device and in a dtype; `head_size` is one that it takes."""

    name: str
    device: str
    dtype: torch.dtype
    head_size: int

    @property
    def kernel(self) -> Kernel:
        return kernels.load(self.name)

    @property
    def bound(self) -> float:
        return BOUNDS[self.dtype]

    @property
    def is_interpreted(self) -> bool:
        """Whether the kernel runs in Triton's interpreter, a hundred times slower."""
        return INTERPRETED and self.name == "triton" and self.device == "cpu"

    def tensors(
        self,
        call: KernelCall,
        heads: int = 4,
        kv_heads: int = 2,
        batch: int | None = None,
        seed: int = 0,
    ):
        """Return q, k, v and an output gradient, by default of two rows, or one if it is slow."""
        batch = batch or (1 if self.is_interpreted else 2)
        made = call_tensors(call, batch, heads, kv_heads, self.head_size, self.dtype, seed)
        return [x.to(self.device) for x in made]

    def refuses(self, spec: Spec, kv_heads: int = 2) -> str | None:
        if self.is_interpreted:  # it refuses tensors on CPUs unless it is asked directly
            return None if self.dtype == torch.float32 else "interpreted kernels are tested in fp32"
        shapes = ((1, 4, heads, self.head_size) for heads in (4, kv_heads))
        q, k = (torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        return self.kernel.refuses(spec, q, k) or self.kernel.broken()


def subjects() -> Iterator:
    """Yield what can run here, and a skipped entry with the reasons for each kernel that cannot."""
    for name in kernels.names():
        reasons, able = [], 0
        for device, dtype in itertools.product(DEVICES, BOUNDS):
            found = [Subject(name, device, dtype, size) for size in (8, 64)]
            refusals = [subject.refuses(SPEC) for subject in found]
            if None in refusals:
                able += 1
                subject = found[refusals.index(None)]
                marks = [pytest.mark.gpu] if device == "cuda" else []
                yield pytest.param(subject, id=f"{name}-{device}-{str(dtype)[6:]}", marks=marks)
            reasons += [reason for reason in refusals if reason]
        if not able:
            skip = pytest.mark.skip(reason=f"{name}: {reasons[0]}")
            yield pytest.param(None, id=name, marks=skip)


SUBJECTS = list(subjects())
each_subject = pytest.mark.parametrize("subject", SUBJECTS)


def calls_of(subject: Subject) -> dict[str, KernelCall]:
    """Return calls of every kind, fewer where they are slow."""
    few = "documents", "causal tiles of fewer keys"
    return {name: CALLS[name] for name in few} if subject.is_interpreted else CALLS


def assert_right(
    subject: Subject, call: KernelCall, tensors, spec: Spec, what: object, kernel=None, **options
) -> None:
    errors = kernel_errors(kernel or subject.kernel, call, tensors, spec, **options)
    assert max(errors.values()) < subject.bound, (what, errors)


@each_subject
def test_every_kind_of_call(subject):
    """Forward and backward, all head ratios, more than one row in the batch."""
    for number, (kind, call) in enumerate(calls_of(subject).items()):
        heads = HEADS[number % len(HEADS)]
        if subject.refuses(SPEC, heads[1]):
            continue
        assert_right(subject, call, subject.tensors(call, *heads), SPEC, (kind, heads))


@each_subject
def test_random_calls(subject):
    for seed in range(2 if subject.is_interpreted else 25):
        chance = random.Random(seed)
        call = random_call(chance)
        tensors = subject.tensors(call, *chance.choice(HEADS), batch=1, seed=seed)
        assert_right(subject, call, tensors, SPEC, (seed, call))


@each_subject
def test_calls_longer_than_a_block(subject):
    """Kernels work in blocks of up to 128 or 256 tokens: their borders must not show."""
    causal = KernelCall.whole(300, causal=True)
    cut = KernelCall(300, 290, (((3, 131), (5, 270)), ((131, 300), (270, 287))), 100, 7)
    for call in (cut,) if subject.is_interpreted else (causal, cut):
        assert_right(subject, call, subject.tensors(call, 2, 1, 1), SPEC, call)


@each_subject
def test_tokens_outside_of_tiles_are_never_read(subject):
    """They may hold anything that is finite: other documents, or padding."""
    call = KernelCall(12, 12, (((2, 6), (1, 5)), ((7, 10), (7, 12))), right=0)
    tensors = subject.tensors(call)
    clean = _results(subject, call, tensors)
    seen = visible(call, tensors[0].device)
    dirty = [x.clone() for x in tensors]
    for x, used in zip(dirty, (seen.any(1), seen.any(0), seen.any(0), seen.any(1)), strict=True):
        x[:, ~used] = 1e4
    for x, y in zip(_results(subject, call, dirty), clean, strict=True):
        assert _distance(x, y) <= subject.bound


@each_subject
def test_inputs_are_left_alone(subject):
    """No kernel writes to what it is given, or returns memory of it."""
    call = CALLS["documents"]
    tensors = subject.tensors(call)
    q, k, v, dout = tensors
    before = [x.clone() for x in tensors]
    out, lse = subject.kernel.forward(q, k, v, call, SPEC)
    kept = out.clone(), lse.clone()
    rounded = _as(out, q)
    grads = subject.kernel.backward(dout, q, k, v, rounded, lse, None, call, SPEC)
    assert all(x.equal(y) for x, y in zip((*tensors, out, lse), (*before, *kept), strict=True))
    given = {x.untyped_storage().data_ptr() for x in (*tensors, out, rounded, lse)}
    assert given.isdisjoint(x.untyped_storage().data_ptr() for x in grads)


@each_subject
def test_every_head_size(subject):
    """A kernel may compute heads in parts, or pad them: each size that it takes must be right."""
    call, done = CALLS["a window of documents"], 0
    for size in (72, 256) if subject.is_interpreted else (16, 40, 64, 128, 192, 256):
        larger = subject._replace(head_size=size)
        if larger.refuses(SPEC) is None:
            assert_right(larger, call, larger.tensors(call), Spec(scale=size**-0.5), size)
            done += 1
    assert done, "it takes no other head size"


@each_subject
def test_calls_leave_each_other_alone(subject):
    """A call with another batch changes neither what was returned nor what is kept for the call."""
    call = CALLS["documents"]
    before = _results(subject, call, subject.tensors(call))
    kept = [x.clone() for x in before]
    assert_right(subject, call, subject.tensors(call, batch=3, seed=1), SPEC, "a larger batch")
    if not subject.is_interpreted:  # which takes seconds
        assert_right(subject, call, subject.tensors(call, seed=2), SPEC, "other values")
    assert all(x.equal(y) for x, y in zip(before, kept, strict=True))


@each_subject
def test_any_strides(subject):
    """The ring hands over slices of tokens and of heads."""
    call = CALLS["a window of documents"]
    tensors = subject.tensors(call)
    expected = _results(subject, call, tensors)
    padded = [torch.nn.functional.pad(x, (0, 0, 1, 2, 3, 4))[:, 3:-4, 1:-2] for x in tensors]
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    for strided in (heads_first,) if subject.is_interpreted else (padded, heads_first):
        for x, y in zip(_results(subject, call, strided), expected, strict=True):
            assert _distance(x, y) <= subject.bound


@each_subject
def test_a_call_may_be_a_share_of_all_keys(subject):
    """The backward of half of the keys gets lse and out over all. The halves' gradients add up."""
    whole = KernelCall.whole(24, causal=True)
    q, k, v, dout = subject.tensors(whole)
    exact = [x.double() for x in (q, k, v, dout)]
    reference = kernels.load("reference")
    out, lse = reference.forward(*exact[:3], whole, SPEC)
    expected = reference.backward(exact[3], *exact[:3], out, lse, None, whole, SPEC)
    wide = torch.float64 if subject.dtype == torch.float64 else torch.float32
    total = [torch.zeros_like(x) for x in exact[:3]]
    for keys, part in (
        (slice(0, 10), KernelCall(24, 10, (((0, 10), (0, 10)),), right=0)),
        (slice(0, 10), KernelCall(24, 10, (((10, 24), (0, 10)),))),  # later queries see all
        (slice(10, 24), KernelCall(24, 14, (((10, 24), (0, 14)),), right=0)),
    ):
        given = dout, q, k[:, keys], v[:, keys], out.to(q.dtype), lse.to(wide)
        grads = subject.kernel.backward(*given, None, part, SPEC)
        for sum_, rows, grad in zip(total, (slice(None), keys, keys), grads, strict=True):
            sum_[:, rows] += grad.double()
    for mine, theirs in zip(total, expected, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < subject.bound


@each_subject
def test_out_matters_only_through_delta(subject):
    """Any tensor with the same rowsum(out * dout) must do, of any strides: rings send delta."""
    call = CALLS["documents"]
    q, k, v, dout = subject.tensors(call)
    out, lse = subject.kernel.forward(q, k, v, call, SPEC)
    out = _as(out, q)
    delta = (out.double() * dout.double()).sum(-1)
    other = (delta / dout.double().square().sum(-1)).unsqueeze(-1) * dout.double()
    other = other.transpose(1, 2).contiguous().transpose(1, 2)
    expected = subject.kernel.backward(dout, q, k, v, out, lse, None, call, SPEC)
    for mine, theirs in zip(
        subject.kernel.backward(dout, q, k, v, other.to(q.dtype), lse, None, call, SPEC),
        expected,
        strict=True,
    ):
        assert _distance(mine, theirs) < 4 * subject.bound  # the other out is rounded, too
    assert_right(subject, call, [q, k, v, dout], SPEC, call, with_delta=True)


@each_subject
def test_large_scores_do_not_overflow(subject):
    """Scores of some thousands: exponents are taken relative to the largest."""
    call = KernelCall.whole(17, causal=True)
    q, k, v, _ = subject.tensors(call)
    q, k = q * 60, k * 60
    out, lse = subject.kernel.forward(q, k, v, call, SPEC)
    exact, exact_lse = kernels.load("reference").forward(
        q.double(), k.double(), v.double(), call, SPEC
    )
    assert exact_lse.max() > 1000
    assert _distance(lse, exact_lse) < subject.bound
    # scores of 1,000 are rounded at 1e-4 in fp32
    assert _distance(out, exact) < 100 * subject.bound


@each_subject
def test_a_query_that_is_not_finite_is_nan_and_no_other(subject):
    call = CALLS["documents"]
    q, k, v, _ = subject.tensors(call)
    at = int(visible(call).any(1).nonzero()[-1])
    q[0, at, 0, 3] = torch.nan
    out, lse = subject.kernel.forward(q, k, v, call, SPEC)
    lost = torch.zeros_like(out, dtype=torch.bool)
    lost[0, at, 0] = True
    assert out.isnan().equal(lost)
    rows = lost[..., 0].transpose(1, 2)
    assert not lse[rows].isfinite().any()  # NaN, or -inf as FlashAttention 4 has it
    assert not lse[~rows].isnan().any()


@each_subject
def test_deterministic_results_are_equal_bit_for_bit(subject):
    spec = Spec(scale=0.3, deterministic=True)
    if reason := subject.refuses(spec):
        pytest.skip(reason)
    call = CALLS["a window of documents"]
    tensors = subject.tensors(call)
    first = _results(subject, call, tensors, spec)
    for _ in range(1 if subject.is_interpreted else 2):
        again = _results(subject, call, tensors, spec)
        assert all(x.equal(y) for x, y in zip(again, first, strict=True))


@each_subject
def test_a_softcap_is_applied_or_refused(subject):
    if reason := subject.refuses(CAPPED):
        assert "soft cap" in reason or "softcap" in reason, reason
        return
    for kind in list(calls_of(subject))[:6]:
        assert_right(subject, CALLS[kind], subject.tensors(CALLS[kind]), CAPPED, kind)


@each_subject
def test_a_bias_is_added_or_refused(subject):
    if subject.name not in bias_kernels.names():
        pytest.skip(f"{subject.name} has no kernel with a bias")
    kernel = bias_kernels.load(subject.name)
    q, k, *_ = subject.tensors(CALLS["full"], 4, 4)
    if not subject.is_interpreted and (reason := kernel.refuses(SPEC, q, k)):
        assert "bias" in reason, reason
        return
    for number, kind in enumerate(list(calls_of(subject))[:6]):
        call = CALLS[kind]
        dtype = torch.float64 if subject.dtype == torch.float64 else torch.float32
        bias = moved(random_bias(call, 4, number, dtype), subject.device)
        tensors = subject.tensors(call, 4, 4)
        assert_right(subject, call, tensors, SPEC, kind, kernel=kernel, bias=bias)


@pytest.mark.parametrize("name", kernels.names())
def test_no_kernel_takes_what_has_no_meaning(name):
    q = torch.empty(1, 4, 2, 64)
    assert kernels.load(name).refuses(SPEC, q.to("meta"), q.to("meta"))


def test_the_registry_names_each_kernel_as_it_names_itself():
    assert [kernels.load(name).name for name in kernels.names()] == kernels.names()


def _as(out: Tensor, q: Tensor) -> Tensor:
    """Return out as a strategy hands it to a backward: in q's dtype, in memory of its own."""
    return out.to(q.dtype, copy=True)


def _results(subject: Subject, call: KernelCall, tensors, spec: Spec = SPEC) -> list[Tensor]:
    q, k, v, dout = tensors
    out, lse = subject.kernel.forward(q, k, v, call, spec)
    return [out, lse, *subject.kernel.backward(dout, q, k, v, _as(out, q), lse, None, call, spec)]


def _distance(x: Tensor, y: Tensor) -> float:
    """Return the largest difference over y's largest entry, or inf where one alone is finite."""
    x, y = x.double(), y.double()
    if not x.isfinite().equal(y.isfinite()):
        return torch.inf
    finite = y.isfinite()
    if not finite.any():
        return 0.0
    return float((x - y)[finite].abs().max() / y[finite].abs().max())
