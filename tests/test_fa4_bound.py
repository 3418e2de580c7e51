"""Kernels of flash-attn-4 that are called directly, with a package that is written out."""

from __future__ import annotations

import itertools
import random
import threading
from dataclasses import replace

import pytest
import torch

from bmt_burst import kernels
from bmt_burst.kernels import fa4, fa4_bound
from bmt_burst.kernels.fa4_programs import (
    AFTER,
    BACKWARD,
    BEFORE,
    FORWARD,
    VERSION,
    ForwardProgram,
)
from bmt_burst.sequence.tile import KernelCall
from bmt_burst.spec import Spec
from tests.fake_fa4 import Package
from tests.helpers import call_tensors, kernel_errors, named_calls, random_call

SPEC = Spec(scale=0.3)
SPEC_IN_ORDER, SPEC_WITH_CAP = replace(SPEC, deterministic=True), replace(SPEC, softcap=1.5)
ROUNDED = 1e-5  # fp32 rounds at 1e-7; sums have up to 1,000 terms
WHOLE = KernelCall.whole(12, causal=True)


@pytest.fixture
def package(monkeypatch):
    """A package whose kernels may be called directly on the CPU, and a process that has called
    none.
    """
    written = Package(monkeypatch)
    functions = written.functions[FORWARD], written.functions[BACKWARD]
    monkeypatch.setattr(fa4, "_functions", lambda: functions)
    monkeypatch.setattr(fa4_bound, "_refusal", lambda function, device: None)
    for name, empty in (("_kinds", {}), ("_trials", {}), ("_stopped", [])):
        monkeypatch.setattr(fa4_bound, name, empty)
    fa4_bound._say.cache_clear()
    return written


def tensors_of(call, batch=2, heads=4, kv_heads=2, seed=0):
    return call_tensors(call, batch, heads, kv_heads, 64, torch.float32, seed=seed)


def step(call, spec=SPEC, with_delta=False, seed=0, **sizes):
    """A forward and a backward."""
    q, k, v, dout = tensors_of(call, seed=seed, **sizes)
    kernel = kernels.load("fa4")
    out, lse = kernel.forward(q, k, v, call, spec)
    delta = (out * dout).sum(-1).transpose(1, 2) if with_delta else None
    grads = kernel.backward(dout, q, k, v, None if with_delta else out, lse, delta, call, spec)
    return [out, lse, *grads]


def said(caplog, level):
    return [x.getMessage() for x in caplog.records if x.levelname == level]


CALLS = named_calls(5)
for _kind in ("many tiles", "many full tiles"):  # 12 instead of 60
    CALLS[_kind] = replace(CALLS[_kind], q_tokens=38, kv_tokens=26, tiles=CALLS[_kind].tiles[:12])


def cases():
    """Yield each kind of calls with each spec, and with either of the other two choices."""
    choices = list(itertools.product([(4, 2), (2, 2)], [False, True]))
    for i, kind in enumerate(CALLS):
        for j, spec in enumerate((SPEC, SPEC_IN_ORDER, SPEC_WITH_CAP)):
            yield kind, spec, *choices[(i + j) % 4]


@pytest.mark.parametrize(("kind", "spec", "heads", "with_delta"), [*cases()])
def test_later_calls_of_a_kind_need_no_function(package, kind, spec, heads, with_delta):
    call = CALLS[kind]
    for seed in range(3):
        tensors = call_tensors(call, 2, *heads, 64, torch.float32, seed=seed)
        errors = kernel_errors(kernels.load("fa4"), call, tensors, spec, with_delta)
        assert max(errors.values()) < ROUNDED, errors
    assert not fa4_bound._stopped
    assert package.runs == {FORWARD: 1, BACKWARD: 1}


def test_packed_calls_of_other_sizes_are_of_one_kind(package):
    chance = random.Random(3)
    calls = [random_call(chance) for _ in range(60)]
    for seed, call in enumerate(calls):
        tensors = tensors_of(call, chance.choice((1, 2)), seed=seed)
        errors = kernel_errors(kernels.load("fa4"), call, tensors, SPEC, bool(seed % 2))
        assert max(errors.values()) < ROUNDED, (call, errors)
    assert not fa4_bound._stopped
    assert sum(package.runs.values()) < 60


@pytest.mark.parametrize("with_delta", [False, True])
def test_results_are_those_of_the_function(package, with_delta):
    calls = [WHOLE, CALLS["documents"]]
    for call in calls:
        step(call, with_delta=with_delta)
    for seed in (1, 2):
        own = [step(call, with_delta=with_delta, seed=seed) for call in calls]
        assert package.runs == {FORWARD: 2, BACKWARD: 2}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fa4_bound, "_refusal", lambda function, device: "not here")
            others = [step(call, with_delta=with_delta, seed=seed) for call in calls]
        package.runs.update({FORWARD: 2, BACKWARD: 2})
        for mine, other in zip(own, others, strict=True):
            for x, y in zip(mine, other, strict=True):
                assert x.equal(y)
                assert x.stride() == y.stride()


