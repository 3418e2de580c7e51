"""Kernels against the contract: the reference against autograd, the others against the reference."""

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bmt_burst import doctor, kernels
from bmt_burst.kernels import fa2, fa4
from tests.helpers import dense_attention, random_qkv, relative_error

OPTIONS = {"scale": 0.3, "deterministic": False}


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("head_size", [8, 24, 40, 64])
def test_block_against_autograd(name, causal, heads, kv_heads, head_size):
    kernel = kernels.load(name)
    q, k, v, dout = random_qkv(2, 19, heads, kv_heads, head_size)
    out, lse = kernel.forward(q, k, v, causal=causal, **OPTIONS)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    dense_out, dense_lse = dense_attention(*inputs, causal, 0.3)
    assert relative_error(out, dense_out) < 1e-12
    assert relative_error(lse, dense_lse) < 1e-12
    grads = kernel.backward(dout, q, k, v, out, lse, causal=causal, **OPTIONS)
    for mine, expected in zip(grads, torch.autograd.grad(dense_out, inputs, dout), strict=True):
        assert mine.dtype == kernel.partial_dtype(q.dtype)
        assert relative_error(mine, expected) < 1e-12


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_views_are_fine(name):
    """Slices along the tokens, as the ring cuts them: strided inputs, lse included; rectangular blocks."""
    kernel = kernels.load(name)
    q, k, v, dout = random_qkv(2, 23, 4, 2, 8)
    out, lse = kernel.forward(q, k, v, causal=False, **OPTIONS)
    rows, columns = slice(9, 23), slice(0, 11)
    sliced = [x[:, rows] for x in (dout, q)] + [x[:, columns] for x in (k, v)] + [out[:, rows], lse[:, :, rows]]
    whole = [x.contiguous() for x in sliced]
    assert not sliced[-1].is_contiguous()
    for a, b in zip(
        kernel.backward(*sliced, causal=False, **OPTIONS), kernel.backward(*whole, causal=False, **OPTIONS), strict=True
    ):
        assert relative_error(a, b) < 1e-14


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_any_strides_are_fine(name):
    kernel = kernels.load(name)
    q, k, v, dout = random_qkv(1, 9, 4, 2, 8)
    expected = kernel.forward(q, k, v, causal=True, **OPTIONS)
    flipped = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v, dout)]
    for mine, other in zip(kernel.forward(*flipped[:3], causal=True, **OPTIONS), expected, strict=True):
        assert relative_error(mine, other) < 1e-14
    grads = kernel.backward(dout, q, k, v, *expected, causal=True, **OPTIONS)
    again = kernel.backward(flipped[3], *flipped[:3], *expected, causal=True, **OPTIONS)
    assert all(relative_error(a, b) < 1e-14 for a, b in zip(again, grads, strict=True))
    constant = torch.ones(1, 9, 2, 1, dtype=torch.float64).expand(1, 9, 2, 8)
    assert relative_error(kernel.forward(q, k, constant, causal=True, **OPTIONS)[0], torch.ones_like(q)) < 1e-14


def test_delta_stands_for_out():
    kernel = kernels.load("reference")
    q, k, v, dout = random_qkv(2, 9, 4, 2, 8)
    out, lse = kernel.forward(q, k, v, causal=True, **OPTIONS)
    expected = kernel.backward(dout, q, k, v, out, lse, causal=True, **OPTIONS)
    delta = (out * dout).sum(-1).transpose(1, 2)
    got = kernel.backward(dout, q, k, v, None, lse, delta, causal=True, **OPTIONS)
    assert all(relative_error(a, b) < 1e-14 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("capability", "head_size", "deterministic", "refusal"),
    [
        ((8, 0), 128, False, "is older than compute capability"),
        ((9, 0), 192, True, None),
        ((9, 0), 80, False, "head size 80 is not one of"),
        ((10, 0), 128, True, None),
        ((10, 0), 256, False, "head size 256 is not one of"),
        ((12, 0), 128, False, None),
        ((12, 0), 128, True, "no fixed order"),
    ],
)
def test_fa4_knows_what_each_gpu_can_do(monkeypatch, capability, head_size, deterministic, refusal):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this GPU")
    monkeypatch.setattr(fa4, "installed", lambda module: True)
    with FakeTensorMode():
        q = torch.empty(1, 2, 2, head_size, dtype=torch.bfloat16, device="cuda")
        reason = kernels.load("fa4").refuses(q, q, deterministic)
    assert (reason is None) if refusal is None else (refusal in reason)


def test_every_kernel_says_why_it_refuses():
    q = torch.zeros(1, 2, 2, 8, device="meta")
    with pytest.raises(ValueError, match="cpu: inputs are on meta, not on the CPU"):
        kernels.pick("cpu", q, q)


@pytest.fixture
def half_installed(monkeypatch, tmp_path, request):
    """A flash_attn package that fails in the way of the test's parameter, and a CPU that counts as its GPU."""
    for path, text in request.param.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for module in (fa4, fa2):
        monkeypatch.setattr(module, "refuses_half", lambda *args, **options: None)
    for forget in (kernels.installed, kernels.import_failure, fa4._functions, fa2._calls):
        forget.cache_clear()
    loaded = set(sys.modules)
    yield
    for name in set(sys.modules) - loaded:
        if name.split(".")[0].startswith("flash_attn"):
            del sys.modules[name]
    for forget in (kernels.installed, kernels.import_failure, fa4._functions, fa2._calls):
        forget.cache_clear()


PACKAGES = {"fa4": "flash-attn-4", "fa2": "flash-attn"}
CUTE = "flash_attn/cute/__init__.py"
HALF_INSTALLED = [
    ("fa4", {"flash_attn/__init__.py": "", CUTE: "import cutlass_that_is_not_there"}, "ModuleNotFoundError"),
    ("fa4", {"flash_attn/__init__.py": "", CUTE: "raise OSError('libcuda.so.1: no such file')"}, "OSError: libcuda"),
    ("fa4", {"flash_attn/__init__.py": "", CUTE: "", "flash_attn/cute/interface.py": ""}, "AttributeError"),
    ("fa4", {"flash_attn/__init__.py": "", CUTE: ""}, "ImportError: cannot import name 'interface'"),
    ("fa4", {"flash_attn/__init__.py": "import torch; torch.made_for_another"}, "AttributeError"),
    ("fa2", {"flash_attn_2_cuda.py": "", "flash_attn/__init__.py": "raise ImportError('undefined symbol')"}, "symbol"),
    ("fa2", {"flash_attn_2_cuda.py": ""}, "ModuleNotFoundError: No module named 'flash_attn'"),
]


@pytest.mark.parametrize(
    ("half_installed", "name", "reason"), [(c[1], c[0], c[2]) for c in HALF_INSTALLED], indirect=["half_installed"]
)
def test_auto_passes_on_from_a_package_that_is_half_installed(half_installed, name, reason, caplog):
    q, k, _, _ = random_qkv(1, 4, 2, 2, 8)
    for _ in range(2):
        assert kernels.pick("auto", q, k).name == "cpu"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([text for text in said if text.startswith(f"the package {PACKAGES[name]} is")]) == 1
    assert reason in "".join(said)
    with pytest.raises(ValueError, match=f"{name}: the package {PACKAGES[name]} is installed but .*{reason}"):
        kernels.pick(name, q, k)
    with pytest.raises(RuntimeError, match=f"is installed but cannot be used: .*{reason}"):
        doctor._kernel(name)
