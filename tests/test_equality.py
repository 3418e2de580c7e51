"""Attention over rings: gradients that are not wanted, tokens that nobody may see, and NaN.

tests/conformance compares every strategy with dense attention.
"""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bmt_burst import Layout, Mask, burst_attn_func, simulate
from bmt_burst.bias import areas
from bmt_burst.sequence.layout import LAYOUTS
from tests.cases import random_qkv
from tests.reference import dense_results, relative_error
from tests.rings import CPU_KERNELS, ring_output, ring_results
from tests.test_scores import small_scores

SCALE = 0.31


def ring_attention(layout, backward, tensors, **options):
    """Return whole out, lse, dq, dk, dv of causal attention over two simulated hosts of two."""
    whole = Layout.named(layout, tensors[0].shape[1], 4)
    options = {"causal": True, "layout": layout, "backward": backward, **options}
    return ring_results(whole, tensors, SCALE, 2, **options)


@pytest.mark.parametrize(
    ("learned", "wanted"),
    [
        ((), ()),
        ((), ("q",)),
        ((), ("v", "q")),
        (("bias",), ("bias",)),
        (("sinks",), ("sinks",)),
        (("sinks",), ("q",)),
        (("bias", "sinks"), ("q", "k", "v", "bias", "sinks")),
    ],
)
@pytest.mark.parametrize(("strategy", "again"), [("ring", True), ("ulysses", False)])
def test_only_the_gradients_that_are_wanted(learned, wanted, strategy, again, monkeypatch):
    """Also where the forward is computed again in the backward."""
    monkeypatch.setattr(areas, "_LONG", 2)
    scores, layout = small_scores(), Layout.zigzag(6, 2)
    *qkv, dout = tensors = random_qkv(1, 6, 2, 2, 8)
    tables = {"bias": torch.linspace(-1, 1, 16).view(8, 2), "sinks": torch.tensor([0.3, -1.0])}
    tables = {name: tables[name].double() for name in learned}
    what = {"scores": scores} if "bias" in learned else {"mask": scores.mask}
    rows = scores.dense() if "bias" in learned else None
    exact = dense_results(scores.mask, tensors, SCALE, rows, **tables)[2:]

    def work(ring):
        shards = [layout.shard(x, ring.rank) for x in qkv]
        inputs = dict(zip("qkv", shards, strict=True))
        inputs |= {name: x.clone() for name, x in tables.items()}
        for name in wanted:
            inputs[name].requires_grad_()

        def attend(*given):
            options = dict(zip(inputs, given, strict=True)) | what
            return burst_attn_func(
                softmax_scale=SCALE, strategy=strategy, process_group=ring, **options
            )

        given = inputs.values()
        out = checkpoint(attend, *given, use_reentrant=False) if again else attend(*given)
        if wanted:
            out.backward(layout.shard(dout, ring.rank))
        return [x.grad for x in given]

    names = ("q", "k", "v", *learned)
    for name, expected, *grads in zip(names, exact, *simulate(2, work), strict=True):
        if name in wanted:
            got = sum(grads) if name in learned else layout.unshard(grads)
            assert relative_error(got, expected) < 1e-10
        else:
            assert grads == [None] * 2


@pytest.mark.parametrize(("layout", "backward"), [*zip(LAYOUTS, ("q", "kv", "kv"), strict=True)])
def test_the_future_does_not_leak(layout, backward):
    """Changing token t and all after it leaves every output before t as it was, bit for bit."""
    tokens, changed = 37, 21
    tensors = random_qkv(1, tokens, 2, 1, 8, torch.float32)
    before = ring_attention(layout, backward, tensors)[:2]
    for x in tensors[:3]:
        x[:, changed:] += 1.0
    after = ring_attention(layout, backward, tensors)[:2]
    assert before[0][:, :changed].equal(after[0][:, :changed])
    assert before[1][:, :, :changed].equal(after[1][:, :, :changed])
    assert not before[0][:, changed:].equal(after[0][:, changed:])


VALUES = [float("nan"), float("inf"), -float("inf")]


def spoilt(tokens, name, at, value, dtype):
    """q, k, v, dout, of which the one called `name` has a value in one entry of some tokens."""
    tensors = random_qkv(1, tokens, 4, 2, 16, dtype, seed=tokens)
    tensors["qkv".index(name)][0, at, 0, 3] = value
    return tensors


@pytest.mark.parametrize("flash", CPU_KERNELS)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["q", "k"])
def test_a_ring_is_nan_where_dense_attention_is(flash, size, name, value):
    for (tokens, dtype), make_mask in itertools.product(
        ((4, torch.float32), (37, torch.bfloat16)), (Mask.full, Mask.causal)
    ):
        for at in (0, tokens // 2):
            tensors, mask = spoilt(tokens, name, at, value, dtype)[:3], make_mask(tokens)
            expected, _ = dense_results(mask, tensors, 16**-0.5)
            out = ring_output(Layout.zigzag(tokens, size), tensors, mask=mask, flash=flash)
            assert out.isnan().equal(expected.isnan()), (tokens, mask, dtype, at)


@pytest.mark.parametrize("flash", CPU_KERNELS)
@pytest.mark.parametrize(("backward", "causal"), [("q", True), ("kv", False)])
@pytest.mark.parametrize("value", VALUES[1:])
def test_gradients_of_a_query_that_is_not_finite_are_nan(flash, backward, causal, value):
    tokens, size = 12, 3
    tensors = spoilt(tokens, "q", 5, value, torch.float32)
    options = {"causal": causal, "backward": backward, "flash": flash}
    *_, dq, dk, dv = ring_results(Layout.zigzag(tokens, size), tensors, 16**-0.5, **options)
    lost = torch.zeros_like(dq, dtype=torch.bool)
    lost[0, 5, 0] = True
    assert dq.isnan().equal(lost)
    seen = slice(0, 6 if causal else tokens)
    assert dk[0, seen, 0].isnan().any(-1).all()
    assert dv[0, seen, 0].isnan().all()
    assert dk[:, :, 1].isfinite().all()


def test_scores_that_overflow_are_as_in_dense_attention():
    """Keys whose score is -inf count for nothing, and a query that sees no others gets NaN."""
    q, k, v, _ = random_qkv(1, 6, 1, 1, 8, torch.float32)
    q[...], k[0, :4] = 1e20, -1e20
    out = ring_output(Layout.contiguous(6, 3), (q, k, v), causal=True)
    assert out[0, :4].isnan().all()
    expected, _ = dense_results(Mask.causal(6), [q, k, v], 8**-0.5)  # fp64 holds all scores
    assert torch.allclose(out[0, 4:].double(), expected[0, 4:])