def test_inputs_that_require_gradients_or_are_parts_of_others(package):
    for seed in range(3):
        q, k, v, _ = tensors_of(WHOLE, seed=seed)
        whole = torch.cat((k, v), 2).requires_grad_()
        k, v = whole[:, :, :2], whole[:, :, 2:]
        out, _ = kernels.load("fa4").forward(q.requires_grad_(), k, v, WHOLE, SPEC)
        expected, _ = kernels.load("reference").forward(
            *(x.double() for x in (q, k, v)), WHOLE, SPEC
        )
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=ROUNDED)
    assert package.runs[FORWARD] == 1
    step(WHOLE)  # contiguous tensors are another kind
    assert package.runs[FORWARD] == 2


def test_a_tensor_that_the_package_would_copy(package):
    step(WHOLE)
    q, k, v, _ = tensors_of(WHOLE)
    moved = torch.cat((q.new_zeros(1), q.flatten()))[1:].view(q.shape)
    for _ in range(2):
        kernels.load("fa4").forward(moved, k, v, WHOLE, SPEC)
    assert package.runs[FORWARD] == 3


@pytest.mark.parametrize("size", ["_MOST_ENTRIES", "MOST_SEQUENCES"])
def test_large_calls_are_left_to_the_package(package, monkeypatch, size):
    monkeypatch.setattr(fa4_bound, size, 1)
    for _ in range(3):
        step(CALLS["documents"])
    assert package.runs == {FORWARD: 3, BACKWARD: 3}


def test_other_results_stop_the_programs(package, caplog):
    package.wrong = 1.0
    for _ in range(3):
        step(WHOLE)
    assert package.runs == {FORWARD: 3, BACKWARD: 3}
    [text] = said(caplog, "WARNING")
    assert text.endswith("its kernels gave other results when they were called directly")


@pytest.mark.parametrize("spec", [SPEC, SPEC_IN_ORDER])
def test_small_differences_of_a_backward(package, spec, monkeypatch, caplog):
    """A free order of sums rounds differently. A fixed one does not."""
    package.wrong = 1e-7
    q, k, v, dout = tensors_of(WHOLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "wrong", 0.0)
        out, lse = kernels.load("fa4").forward(q, k, v, WHOLE, spec)
    for _ in range(3):
        kernels.load("fa4").backward(dout, q, k, v, out, lse, None, WHOLE, spec)
    assert package.runs[BACKWARD] == (3 if spec.deterministic else 1)
    assert bool(said(caplog, "WARNING")) == spec.deterministic


def test_scratch_that_no_kernel_fills_is_noticed(package, monkeypatch, caplog):
    """The comparison runs in memory that holds NaN."""
    monkeypatch.setattr("tests.fake_fa4.fill_sum", lambda total: None)
    for _ in range(3):
        step(WHOLE)
    assert package.runs[BACKWARD] == 3
    assert len(said(caplog, "WARNING")) == 1


def test_kernels_with_more_arguments_are_not_called(package, caplog):
    caplog.set_level("INFO", "bmt_burst")
    package.more_arguments = (None,)
    for _ in range(3):
        step(WHOLE)
    assert package.runs == {FORWARD: 3, BACKWARD: 3}
    texts = said(caplog, "INFO")
    assert len(texts) == len(set(texts)) == 2
    assert all("their kernels are not called as expected: expected" in text for text in texts)


def test_a_kernel_that_fails_stops_the_programs(package, caplog):
    """The function has the last word."""
    for _ in range(2):
        step(WHOLE)
    assert package.runs == {FORWARD: 1, BACKWARD: 1}
    [kind] = [kind for key, kind in fa4_bound._kinds.items() if key[0] is ForwardProgram]
    object.__setattr__(kind.program, "kernel", lambda *arguments: 1 / 0)
    for _ in range(2):
        step(WHOLE)
    assert package.runs == {FORWARD: 3, BACKWARD: 3}
    [text] = said(caplog, "WARNING")
    assert "failed when they were called directly: ZeroDivisionError" in text


def test_a_gradient_of_zero_proves_nothing(package):
    q, k, v, dout = tensors_of(WHOLE)
    out, lse = kernels.load("fa4").forward(q, k, v, WHOLE, SPEC)

    def backward(dout):
        kernels.load("fa4").backward(dout, q, k, v, out, lse, None, WHOLE, SPEC)
        return package.runs[BACKWARD]

    assert [backward(dout * 0) for _ in range(3)] == [1, 2, 3]
    assert [backward(dout) for _ in range(3)] == [4, 4, 4]


