"""The fused kernels against their specification: on GPUs where there are some, else in Triton's
interpreter.

The interpreter accepts more than the compiler, so without GPUs test_triton.py compiles them, too.
"""

import pytest
import torch

from bmt_burst.merging import fused
from bmt_burst.merging import parts as plain
from bmt_burst.sequence.span import length

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.usefixtures("find_overflows")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
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
    """What came before is the first part, and lies where the sum goes; of some tokens nothing
    came.
    """
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
