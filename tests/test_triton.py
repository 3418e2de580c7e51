"""The Triton kernel against the reference: on GPUs where there are some, else in Triton's
interpreter.

The interpreter accepts more than the compiler, so without GPUs it is compiled for one as well. Its
blocks are small there, so that calls of some tokens have several.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bmt_burst import kernels
from bmt_burst.bias import kernels as bias_kernels
from bmt_burst.bias.call_bias import CallBias, SegmentIds
from bmt_burst.bias.kernels import triton as with_bias
from bmt_burst.kernels import triton as backend
from bmt_burst.sequence.tile import KernelCall
from bmt_burst.spec import Spec
from tests.cases import bias_by_distance, call_tensors, moved, named_calls, random_bias
from tests.launcher import ROOT
from tests.reference import kernel_errors, relative_error

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(divide by zero|invalid value|overflow|All-NaN):RuntimeWarning"
    )
]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
KERNEL, BIAS_KERNEL = kernels.load("triton"), bias_kernels.load("triton")
SPEC = Spec(0.3, deterministic=True)
CAPPED = Spec(0.3, deterministic=True, softcap=1.5)
if DEVICE == "cuda":
    CALLS = named_calls(100)
else:  # of many tiles a few: the interpreter takes milliseconds for each
    CALLS = named_calls(5)
    few = {"q_tokens": 20, "kv_tokens": 13, "tiles": CALLS["many tiles"].tiles[:6]}
    CALLS |= {kind: replace(CALLS[kind], **few) for kind in ("many tiles", "many full tiles")}
# Operands, probabilities and results are rounded to 24, 11 or 8 bits; found in the interpreter are
# 5e-7 and 6e-4. On GPUs a product of fp32 is three of TF32, and sums are longer.
BOUNDS = {
    torch.float32: 2e-6 if DEVICE == "cpu" else 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
# the interpreter's products lack bf16
DTYPES = tuple(BOUNDS) if DEVICE == "cuda" else (torch.float32, torch.float16)


def tensors_of(call, batch, heads, kv_heads, head_size, dtype=torch.float32):
    return [x.to(DEVICE) for x in call_tensors(call, batch, heads, kv_heads, head_size, dtype)]


def bias_of(call, heads, by="segments", seed=0):
    make = random_bias if by == "segments" else bias_by_distance
    return moved(make(call, heads, seed, torch.float32), DEVICE)


def check(call, tensors, spec=SPEC, with_delta=False, bias=None):
    kernel = KERNEL if bias is None else BIAS_KERNEL
    errors = kernel_errors(kernel, call, tensors, spec, with_delta, bias)
    assert errors.pop("lse") < 1e-5  # what P is rounded to does not count
    assert max(errors.values()) < BOUNDS[tensors[0].dtype], errors


def table_gradient(call, tensors, bias):
    *qkv, dout = tensors
    out, lse = BIAS_KERNEL.forward(*qkv, call, SPEC, bias)
    return BIAS_KERNEL.backward(dout, *qkv, out, lse, None, call, SPEC, bias)[3]


# Each pair of edges, more and fewer keys, queries that see nothing, tiles with and without gaps.
# Biases need fewer: their kernels mask all blocks.
FEW = (
    "full, fewer keys",
    "causal, more keys",
    "a window of documents",
    "a window to both sides",
    "only some behind",
    "single tokens",
    "tiles apart",
)
MANY = (
    *FEW,
    "causal, fewer keys",
    "documents",
    "only some ahead",
    "itself",
    "far ahead, of fewer keys",
    "few of the tokens",
    "full tiles apart",
    "many tiles",
)
ON_GPU = DEVICE == "cuda"


@pytest.mark.parametrize("kind", CALLS if ON_GPU else MANY)
def test_calls(kind):
    check(CALLS[kind], tensors_of(CALLS[kind], 1, 1, 1, 8), with_delta=len(kind) % 2 == 0)


@pytest.mark.parametrize("kind", CALLS if ON_GPU else FEW)
def test_calls_with_a_bias(kind):
    """Each with queries and keys of a contiguous, zigzag or striped rank, or of no order."""
    bias = bias_of(CALLS[kind], 1, seed=sum(map(ord, kind)))
    check(CALLS[kind], tensors_of(CALLS[kind], 1, 1, 1, 8), SPEC, len(kind) % 2 == 0, bias)


@pytest.mark.skipif(DEVICE == "cuda", reason="Triton's interpreter finds overflows")
@pytest.mark.parametrize(
    ("spec", "by"), [(SPEC, None), (CAPPED, None), (SPEC, "segments"), (SPEC, "distance")]
)
def test_no_integer_overflows(spec, by, find_overflows):
    call, bias = CALLS["tiles apart"], None
    if by:
        bias = bias_of(call, 2, by)
    check(call, tensors_of(call, 1, 2, 1, 8), spec, bias=bias)


@pytest.mark.skipif(
    DEVICE == "cuda", reason="a product of fp32 is three of TF32 there, which make NaN of inf"
)
@pytest.mark.parametrize(("name", "value"), [("q", float("nan")), ("k", -float("inf"))])
def test_a_softcap_hides_infinity_and_no_nan(name, value):
    """The scores are then the softcap or its negative, as the reference has them, but not NaN."""
    call = KernelCall.whole(33, causal=True)
    tensors = dict(zip("qkv", tensors_of(call, 1, 2, 1, 8), strict=False))
    tensors[name][0, 5, 0, 3] = value
    results = [
        kernel.forward(*tensors.values(), call, CAPPED)
        for kernel in (KERNEL, kernels.load("reference"))
    ]
    for mine, expected in zip(*results, strict=True):
        assert torch.allclose(mine, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert bool(mine.isnan().any()) is (value != value)


@pytest.mark.parametrize("kind", ["documents", "full documents"])
def test_the_gradient_of_a_table_alone(kind, monkeypatch):
    """What kernels without one ask for."""
    monkeypatch.setattr(with_bias, "_MOST_KEYS", 7)
    call = CALLS[kind]
    q, k, v, dout = tensors_of(call, 1, 2, 1, 8)
    for bias in (bias_of(call, 2, seed=1), bias_of(call, 2, "distance")):
        out, lse = BIAS_KERNEL.forward(q, k, v, call, SPEC, bias)
        delta = (out * dout).sum(-1).transpose(1, 2)
        inputs = dout, q, k, v, None, lse, delta, call, SPEC, bias
        assert (
            relative_error(with_bias.table_gradient(*inputs), BIAS_KERNEL.backward(*inputs)[3])
            < 1e-6
        )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype"), [(4, 2, torch.float32), (3, 1, DTYPES[-1])]
)
def test_shared_keys_and_a_table_of_other_strides(heads, kv_heads, dtype):
    call = CALLS["tiles apart"]
    bias = bias_of(call, heads)
    bias = replace(bias, table=bias.table.T.contiguous().T)
    check(call, tensors_of(call, 2, heads, kv_heads, 8, dtype), SPEC, bias=bias)


@pytest.mark.parametrize("kind", CALLS if ON_GPU else FEW[:5])
def test_calls_whose_bias_goes_by_distance(kind):
    """Distances are beyond reach, too. Of one head or two."""
    call, heads = CALLS[kind], 1 + len(kind) % 2
    for seed in range(2):
        bias = bias_of(call, heads, "distance", seed + sum(map(ord, kind)))
        check(call, tensors_of(call, 1, heads, 1, 8), SPEC, len(kind) % 4 < 2, bias)


@pytest.mark.parametrize(("kind", "step"), [("full", 1), ("causal", 3)])
def test_one_segment_goes_by_distance_alone(kind, step):
    """Positions are even, so that diagonals of blocks are summed; then two groups or segments."""
    call, places = CALLS[kind], torch.arange(CALLS[kind].q_tokens, dtype=torch.int32, device=DEVICE)
    same, halves = torch.zeros_like(places), (places >= len(places) * 3 // 7).int()
    bias = replace(bias_of(call, 1), q_position=places * step + 7, kv_position=places * step)
    segments = replace(bias.segments, q_group=same, kv_group=same, q_base=same, kv_segment=same)
    pairs = torch.tensor([-1, 3, 5, -1], dtype=torch.int32, device=DEVICE)
    for changes in (
        {},
        {"q_group": halves, "kv_group": halves},
        {"pairs": pairs, "q_base": 2 * halves, "kv_segment": halves},
    ):
        check(
            call,
            tensors_of(call, 1, 1, 1, 8),
            SPEC,
            bias=replace(bias, segments=replace(segments, **changes)),
        )


@pytest.mark.parametrize("factor", [1e-25, 1e18])
def test_the_gradient_of_a_table_is_as_exact_for_gradients_of_any_size(factor):
    call, bias = CALLS["a window"], bias_of(CALLS["a window"], 1)
    *qkv, dout = tensors_of(call, 1, 1, 1, 8)
    expected, grad, zeros = (table_gradient(call, [*qkv, dout * x], bias) for x in (1, factor, 0))
    assert relative_error(grad.double() / factor, expected) < BOUNDS[torch.float32]
    assert zeros.eq(0).all()


def test_the_gradient_of_a_table_is_as_exact_next_to_larger_heads():
    """A head whose values are a million times those of another."""
    call, bias = CALLS["a window"], bias_of(CALLS["a window"], 2)
    tensors = tensors_of(call, 1, 2, 2, 8)
    before = table_gradient(call, tensors, bias)
    for x in tensors[2:]:
        x[:, :, 1] *= 1e6
    after = table_gradient(call, tensors, bias)
    assert torch.allclose(after[:, 0], before[:, 0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spoilt", [1, 3])
def test_the_gradient_of_a_table_does_not_hide_nan(spoilt):
    call, bias = CALLS["a window"], bias_of(CALLS["a window"], 1)
    tensors = tensors_of(call, 1, 1, 1, 8)
    tensors[spoilt][0, 20, 0, 3] = torch.nan
    assert table_gradient(call, tensors, bias).isnan().all()


@pytest.mark.parametrize("entries", [None, (2,), (-1,), (2, -1)])
def test_the_gradient_of_a_table_knows_no_queries_that_are_not_there(entries):
    """A block's last queries are 0. 0 times a key of -inf that the others do not see is NaN."""
    # of blocks of a power of two an odd number is missing: what they add does not cancel
    count = 41
    q, k, v, dout = tensors_of(KernelCall.whole(count), 1, 1, 1, 8)
    q[..., 0], k[0, 5, 0, 0] = q[..., 0].abs() + 0.1, -torch.inf
    nothing = torch.zeros(count, dtype=torch.int32)
    position = torch.arange(count, dtype=torch.int32)
    distances = torch.tensor([0, 1, 3], dtype=torch.int32)
    segments = None  # by distance alone
    if entries is not None:
        pairs = torch.tensor(entries, dtype=torch.int32)
        segments = SegmentIds(nothing, nothing, nothing, position % len(entries), pairs, 4)
    bias = moved(CallBias(torch.randn(5, 1), position, position, distances, segments), DEVICE)
    out, lse = BIAS_KERNEL.forward(q, k, v, KernelCall.whole(count), SPEC, bias)
    assert lse.isfinite().all()
    inputs = dout, q, k, v, out, lse, None, KernelCall.whole(count), SPEC, bias
    mine, exact = (bias_kernels.load(name).backward(*inputs)[3] for name in ("triton", "reference"))
    assert torch.allclose(mine, exact, rtol=1e-4, atol=1e-4)


