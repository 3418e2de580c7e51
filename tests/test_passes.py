"""Triton's passes over tensors and its fused sums against their specification.

They run on GPUs where there are some, else in the interpreter. It accepts more than the compiler,
so without GPUs test_triton.py compiles them, too.
"""

import pytest
import torch
import torch.nn.functional as F

from bmt_burst import IGNORE_INDEX
from bmt_burst.fused import find_passes, functions, torch_passes
from bmt_burst.merging import fused
from bmt_burst.merging import parts as plain
from bmt_burst.nn import rope_tables
from bmt_burst.sequence.span import length

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.usefixtures("find_overflows")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
# A result is rounded once, to 24, 11 or 8 bits, and sums of 100 terms are fp32.
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def passes():
    return pytest.importorskip("bmt_burst.fused.triton_passes")


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def check(found, expected, dtype):
    """Compare with results of fp64, relative to the largest."""
    for x, y in zip(found, expected, strict=True):
        if x is None or y is None:
            assert x is y
            continue
        assert x.shape == y.shape
        bound = BOUNDS[dtype] * max([1.0, *y.abs().flatten().tolist()])
        assert torch.allclose(x.double(), y.double(), rtol=0, atol=bound)


def doubles(*tensors):
    return [x.double() for x in tensors]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("shape", [(2, 19, 9, 6), (1, 3, 1, 16), (2, 0, 1, 2)])
def test_a_rotation_is_one_pass(dtype, batched, shape):
    x = random(*shape, dtype=dtype)
    positions = torch.arange(shape[1], device=DEVICE) * 1000
    if batched:
        positions = torch.stack([positions + i for i in range(shape[0])])
    tables = rope_tables(positions, shape[3])
    check([passes().rotate(x, *tables)], [torch_passes.rotate(x.double(), *tables)], dtype)
    back = passes().rotate(passes().rotate(x, *tables), *tables, back=True)
    check([back], [x.double()], dtype)


@pytest.mark.parametrize("table", [(1, 5, 3), (5, 3), (1, 3)])
@pytest.mark.parametrize("rows", [(3,), ()])
def test_tables_are_repeated_as_torch_does(table, rows):
    table = table if rows else table[-2:]
    x, tables = random(*rows, 5, 2, 6), [random(*table, seed=i) for i in (1, 2)]
    check([passes().rotate(x, *tables)], [torch_passes.rotate(x.double(), *tables)], x.dtype)


@pytest.mark.parametrize("table", [(4, 3), (5, 2), (2, 5, 3)])
def test_tables_of_wrong_sizes_raise(table):
    with pytest.raises(RuntimeError, match="expand"):
        passes().rotate(random(3, 5, 2, 6), random(*table), random(*table))


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_gate_is_one_pass(dtype, silu):
    tensors = [random(3, 1401, seed=i, dtype=dtype) for i in range(3)]
    gate, up, dout = tensors
    expected = torch_passes.gate_gradients(*doubles(*tensors), again=True, silu=silu)
    check([passes().gate(gate, up, silu)], [torch_passes.gate(*doubles(gate, up), silu)], dtype)
    found = passes().gate_gradients(gate, up, dout, again=False, silu=silu)
    check(found, (*expected[:2], None), dtype)
    assert dout.equal(random(3, 1401, seed=2, dtype=dtype)), "nothing is written"
    check(passes().gate_gradients(gate, up, dout, again=True, silu=silu), expected, dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(2, 37, 100), (5, 4100), (1, 0, 8)])
