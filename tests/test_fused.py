"""The fused kernels against their specification: on GPUs where there are some, else in Triton's
interpreter.

The interpreter accepts more than the compiler, so without GPUs test_triton.py compiles them, too.
"""

import ctypes
import logging

import pytest
import torch

from bmt_burst.merging import fused, plain
from bmt_burst.merging.launches import Launches
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
        wide, lse = (
            torch.zeros(2, 2, 30, 7, head_size, device=DEVICE),
            torch.zeros(2, 7, 30, device=DEVICE),
        )
        heads = slice(3, 6)  # results may be some heads of many
        module.merge_outputs(wide[0, :, :, heads], lse[:, heads], parts)
        grads = [(part_spans, part.nan_to_num()) for part_spans, part, _ in parts]
        module.sum_gradients(wide[1, :, :, heads], grads)
        narrow, total = (
            torch.zeros_like(wide[0], dtype=dtype),
            torch.ones(2, 30, 3, head_size, device=DEVICE),
        )
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
    results = [torch.empty(2, 30, 5, 2, device=DEVICE) for _ in range(2)]
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


class Compiled:
    """A kernel that was launched once: it runs again in the interpreter, for addresses."""

    def __init__(self, kernel, args):
        self.kernel, self.args, self.launches = kernel, args, 0

    def __getitem__(self, grid):
        assert len(grid) == 3

        def launch(*args, stream):
            assert stream == 7
            self.launches += 1
            self.kernel[grid](*map(at_addresses, args, self.args))

        return launch


def at_addresses(given, like):
    """Return tensors of one entry where the numbers in `given` say, if `like` has tensors there."""
    if isinstance(like, tuple):
        return tuple(map(at_addresses, given, like))
    if not isinstance(like, torch.Tensor):
        assert given == like
        return given
    entry = (ctypes.c_byte * like.element_size()).from_address(given)
    return torch.frombuffer(entry, dtype=like.dtype)


class Kernel:
    """In place of a Triton kernel: its launches return what was compiled, as on GPUs."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, []

    def __getitem__(self, grid):
        def launch(*args):
            self.kernel[grid](*args)
            self.compiled.append(Compiled(self.kernel, args))
            return self.compiled[-1]

        return launch


@pytest.fixture
def kernels(monkeypatch):
    """The three kernels, whose launches are repeated although there is no GPU."""
    if DEVICE == "cuda":
        pytest.skip("on GPUs launches are repeated anyway")
    monkeypatch.setattr(fused, "_are_repeated", lambda x: True)
    monkeypatch.setattr(fused, "current_raw_stream", lambda x: 7)
    monkeypatch.setattr(fused, "_launches", Launches())
    names = "_merge_outputs", "_sum_gradients", "_fill_lse_delta"
    found = [Kernel(getattr(fused, name)) for name in names]
    for name, kernel in zip(names, found, strict=True):
        monkeypatch.setattr(fused, name, kernel)
    return found


def merge_in_place(module, seed, spans=((0, 40), (7, 12), (30, 33)), dtype=torch.bfloat16):
    """Merge and add up parts of new memory: the first lies where the sums go."""
    torch.manual_seed(seed)
    outs = [torch.randn(2, 50, 3, 16, dtype=dtype)[:, 4 : 4 + length(span)] for span in spans]
    lses = [torch.randn(2, 3, 50)[:, :, 5 : 5 + length(span)] for span in spans]
    lse, total = lses[0].clone(), torch.randn(2, 40, 3, 16)
    parts = [([span], x, y) for span, x, y in zip(spans, outs, lses, strict=True)]
    module.merge_outputs(outs[0], lse, parts)
    module.sum_gradients(total, [([(0, 40)], total), *((at, x) for at, x, _ in parts[1:])])
    rows = torch.empty(2, 40, 3, 2)
    module.fill_lse_delta(rows, outs[0], total, lse)
    return outs[0], lse, total, rows


def test_launches_are_repeated_for_other_addresses(kernels):
    for seed in range(4):
        results = merge_in_place(fused, seed), merge_in_place(plain, seed)
        for mine, exact in zip(*results, strict=True):
            assert torch.allclose(mine, exact, rtol=2e-2, atol=5e-2)
    for kernel in kernels:
        assert [compiled.launches for compiled in kernel.compiled] == [3]


def test_launches_are_repeated_only_if_nothing_but_addresses_differs(kernels):
    def launched():
        return [len(kernel.compiled) for kernel in kernels]

    merge_in_place(fused, 0)
    assert launched() == [1, 1, 1]
    merge_in_place(fused, 0, spans=((0, 40), (7, 12), (30, 34)))
    assert launched() == [2, 2, 1]
    merge_in_place(fused, 0, dtype=torch.float16)
    assert launched() == [3, 3, 2]
    part, total = torch.randn(1, 4, 2, 8), torch.empty(1, 4, 2, 8)
    memory = bytearray(4 * 64 + 16)
    at = (4 - torch.frombuffer(memory, dtype=torch.uint8).data_ptr()) % 16
    unaligned = torch.frombuffer(memory, dtype=torch.float32, count=64, offset=at).view(1, 4, 2, 8)
    assert unaligned.data_ptr() % 16 == 4
    whole = [(0, 4)]
    for parts in ([(whole, part)], [(whole, unaligned)], [(whole, total), (whole, part)]):
        before = launched()[1]
        for _ in range(2):
            fused.sum_gradients(total, parts)
        assert launched()[1] == before + 1
    for _ in range(2):  # a copy of the part's rows, and a map of its spans: at new addresses
        fused.sum_gradients(total, [(whole, part.transpose(2, 3).contiguous().transpose(2, 3))])
        fused.sum_gradients(total, [([(0, 1), (2, 4)], part[:, 1:])])
    assert launched()[1] == before + 5


def test_refused_repetitions_are_reported_once(kernels, caplog, monkeypatch):
    def refuse(*args, stream):
        raise TypeError("function takes exactly 31 arguments")

    monkeypatch.setattr(Compiled, "__getitem__", lambda self, grid: refuse)
    with caplog.at_level(logging.WARNING, "bmt_burst"):
        for seed in range(3):
            results = merge_in_place(fused, seed), merge_in_place(plain, seed)
            for mine, exact in zip(*results, strict=True):
                assert torch.allclose(mine, exact, rtol=2e-2, atol=5e-2)
    assert [record.message for record in caplog.records] == [
        "sums take the host more time: this Triton cannot repeat launches: "
        "function takes exactly 31 arguments"
    ]