def test_results_are_equal_in_every_bit():
    call = CALLS["tiles apart"]
    *qkv, dout = tensors_of(call, 1, 2, 1, 16, torch.float16)
    bias, results = bias_of(call, 2), []
    for _ in range(2):
        out, lse = BIAS_KERNEL.forward(*qkv, call, SPEC, bias)
        results.append(
            (out, lse, *BIAS_KERNEL.backward(dout, *qkv, out, lse, None, call, SPEC, bias))
        )
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("name", "value"), [("q", float("inf")), ("k", -float("inf")), ("v", float("nan"))]
)
def test_nan_is_where_the_reference_has_it(name, value):
    """Also where all scores are -inf. In v it may spread: a probability of 0 times NaN."""
    for tokens, causal in ((1, False), (17, True), (33, False)):
        call = KernelCall.whole(tokens, causal=causal and name != "v")
        tensors = tensors_of(call, 1, 2, 1, 8)
        for at in ([0], list(range(tokens))):
            q, k, v, _ = (x.clone() for x in tensors)
            {"q": q, "k": k, "v": v}[name][0, at, 0, 3] = value
            out, lse = KERNEL.forward(q, k, v, call, SPEC)
            expected, expected_lse = kernels.load("reference").forward(q, k, v, call, SPEC)
            assert out.isnan().equal(expected.isnan()), (tokens, at)
            assert lse.isnan().equal(expected_lse.isnan()), (tokens, at)
            assert lse.isfinite().equal(expected_lse.isfinite()), (tokens, at)