@pytest.mark.parametrize("adds", [False, True])
def test_a_norm_is_one_pass(dtype, shape, adds):
    x, dout, dx = (random(*shape, seed=i, dtype=dtype) for i in range(3))
    weight, dx = random(shape[-1], seed=3, dtype=dtype), dx if adds else None
    found, r = passes().normalize(x, weight, 1e-5)
    expected, exact_r = torch_passes.normalize(*doubles(x, weight), 1e-5)
    check([found], [expected], dtype)
    check([r], [exact_r], torch.float32)
    grads = passes().norm_gradients(dout, x, weight, r, dx)
    wide = doubles(dout, x, weight, r)
    check(grads, torch_passes.norm_gradients(*wide, dx if dx is None else dx.double()), dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("columns", [1, 50, 128])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
def test_losses_are_one_pass(monkeypatch, dtype, columns):
    """In three blocks. Numbers after the columns mean nothing."""
    monkeypatch.setattr(passes(), "_LOGITS", 64)
    logits = torch.full((9, 192), torch.nan, device=DEVICE)
    logits[:, :columns] = random(9, columns) * 20
    special = torch.tensor([-torch.inf, torch.nan, torch.inf, 0.0])
    logits[:4, columns - 1], logits[4:6, :columns] = special.to(DEVICE), -torch.inf
    labels = torch.arange(9, device=DEVICE) * 7 % columns
    labels[5:7] = IGNORE_INDEX
    results = []
    for module in (passes(), torch_passes):
        mine = logits.to(dtype, copy=True)
        losses = module.compute_losses(mine, columns, labels, False)
        again = module.compute_losses(mine, columns, labels, True)
        assert torch.allclose(losses, again, rtol=0, atol=0, equal_nan=True)
        assert not losses[2].isfinite()  # NaN or inf, and so is its gradient
        results.append([losses, mine[:, :columns]])
    for mine, exact in zip(*results, strict=True):
        mine[2] = exact[2]
        bound = BOUNDS[mine.dtype]
        assert torch.allclose(mine, exact, rtol=bound, atol=bound, equal_nan=True)


def test_the_specification_is_that_of_torch():
    """Functions and gradients are autograd's in fp64, to rounding."""
    gate, up, dout = (random(4, 50, seed=i).double().requires_grad_() for i in range(3))
    for silu, gated in ((True, F.silu(gate) * up), (False, gate.sigmoid() * up)):
        grads = torch.autograd.grad(gated, (gate, up), dout)
        found = torch_passes.gate_gradients(gate, up, dout, again=True, silu=silu)
        assert all(map(torch.allclose, found, (*grads, gated)))
        assert torch_passes.gate(gate, up, silu).allclose(gated)
    weight = random(50, seed=3).double().requires_grad_()
    normed = F.rms_norm(gate, (50,), weight, 1e-5)
    found, r = torch_passes.normalize(gate, weight, 1e-5)
    assert torch.allclose(found, normed)
    dx, dweight = torch.autograd.grad(normed, (gate, weight), dout)
    grads = torch_passes.norm_gradients(dout, gate, weight, r, up)
    assert all(map(torch.allclose, grads, (dx + up, dweight)))


@pytest.mark.parametrize("function", ["apply_rope", "swiglu", "rms_norm"])
def test_functions_without_values_have_the_shapes_of_results(function):
    x = torch.empty(2, 5, 3, 8, device="meta", requires_grad=True)
    tables = rope_tables(torch.arange(5), 8)
    others = {"apply_rope": tables, "swiglu": (x,), "rms_norm": (x.new_empty(8), 1e-5)}
    result = getattr(functions, function)(x, *others[function])
    result.sum().backward()
    assert result.shape == x.shape == x.grad.shape


def test_passes_are_found_by_device_and_dtype():
    assert find_passes(torch.empty(1)) is torch_passes
    assert find_passes(torch.empty(1, device="meta")).__name__.endswith("meta_passes")


def test_arguments_that_do_not_fit_are_torchs():
    """Kernels would read outside of them. Tensors on meta stand for those on GPUs."""
    x, small = torch.empty(3, 4, device="meta"), torch.empty(4, device="meta")
    assert functions.apply_gate(x, small).shape == functions.apply_gate(small, x).shape == (3, 4)
    with pytest.raises(RuntimeError, match="shape"):
        functions.rms_norm(x, small[:3], 1e-5)
    with pytest.raises(RuntimeError, match=r"size|broadcast"):
        functions.apply_rope(x.new_empty(4, 2, 5), small[:, None], small[:, None])


SPANS = [(0, 30), (15, 30), (0, 7), (29, 30), (2, 22)]
GAPS = [[(0, 9), (11, 12), (20, 27)], [(3, 30)], [(1, 2), (29, 30)]]


@pytest.mark.parametrize("head_size", [8, 80, 128] if DEVICE == "cuda" else [8, 80])
@pytest.mark.parametrize(
    "spans", [*([[span] for span in SPANS[:count]] for count in (1, 2, 5)), GAPS]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fused_sums_equal_their_specification(head_size, spans, dtype):
    torch.manual_seed(0)
    parts = []
    for part_spans in spans:
        tokens = sum(map(length, part_spans))
        lse = torch.randn(2, 3, tokens, device=DEVICE) * 50
        lse[:, :, ::3] = -torch.inf
        out = torch.randn(2, tokens, 3, head_size, device=DEVICE).to(dtype)
        out[:, ::3] = 0
        out[:, 3::6] = torch.nan  # as where scores are all -inf
        parts.append((part_spans, out, lse))
    results = []
    for module in (fused, plain):
        wide = torch.zeros(2, 2, 30, 7, head_size, device=DEVICE)
        lse = torch.zeros(2, 7, 30, device=DEVICE)
        heads = slice(3, 6)  # results may be some heads of many
        module.merge_outputs(wide[0, :, :, heads], lse[:, heads], parts)
        grads = [(part_spans, part.nan_to_num()) for part_spans, part, _ in parts]
        module.sum_gradients(wide[1, :, :, heads], grads)
        narrow = torch.zeros_like(wide[0], dtype=dtype)
        total = torch.ones(2, 30, 3, head_size, device=DEVICE)
        module.sum_gradients(narrow[:, :, heads], grads)
        module.sum_gradients(total, [([(0, 30)], total), *grads])
        results.append((wide, lse, narrow, total))
    for mine, exact in zip(*results, strict=True):
        bound = 1e-3 if mine.dtype == torch.float16 else 1e-5
        assert torch.allclose(mine, exact, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("first", [[(3, 9)], [(3, 5), (6, 10)]])
def test_sums_go_on_where_they_are(first):
    """What came before is the first part, where the sum goes. Of some tokens nothing came."""
    torch.manual_seed(0)
    out, lse = torch.randn(2, 40, 3, 16, device=DEVICE), torch.randn(2, 3, 40, device=DEVICE)
    parts = [
        (x, torch.randn(2, 6, 3, 16, device=DEVICE)[:, : sum(map(length, x))])
        for x in (first, [(7, 12)], [(30, 31)])
    ]
    lses = [torch.randn(2, 3, part.shape[1], device=DEVICE) for _, part in parts]
    results = []
    for module in (fused, plain):
        mine, total, mine_lse = out.clone(), out.clone(), lse.clone()
        more = [(*part, part_lse) for part, part_lse in zip(parts, lses, strict=True)]
        module.merge_outputs(mine, mine_lse, [([(0, 40)], mine, lse), *more])
        module.sum_gradients(total, [([(0, 40)], total), *parts])
        assert all(x[:, 12:30].equal(out[:, 12:30]) for x in (mine, total))
        results.append((mine, mine_lse, total))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_size", [8, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_query_rows_equal_their_specification(head_size, dtype):
    torch.manual_seed(0)
    # (B, S, H, D) of all strides
    out = torch.randn(2, 5, 30, head_size, dtype=dtype, device=DEVICE).transpose(1, 2)
    dout = (
        torch.randn(2, 30, head_size, 1, dtype=dtype, device=DEVICE)
        .expand(2, 30, head_size, 8)
        .transpose(2, 3)
    )
    lse = torch.randn(2, 8, 30, device=DEVICE)
    lse[:, :, ::3] = -torch.inf
    for width in (2, 4):
        results = [torch.zeros(2, 30, 5, width, device=DEVICE) for _ in range(2)]
        for rows, module in zip(results, (fused, plain), strict=True):
            module.fill_lse_delta(rows, out, dout[:, :, 1:6], lse[:, 3:])
        assert torch.allclose(*results, rtol=1e-5, atol=1e-5)


def test_fused_merge_does_not_hide_nan():
    out, lse = torch.empty(1, 2, 1, 8, device=DEVICE), torch.empty(1, 1, 2, device=DEVICE)
    part, part_lse = torch.ones_like(out), torch.tensor([[[0.0, torch.nan]]], device=DEVICE)
    fused.merge_outputs(
        out, lse, [([(0, 2)], part, torch.zeros_like(part_lse)), ([(0, 2)], part, part_lse)]
    )
    assert out[0, 0].eq(1).all()
    assert out[0, 1].isnan().all()
    assert lse.isnan().tolist() == [[[False, True]]]
