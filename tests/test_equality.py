"""The ring: gradients that are not wanted, and tokens that nobody may see.

tests/conformance compares every strategy with dense attention.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bmt_burst import Layout, burst_attn_func, simulate
from bmt_burst.bias import areas
from bmt_burst.sequence.layout import LAYOUTS
from tests.cases import random_qkv
from tests.reference import dense_results, relative_error
from tests.rings import ring_results
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
