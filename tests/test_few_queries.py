"""The kernels of new tokens against attention written out in fp64: on GPUs where there are some,
else in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from bmt_burst.kernels import few_queries
from bmt_burst.spec import Spec
from tests.reference import relative_error

pytest.importorskip("triton")
from bmt_burst.kernels import triton_few_queries

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore:(divide by zero|invalid|All-NaN):RuntimeWarning")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
# as in test_triton.py
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's products lack bf16
MODULES = [
    pytest.param(few_queries, torch.float64, id="torch"),
    pytest.param(triton_few_queries, torch.float32, id="triton-fp32"),
    pytest.param(triton_few_queries, HALF, id="triton-half"),
]
CASES = {
    # rows of the batch, query heads, kv heads, head size, keys in memory, spans, softcap
    "one query": (1, 8, 2, 16, 150, [(0, 131)], None),
    "one key": (1, 2, 1, 8, 40, [(0, 1)], None),
    "no key": (2, 2, 1, 8, 40, [(0, 0)], None),
    "a window": (2, 4, 4, 24, 160, [(37, 150)], None),
    "a window of new memory": (1, 4, 1, 16, 64, [(64, 64)], None),
    "several queries": (2, 6, 2, 16, 170, [(0, 160 + n) for n in range(7)], None),
    "several in a window": (1, 4, 2, 16, 128, [(n // 2, 70 + 3 * n) for n in range(19)], 1.5),
    "some see no key": (1, 4, 2, 16, 90, [(0, 0), (0, 0), (0, 1), (0, 70)], None),
    "narrow windows": (1, 2, 2, 8, 120, [(3 * n, 3 * n + 2) for n in range(39)], None),
    "odd heads": (3, 5, 5, 40, 77, [(5, 70), (6, 77)], 3.0),
}


def make_tensors(batch, heads, kv_heads, head_size, tokens, spans, dtype):
    """Return q, k, v and spans. Memory before and after them has NaN."""
    chance = torch.Generator().manual_seed(0)
    shapes = (len(spans), heads), (tokens, kv_heads), (tokens, kv_heads)
    q, k, v = (
        torch.randn(batch, *shape, head_size, generator=chance, dtype=torch.float64).to(dtype)
        for shape in shapes
    )
    for x in (k, v):
        x[:, : spans[0][0]] = x[:, spans[-1][1] :] = torch.nan
    return [x.to(DEVICE) for x in (q, k, v, torch.tensor(spans))]


def expect(q, k, v, spans, spec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (B, S, H, D) and lse (B, S, H) in fp64."""
    q, k, v = (x.double() for x in (q, k, v))
    outs, lses = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    share = q.shape[2] // k.shape[2]
    for n, (start, stop) in enumerate(spans.tolist()):
        for head in range(q.shape[2]):
            keys, values = (x[:, start:stop, head // share] for x in (k, v))
            scores = torch.einsum("bd,btd->bt", q[:, n, head], keys) * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * (scores / spec.softcap).tanh()
            outs[:, n, head] = torch.einsum("bt,btd->bd", scores.softmax(-1), values)
            lses[:, n, head] = scores.logsumexp(-1)
    return outs, lses


@pytest.mark.parametrize(("module", "dtype"), MODULES)
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_attention_written_out(module, dtype, case, monkeypatch):
    monkeypatch.setattr(few_queries, "_SCORES", 1000)
    *sizes, spans, softcap = CASES[case]
    q, k, v, spans = make_tensors(*sizes, spans, dtype)
    spec = Spec(0.3, softcap=softcap)
    out = torch.full_like(q, torch.nan)
    lse = torch.full_like(q[..., 0], torch.nan, dtype=torch.promote_types(dtype, torch.float32))
    module.merge(module.attend(q, k, v, spans, spec), out, lse)
    expected, expected_lse = expect(q, k, v, spans, spec)
    sees = (spans[:, 0] < spans[:, 1]).view(1, -1, 1).expand_as(lse)
    assert out[~sees].eq(0).all() and lse[~sees].eq(-torch.inf).all()
    if sees.any():
        assert relative_error(out[sees], expected[sees]) < BOUNDS[dtype]
        assert (lse - expected_lse)[sees].abs().max() < 1e-5


@pytest.mark.parametrize(("module", "dtype"), MODULES)
def test_keys_are_written_to_their_places_only(module, dtype):
    k, v = torch.randn(2, 2, 5, 3, 8, device=DEVICE).to(dtype)
    before = torch.randn(2, 2, 33, 3, 8, device=DEVICE).to(dtype)
    places = torch.tensor([30, -1, 0, -1, 32], device=DEVICE)
    kept = before.clone()
    module.put(k, v, *kept, places)
    expected = before.clone()
    expected[:, :, [30, 0, 32]] = torch.stack((k, v))[:, :, [0, 2, 4]]
    assert kept.equal(expected)


@pytest.mark.parametrize(("module", "dtype"), MODULES)
def test_a_merge_reads_views(module, dtype):
    """As those of results that ranks gathered. Numbers without a weight do not count."""
    wide = torch.promote_types(dtype, torch.float32)
    packed = torch.randn(3, 2 * 2 * 5 * 9, device=DEVICE, dtype=wide)
    outs, lses = packed[:, :160].view(3, 2, 2, 5, 8), packed[:, 160:].view(3, 2, 2, 5)
    lses[0, 0] = -torch.inf
    shares = lses.double().softmax(0).unsqueeze(-1)
    expected = (outs.double() * shares).sum(0)
    out, lse = outs.new_empty(2, 2, 5, 8), outs.new_empty(2, 2, 5)
    module.merge((outs, lses), out, lse)
    assert relative_error(out, expected) < 1e-6
    assert (lse - lses.double().logsumexp(0)).abs().max() < 1e-6
