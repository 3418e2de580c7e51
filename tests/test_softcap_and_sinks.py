"""Scores with a soft cap and attention with sinks equal dense attention, over any ranks."""

import math

import pytest
import torch

from bmt_burst import Cache, Layout, Mask, Slice, nn
from tests.cases import random_qkv
from tests.reference import assert_close, dense_results, relative_error
from tests.refusals import refusal
from tests.rings import CPU_KERNELS, ring_output, ring_results

SCALE = 0.4


def test_sinks_of_minus_infinity_are_none():
    mask, tensors = Mask(12, (Slice((3, 8), (0, 5)),)), random_qkv(1, 12, 2, 2, 8)
    sinks = torch.full((2,), -math.inf, dtype=torch.float64)
    *got, dsinks = ring_results(Layout.zigzag(12, 2), tensors, SCALE, mask=mask, sinks=sinks)
    for mine, exact in zip(
        got, ring_results(Layout.zigzag(12, 2), tensors, SCALE, mask=mask), strict=True
    ):
        assert mine.equal(exact)
    assert dsinks.eq(0).all()


@pytest.mark.parametrize("flash", CPU_KERNELS)
@pytest.mark.parametrize(
    "options", [{"backward": "kv"}, {"backward": "q"}, {"strategy": "ulysses"}], ids=str
)
def test_a_sink_of_infinity_takes_all_attention(flash, options):
    """Its head has an out and gradients of 0, the other one those of a finite sink."""
    mask, tensors = Mask.causal(12), random_qkv(1, 12, 2, 2, 8, torch.float32)
    layout, options = Layout.zigzag(12, 2), {"mask": mask, "flash": flash, **options}
    got = ring_results(layout, tensors, SCALE, sinks=torch.tensor([math.inf, 0.5]), **options)
    finite = ring_results(layout, tensors, SCALE, sinks=torch.tensor([0.5, 0.5]), **options)
    for name, mine, exact in zip(
        ("out", "lse", "dq", "dk", "dv", "dsinks"), got, finite, strict=True
    ):
        dim = {"lse": 1, "dsinks": 0}.get(name, 2)
        infinite, other = mine.unbind(dim)
        assert infinite.eq(math.inf if name == "lse" else 0.0).all(), name
        assert other.equal(exact.select(dim, 1)), name


@pytest.mark.parametrize("flash", ["cpu", "reference"])
@pytest.mark.parametrize("largest", [1e2, 1e4, 1e6])
def test_rounding_grows_with_the_largest_score(flash, largest):
    """By the score's own rounding, as in torch's kernel. Nearly equal keys are sensitive to it."""
    base, steps = torch.randn(1, 1, 2, 64), torch.randn(1, 128, 2, 64)
    q, k = base.expand(1, 128, 2, 64), base + steps / largest
    q, k = (x * (largest / 64) ** 0.5 for x in (q, k))
    v = torch.randn(1, 128, 2, 64)
    mask, tensors = Mask.causal(128), [q, k, v, torch.zeros_like(v)]
    exact, *_ = dense_results(mask, [x.double() for x in tensors], 1.0)
    out = ring_output(Layout.zigzag(128, 2), (q, k, v), 1.0, mask=mask, flash=flash)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, scale=1)
    rounding = torch.finfo(torch.float32).eps * largest
    for found in (out, theirs.transpose(1, 2)):
        assert rounding / 20 < relative_error(found, exact) < 3 * rounding


@pytest.mark.parametrize("size", [-90.0, 90.0, 800.0])
def test_sinks_of_any_size(size):
    """exp of which fp32 does not hold: all attention goes to them, or none."""
    mask, sinks = Mask.causal(9), torch.full((2,), size)
    tensors = random_qkv(1, 9, 2, 2, 8, torch.float32)
    got = ring_results(Layout.zigzag(9, 3), tensors, SCALE, mask=mask, sinks=sinks)
    expected = dense_results(mask, tensors, SCALE, sinks=sinks)
    for mine, exact in zip(got, expected, strict=True):
        assert torch.allclose(mine.double(), exact, rtol=1e-4, atol=1e-6)  # fp32 rounds at 6e-8


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 1.2e-2), (torch.float16, 1.5e-3)]
)
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_narrow_dtypes_keep_their_precision(dtype, bound, strategy):
    """Bounds: a few units in the last place (1e-7, 4e-3, 5e-4). Sinks round out once more."""
    mask, sinks = Mask.causal(61), torch.randn(4)
    tensors = random_qkv(1, 61, 4, 2, 24, dtype)
    tensors[3][:, ::3] = 0.0  # there, all gradients are those of lse
    dlse = torch.linspace(-1, 1, 244).view(1, 4, 61)
    options = {"mask": mask, "softcap": 2.0, "strategy": strategy, "sinks": sinks, "dlse": dlse}
    got = ring_results(Layout.zigzag(61, 4), tensors, SCALE, **options)
    expected = dense_results(mask, tensors, SCALE, softcap=2.0, sinks=sinks, dlse=dlse)
    assert [x.dtype for x in got] == [dtype, torch.float32, dtype, dtype, dtype, torch.float32]
    assert_close(got, expected, tensors[3], SCALE, bound)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 0.3), (4, None), (4, 0.3)])
def test_a_layer_caps_scores_and_has_sinks_with_and_without_a_cache(window, softcap):
    """Tokens that continue a cache see what they see in a whole sequence."""
    layer = nn.BurstAttention(24, 4, 2, window=window, softcap=softcap, sinks=True).double()
    layer.sinks.data.normal_()
    plain = nn.BurstAttention(24, 4, 2, window=window).double()
    plain.load_state_dict({name: p for name, p in layer.state_dict().items() if name != "sinks"})
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    cos, sin = nn.rope_tables(torch.arange(11), layer.head_dim)
    whole, qkv = layer(x, cos, sin), layer.project_all(x, cos, sin)[:3]
    mask = Mask.causal(11) if window is None else Mask.window(11, window)
    tensors = [*(y.detach() for y in qkv), torch.zeros(2, 11, 4, 6)]
    exact, *_ = dense_results(mask, tensors, 6**-0.5, softcap=softcap, sinks=layer.sinks)
    assert relative_error(whole, layer.o_proj(exact.flatten(2))) < 1e-10
    assert relative_error(plain(x, cos, sin), whole) > 0.01
    cache = Cache(None, 1, 11)
    parts = [layer(x[:, a:b], cos[a:b], sin[a:b], cache) for a, b in ((0, 5), (5, 6), (6, 11))]
    assert relative_error(torch.cat(parts, 1), whole) < 1e-10


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"softcap": 0.0}, "ValueError: softcap must be"),
        ({"softcap": "1"}, "TypeError: softcap must be"),
        ({"sinks": torch.zeros(2)}, "TypeError: sinks must be True or False, got a Tensor"),
    ],
)
def test_a_layer_checks_its_options(options, error):
    with refusal(error):
        nn.BurstAttention(8, 2, **options)