def test_a_kind_without_clear_results(package, caplog):
    caplog.set_level("INFO", "bmt_burst")
    call = KernelCall.whole(12)
    q, k, v, dout = tensors_of(call)
    out, lse = kernels.load("fa4").forward(q, k, v, call, SPEC)
    for _ in range(12):
        kernels.load("fa4").backward(dout * 0, q, k, v, out, lse, None, call, SPEC)
    assert package.runs[BACKWARD] == 12
    assert package.launches[BACKWARD] == 12 + fa4_bound._TRIES
    assert len(said(caplog, "INFO")) == 1


def test_an_answer_that_the_gpu_has_not_given(package, monkeypatch):
    """The function computes meanwhile, and the host does not wait."""

    class Event:
        done = False

        def query(self):
            return self.done

    def ask(trial, answer):
        take(trial, answer)
        trial._ready = event

    event, take = Event(), fa4_bound.Trial.ask
    monkeypatch.setattr(fa4_bound.Trial, "ask", ask)
    for _ in range(3):
        step(WHOLE)
    assert package.runs == {FORWARD: 3, BACKWARD: 3}
    assert package.launches == {FORWARD: 4, BEFORE: 4, BACKWARD: 4, AFTER: 12}
    event.done = True
    step(WHOLE)
    assert package.runs == {FORWARD: 3, BACKWARD: 3}


def test_few_kinds_are_kept(package, monkeypatch):
    monkeypatch.setattr(fa4_bound, "_MOST_KINDS", 2)
    calls = [KernelCall.whole(size) for size in (9, 10, 11)]
    for call in (*calls, calls[-1]):
        step(call)
    assert len(fa4_bound._kinds) == 2
    assert package.runs == {FORWARD: 3, BACKWARD: 3}
    step(calls[0])
    assert package.runs == {FORWARD: 4, BACKWARD: 4}


def test_only_the_recording_thread_is_recorded(package):
    """The package may be used by others at the same time."""
    function, calls = package.functions[FORWARD], []
    q, k, v, _ = tensors_of(WHOLE)
    arguments = {"softmax_scale": 0.3, "return_lse": True, "causal": True}
    with fa4_bound._recording(function, calls):
        other = threading.Thread(target=function, args=(q, k, v), kwargs=arguments)
        other.start()
        other.join()
        assert not calls
        function(q, k, v, **arguments)
        assert [call.owner for call in calls] == [FORWARD]
    function(q, k, v, **arguments)
    assert len(calls) == 1
    assert type(function.compile_cache) is dict


def test_a_function_that_fails_while_it_is_recorded(package, monkeypatch):
    function = package.functions[FORWARD]
    with pytest.raises(ZeroDivisionError), fa4_bound._recording(function, []):
        _ = 1 / 0
    assert type(function.compile_cache) is dict
    monkeypatch.setattr(package, "compile", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(WHOLE)
    monkeypatch.undo()
    assert not fa4_bound._changing.locked()


@pytest.mark.parametrize(
    ("capability", "version", "caches", "reason"),
    [
        ((9, 0), VERSION, True, None),
        ((10, 0), VERSION, True, "A GPU is not of compute capability 9.0"),
        ((9, 0), "4.0.0b37", True, "this is version 4.0.0b37"),
        ((9, 0), None, True, "this is version None"),
        ((9, 0), VERSION, False, "_bwd_preprocess keeps no compiled kernels"),
    ],
)
def test_what_programs_need(monkeypatch, caplog, capability, version, caches, reason):
    caplog.set_level("INFO", "bmt_burst")
    function = Package(monkeypatch).functions[FORWARD]
    if not caches:
        del fa4_bound._owner(function, BEFORE).compile_cache
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(fa4_bound, "_version", lambda: version)
    for _ in range(2):
        assert fa4_bound._refusal(function, torch.device("cuda:0")) == reason
    assert len(said(caplog, "INFO")) == (reason is not None)
    assert fa4_bound._refusal(function, torch.device("cpu")) == "tensors are on cpu"


def test_a_comparison_without_memory(package, monkeypatch, caplog):
    """The results of the function are there, and later calls are compared."""
    caplog.set_level("INFO", "bmt_burst")

    def compare(found, expected, exact):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(fa4_bound, "_compare", compare)
        for _ in range(2):
            step(WHOLE)
    for _ in range(2):
        step(WHOLE)
    assert package.runs == {FORWARD: 3, BACKWARD: 3}
    monkeypatch.setattr(fa4_bound, "_compare", compare)
    for _ in range(12):
        step(KernelCall.whole(12))
    assert package.runs == {FORWARD: 15, BACKWARD: 15}
    assert not said(caplog, "WARNING")
    assert len(said(caplog, "INFO")) == 1