def test_the_file_of_shapes_has_one_for_each_launch_and_gpu_and_its_source():
    file = Path(backend.__file__).with_name("triton_shapes.json")
    commit = re.compile("[0-9a-f]{7}")
    gpu = re.compile("NVIDIA .*|origin unknown, not measured again")
    names = "forward", "backward_kv", "backward_q"
    kinds = "single", "half", "half_by_distance", "half_by_segments"
    expected = set(itertools.product(kinds, names))
    expected |= {("single", "backward_table"), ("half_by_distance", "backward_table")}
    tables = json.loads(file.read_text())["tables"]
    assert tables.keys() == {f"{a} {b} {width}" for a, b in expected for width in (64, 128, 256)}
    least = 99 << 10  # shared memory of compute capability 8.6 and 8.9
    for key, entry in tables.items():
        assert commit.fullmatch(entry["commit"]), key
        assert gpu.fullmatch(entry["measured_on"]), key
        table, kernel, head_size = key.split()
        assert backend._read_shapes(table, kernel, int(head_size))[-1].shared <= least


@pytest.mark.parametrize(
    ("capability", "shape", "dtype", "refusal"),
    [
        ((9, 0), (1, 2, 2, 128), torch.bfloat16, None),
        ((7, 5), (1, 2, 2, 128), torch.float16, "it needs compute capability 8.0, "),
        ((9, 0), (1, 2, 2, 128), torch.float64, "not fp16, bf16 or fp32"),
        ((9, 0), (1, 2, 2, 84), torch.float16, "up to 256, got 84"),
        ((9, 0), (1, 2, 2, 264), torch.float16, "up to 256, got 264"),
    ],
)
def test_what_it_refuses(monkeypatch, capability, shape, dtype, refusal):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this GPU")
    with FakeTensorMode():
        q = torch.empty(shape, dtype=dtype, device="cuda")
        for spec in (SPEC, CAPPED):
            reason = KERNEL.refuses(spec, q, q)
            assert (reason is None) if refusal is None else (refusal in reason)
        assert BIAS_KERNEL.refuses(SPEC, q, q) == KERNEL.refuses(SPEC, q, q)


