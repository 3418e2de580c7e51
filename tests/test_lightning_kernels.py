"""The Triton kernel of lightning attention against the reference, on GPUs or interpreted."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bmt_burst import lightning_attn_func
from bmt_burst.lightning import kernels, reference
from bmt_burst.lightning.rates import find_rates
from bmt_burst.lightning.segments import Segments
from tests.lightning import SLOPES, worst_error

pytest.importorskip("triton")

from bmt_burst.lightning import triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore:(divide by zero|overflow):RuntimeWarning")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
# Operands are rounded to 24, 11 or 8 bits. On GPUs a product of fp32 is three of TF32.
BOUNDS = {torch.float32: 5e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
SCALE = 0.3


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """Segments have several pieces, and those several chunks."""
    monkeypatch.setattr(triton_kernel, "_LONGEST", 48)


def random_case(segments: Segments, size: int, dtype=torch.float32, heads: int = len(SLOPES)):
    """Return q, k, v and dout, parts of a packed tensor, and the states at edges of segments."""
    packed = torch.randn(segments.cuts[-1], heads, 4 * size).to(DEVICE, dtype)
    edges = [
        torch.randn(len(x), heads, size, size, device=DEVICE)
        for x in (segments.opens, segments.leaves)
    ]
    return packed.split(size, dim=2), edges


def run(kernel, tensors, edges, segments, slopes=SLOPES):
    """Return states after segments, out, the gradients of states before them, dq, dk and dv."""
    (q, k, v, dout), (initial, dfinal) = tensors, edges
    rates = find_rates(segments, tuple(slopes), None, q)
    states = kernel.forward_states(k, v, rates, segments)
    out = kernel.outputs(q, k, v, rates, SCALE, segments, states, initial)
    back = kernel.backward_states(q, dout, rates, SCALE, segments)
    grads = kernel.gradients(q, k, v, dout, rates, SCALE, segments, initial, back, dfinal)
    return [states.last, out, back.last, *grads]


def check(segments: Segments, size: int, dtype=torch.float32, factors=(1.0, 1.0, 1.0, 1.0)):
    """Compare with the reference. `factors` are those of q, k, v and dout."""
    tensors, edges = random_case(segments, size, dtype)
    for x, factor in zip(tensors, factors, strict=True):
        x.mul_(factor)
    got = run(triton_kernel, tensors, edges, segments)
    wide = [[x.double().cpu() for x in group] for group in (tensors, edges)]
    expected = run(reference, *wide, Segments(segments.cuts, segments.opens, segments.leaves))
    for mine, exact in zip(got, expected, strict=True):
        assert mine.shape == exact.shape and mine.is_contiguous()
        if exact.numel():
            assert worst_error([mine.double().cpu()], [exact]) < BOUNDS[dtype]
    assert {x.dtype for x in (got[1], *got[3:])} == {dtype}
    assert got[0].dtype == got[2].dtype == torch.float32


@pytest.mark.parametrize(
    "segments",
    [
        Segments((0, 1)),
        Segments((0, 100)),
        Segments((0, 100), (0,), (0,)),  # the middle of a document
        Segments((0, 1, 2, 37, 120), (0, 3), (2, 3)),
        Segments((0, 48, 49), (1,), (0, 1)),
    ],
    ids=lambda segments: "-".join(map(str, segments.cuts)),
)
def test_equals_the_reference(segments):
    check(segments, 16)


def test_head_sizes_that_are_padded():
    check(Segments((0, 3, 60), (1,), (1,)), 48)


@pytest.mark.parametrize(
    "factors", [(64, 64, 1 / 64, 1 / 64), (1 / 64, 1 / 64, 64, 64)], ids=["qk", "vdout"]
)
def test_products_beyond_half_precision(factors):
    """q . k and v . dout are above 65,504 for some pairs, and times the scale below."""
    check(Segments((0, 3, 60), (1,), (1,)), 32, torch.float16, factors)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has other shapes, and is slow")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [64, 128, 80, 256])
def test_gpus_equal_the_reference(size, dtype, monkeypatch):
    if size > 128 and dtype == torch.float32:
        pytest.skip("refused")
    monkeypatch.setattr(triton_kernel, "_LONGEST", 512)
    check(Segments((0, 5, 2000, 3001), (1, 2), (0, 2)), size, dtype)


@pytest.mark.parametrize("slope", [0.0, 1 / 256, 20.0, 1e30, 3e38])
def test_no_slope_overflows(slope):
    segments = Segments((0, 70), (0,), (0,))
    tensors, edges = random_case(segments, 16, heads=1)
    got = run(triton_kernel, tensors, edges, segments, [slope])
    assert all(x.isfinite().all() for x in got)
    if slope >= 1e30:  # only the own token is left
        q, k, v, _ = tensors
        assert worst_error([got[1]], [SCALE * (q * k).sum(-1, keepdim=True) * v]) < 1e-5


def test_nothing_crosses_a_border():
    """What is not finite in a segment stays there."""
    segments = Segments((0, 20, 21, 90, 130), (1,), (2,))
    tensors, edges = random_case(segments, 16, heads=1)
    clean = run(triton_kernel, tensors, edges, segments, [0.0])
    for which, segment in ((0, 0), (1, 2), (2, 1), (3, 3)):
        spoilt, (start, stop) = [x.clone() for x in tensors], segments.cuts[segment : segment + 2]
        spoilt[which][start:stop] = torch.nan
        got = run(triton_kernel, spoilt, edges, segments, [0.0])
        for x, y in zip(got[1:2] + got[3:], clean[1:2] + clean[3:], strict=True):
            assert x[:start].equal(y[:start]) and x[stop:].equal(y[stop:])
        assert any(x[start:stop].isnan().any() for x in got[1:2] + got[3:])


def test_two_runs_are_bitwise_equal():
    segments = Segments((0, 30, 130), (1,), (1,))
    case = random_case(segments, 16, heads=1)
    runs = [run(triton_kernel, *case, segments, [1 / 256]) for _ in range(2)]
    assert all(x.equal(y) for x, y in zip(*runs, strict=True))


def test_a_thousand_short_documents_have_no_states():
    segments = Segments((*range(1_000), 1_200), (999,))
    k = torch.randn(1_200, 1, 16, device=DEVICE)
    rates = find_rates(segments, (0.0,), None, k)
    states = triton_kernel.forward_states(k, k, rates, segments)
    assert states.last.shape == (0, 1, 16, 16)
    assert len(states.chunks) == -(-201 // 48) - 1


def test_pieces_are_shorter_where_there_are_few(monkeypatch):
    monkeypatch.setattr(triton_kernel, "_LONGEST", 2048)
    for tokens, longest in ((1 << 16, 2048), (1 << 13, 512), (1 << 10, 256)):
        segments = Segments((0, tokens))
        pieces = triton_kernel._prepare(segments, torch.empty(tokens, 32, 0), False).pieces
        assert pieces[:, 1].tolist() == [longest] * (tokens // longest)


@pytest.mark.parametrize(
    ("dtype", "size", "reason"),
    [
        (torch.bfloat16, 128, None),
        (torch.float32, 64, None),
        (torch.bfloat16, 24, "must be a multiple of 16 up to 256 for torch.bfloat16, got 24"),
        (torch.float32, 256, "must be a multiple of 16 up to 128 for torch.float32, got 256"),
        (torch.float64, 64, "inputs are torch.float64, not fp16, bf16 or fp32"),
    ],
)
def test_what_it_refuses(monkeypatch, dtype, size, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode():
        x = torch.empty(1, 3, 2, size, dtype=dtype, device="cuda")
        refusal = triton_kernel.refuses(x, False)
    assert refusal is None if reason is None else reason in refusal


def test_a_log_decay_takes_the_reference(monkeypatch):
    x = torch.randn(1, 3, 2, 16)
    monkeypatch.setattr(triton_kernel, "refuses_triton", lambda q: None)
    monkeypatch.setattr(triton_kernel, "import_failure", lambda *_: None)
    assert [kernels.pick("auto", x, chosen) for chosen in (False, True)] == ["triton", "reference"]
    with pytest.raises(ValueError, match=r"triton: it computes slopes, and no log"):
        lightning_attn_func(x, x, x, log_decay=-torch.rand(1, 3, 2), flash="triton")


def test_cpus_take_the_reference():
    x = torch.randn(1, 3, 2, 16)
    assert kernels.pick("auto", x) == "reference"
    with pytest.raises(ValueError, match="head size 16 on cpu: triton: inputs are on cpu"):
        lightning_attn_func(x, x, x, torch.zeros(2), flash="triton")