def test_without_a_gpu_nobody_gets_it():
    q, k, _, _ = call_tensors(CALLS["full"], 1, 2, 1, 8, torch.float32)
    with pytest.raises(ValueError, match="triton: inputs are on cpu, not on a GPU"):
        kernels.pick("triton", q, k, SPEC)


@pytest.mark.skipif(DEVICE == "cuda", reason="other tests compile them")
def test_kernels_compile_for_gpus():
    """Once for all numbers of tokens: also passes, merges, AdamW, sparse, lightning attention.

    Triton keeps what it compiled for later runs. LLVM's optimizations refuse nothing.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "DISABLE_LLVM_OPT": "1"}
    environment["TRITON_CACHE_DIR"] = str(ROOT / ".pytest_cache/triton")
    command = [sys.executable, "-m", "tests.compile_kernels"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    names = "forward", "backward_kv", "backward_q"
    others = "backward_table", "backward_q"
    # the fused kernels for parts of one span, and of several
    fused = ["_merge_outputs", "_sum_gradients", "_compute_losses"] * 2
    sparse = ["_sort_keys", "_unite", "_forward", "_dq", "_dkdv", "_add_parts"]
    sparse += ["_normalize", "_fill_scores", "_take", "_forward", "_dq"]
    sparse += ["_add_keys", "_normalize", "_fill_scores", "_attend_to_blocks"]  # of new tokens
    passes = ["_rotate_pairs", "_normalize", "_norm_gradients", "_gate", "_gate_gradients"]
    compiled = [*names * 3, *others, *fused, "_fill_lse_delta", *sparse, *passes]
    compiled += ["_update"] * 2 + ["_put", "_attend", "_merge"]
    # in time and against it, and with states as they are and transposed
    compiled += [*["sum_pieces", "attend"] * 2, "chain_states", "attend_back"]
    assert sorted(done.stdout.split()) == sorted(compiled)
