"""nn.LightningAttention, and nn.BurstAttention without rotary positions and with a gate."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch

from bmt_burst import (
    Cache,
    Chunks,
    Layout,
    Mask,
    SequenceParallel,
    alibi_slopes,
    lightning_attn_func,
    simulate,
)
from bmt_burst.errors import RanksDisagree
from bmt_burst.nn import BurstAttention, LightningAttention, rope_tables
from tests import sala
from tests.refusals import refusal, refusal_of_rank
from tests.rings import on_ranks
from tests.test_sparse import SMALL as SPARSE

EXACT = 1e-12
HF = {"head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
BORDERS = (0, 1, 30, 50)


def randomized(layer):
    """Return a layer in fp64 with random weights, also of its norms."""
    layer = layer.double()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, 0.3 if weight.dim() == 1 else 0.0, 0.3)
    return layer


def inputs(tokens=50, batch=2):
    x = torch.randn(batch, tokens, 32, dtype=torch.float64)
    return x, *rope_tables(torch.arange(tokens), 8)


def test_a_layer_equals_the_released_one():
    """The tables are fp32, so results differ by 1e-7."""
    for layer, expected in (
        (LightningAttention(32, 4), sala.lightning_layer),
        (BurstAttention(32, 4, 2, rotary=False, output_gate=True), sala.sparse_layer),
    ):
        layer = randomized(layer)
        x, *tables = inputs()
        found, exact = layer(x, *tables), expected(layer.state_dict(), HF, x)
        assert (found - exact).abs().max() <= 1e-6 * exact.abs().max()
    names = {name.split(".")[0] for name, _ in LightningAttention(32, 4).named_parameters()}
    of_heads = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert names == of_heads | {"q_norm", "k_norm", "o_norm", "z_proj"}
    plain = LightningAttention(
        32, 4, qk_norm_eps=None, output_norm_eps=None, output_gate=False, rotary=False
    )
    assert {name.split(".")[0] for name, _ in plain.named_parameters()} == of_heads
    assert randomized(plain)(x).shape == x.shape, "without rope_tables"


def test_slopes_are_constants():
    """Numbers of the layer: no dtype of weights, device or file changes them."""
    with torch.device("meta"):
        layer, on_cpu = LightningAttention(32, 4), alibi_slopes(4)
    assert layer.kind.slopes == tuple(on_cpu.tolist())
    assert layer.bfloat16().kind == layer.kind
    assert not [name for name in layer.state_dict() if "slope" in name]
    still = LightningAttention(32, 4, slopes=torch.zeros(4))
    assert still.kind.slopes == (0.0,) * 4


def test_tokens_choose_decays_as_in_simple_gla():
    layer = randomized(LightningAttention(32, 4, rotary=False, gate_logit_normalizer=16))
    x, *_ = inputs()
    heads = [layer.gk_proj.weight, layer.gk_proj.bias]
    log_decay = torch.nn.functional.logsigmoid(torch.nn.functional.linear(x, *heads)) / 16
    attended = lightning_attn_func(*layer.project_all(x, None, None)[:3], log_decay=log_decay)
    assert layer(x).equal(layer.o_proj(layer.gate_heads(attended.flatten(2), x)))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_layers_do_not_depend_on_the_ranks(size):
    mask, layout = Mask.documents(BORDERS), Layout.zigzag(50, size)
    for layer in (
        LightningAttention(32, 4),
        LightningAttention(32, 4, gate_logit_normalizer=16),
        BurstAttention(32, 4, 2, rotary=False, output_gate=True),
    ):
        layer = randomized(layer)
        tensors = inputs()

        def run(sp, layout, layer=layer, tensors=tensors):
            mine = copy.deepcopy(layer)
            mine.attach(sp)
            x, *tables = (
                layout.shard(y, sp.rank, dim) for y, dim in zip(tensors, (1, 0, 0), strict=True)
            )
            out = mine(x.requires_grad_(), *tables, mask=mask, layout=layout)
            grads = torch.autograd.grad(out.square().sum(), [x, *mine.parameters()])
            return out.detach(), *grads

        def work(ring, run=run):
            return run(SequenceParallel(ring.rank, size, process_group=ring), layout)

        exact = run(SequenceParallel(), Layout.zigzag(50, 1))
        found = [*zip(*simulate(size, work), strict=True)]
        whole = [layout.unshard(list(parts)) for parts in found[:2]]
        whole += [sum(parts) for parts in found[2:]]
        for mine, expected in zip(whole, exact, strict=True):
            assert (mine - expected).abs().max() <= EXACT * expected.abs().max()


def test_documents_in_a_row_are_those_alone():
    for layer in (LightningAttention(32, 4), BurstAttention(32, 4, rotary=False)):
        layer, (x, cos, sin) = randomized(layer), inputs()
        packed = layer(x, cos, sin, mask=Mask.documents(BORDERS))
        for start, stop in itertools.pairwise(BORDERS):
            alone = layer(x[:, start:stop], cos[start:stop], sin[start:stop])
            assert (packed[:, start:stop] - alone).abs().max() <= EXACT * alone.abs().max()


@pytest.mark.parametrize("options", [{}, {"gate_logit_normalizer": 2.0}], ids=str)
def test_states_continue_a_whole_forward(options):
    """At one address, which a CUDA graph needs, and in the dtype of sums."""
    layer = randomized(LightningAttention(32, 4, **options))
    (x, cos, sin), cache, pieces, places = inputs(batch=3), Cache(None, 1, 50), [], set()
    for a, b in itertools.pairwise((0, 17, 18, 45, *range(46, 51))):
        pieces.append(layer(x[:, a:b], cos[a:b], sin[a:b], cache))
        places.add(cache._memories[0].states[-1].data_ptr())
    whole = layer(x, cos, sin)
    assert (torch.cat(pieces, 1) - whole).abs().max() <= EXACT * whole.abs().max()
    assert len(places) == 1
    state = cache._memories[0].states[-1]
    assert state.shape == (3, 4, 8, 8) and state.dtype == torch.float64
    half = copy.deepcopy(layer).bfloat16()
    half(x.bfloat16(), cos, sin, cache := Cache(None, 1, 50))
    assert cache._memories[0].states[-1].dtype == torch.float32


def test_layers_without_positions_choose_alike_with_use_nope():
    x, *_ = inputs(batch=1)
    layer = randomized(BurstAttention(32, 4, 2, rotary=False, sparse=SPARSE))
    nope = BurstAttention(
        32, 4, 2, rotary=False, sparse=dataclasses.replace(SPARSE, use_nope=True)
    ).double()
    nope.load_state_dict(layer.state_dict())
    assert nope(x).equal(layer(x))
    assert nope(x, cache=Cache(None, 1, 50)).allclose(layer(x)), "and ask for no other keys"


def test_autocast_computes_in_its_dtype():
    layer = LightningAttention(32, 4)
    x, *tables = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x.float(), *tables)
        cached = layer(x.float(), *tables, Cache(None, 1, 50))
    assert out.dtype == cached.dtype == torch.bfloat16
    assert torch.allclose(out, cached, rtol=0.1, atol=0.05)


def test_wrong_arguments_are_refused():
    for kind, message, options in (
        (ValueError, "num_heads=5 does not divide hidden_size=32", {"num_heads": 5}),
        (ValueError, "even head_dim above 0, got 3", {"head_dim": 3}),
        (ValueError, "qk_norm_eps must be positive", {"qk_norm_eps": 0.0}),
        (ValueError, "output_norm_eps must be positive", {"output_norm_eps": -1.0}),
        (TypeError, "output_gate must be", {"output_gate": 1}),
        (TypeError, "rotary must be", {"rotary": "no"}),
        (ValueError, "gate_logit_normalizer must be positive", {"gate_logit_normalizer": 0}),
        (
            ValueError,
            "expected slopes or gate_logit_normalizer, got both",
            {"gate_logit_normalizer": 16, "slopes": torch.ones(4)},
        ),
        (ValueError, r"slopes must be \(4,\)", {"slopes": torch.ones(3)}),
        (ValueError, "finite and at least 0, got -1.0 for head 0", {"slopes": -torch.ones(4)}),
        (TypeError, "slopes must be torch.float32", {"slopes": torch.ones(4).half()}),
        (TypeError, "slopes must be torch.float32", {"slopes": torch.ones(4).long()}),
        (TypeError, "slopes must be a torch.Tensor, got list", {"slopes": [1.0] * 4}),
    ):
        with pytest.raises(kind, match=message):
            LightningAttention(**{"hidden_size": 32, "num_heads": 4, **options})


def test_wrong_calls_are_refused_on_all_ranks():
    x, cos, sin = inputs(6)
    cases = [
        ((None, cos, cos), {}, "TypeError: x must be a torch.Tensor, got NoneType"),
        ((x, cos, None), {}, "TypeError: sin must be a torch.Tensor, got NoneType"),
        ((x[..., :8], cos, cos), {}, r"ValueError: x must be \(batch, tokens, 32\)"),
        ((x, cos, cos, Cache(None, 1, 6)), {}, "ValueError: expected a Cache of this model's 2"),
        ((x, cos, cos), {"mask": Mask.full(12)}, "ValueError: .*causal documents"),
        ((x, cos, cos), {"wrong": 1}, "TypeError: unexpected keyword argument 'wrong'"),
    ]

    def work(sp):
        layer = LightningAttention(32, 4, sp=sp).double()
        for wrong, named, error in cases:
            with refusal_of_rank(1, sp.rank, error):
                layer(*(wrong if sp.rank else (x, cos, cos)), **(named if sp.rank else {}))
        with refusal("ValueError: .*striped.*zigzag"):
            layer(x, cos, cos, layout="striped")
        return layer(x, cos, cos)

    assert all(out.isfinite().all() for out in on_ranks(2, work))
    layer = LightningAttention(32, 4).double()
    for named in ({"mask": Mask.causal(6)}, {"layout": "zigzag"}):
        with pytest.raises(ValueError, match="expected a Cache or a mask and layout"):
            layer(x, cos, sin, Cache(None, 1, 6), **named)


@pytest.mark.parametrize("part", ["whole", "chunk", "cache"])
def test_what_ranks_divide_the_logits_of_decays_by_is_compared(part):
    def work(sp):
        layer = LightningAttention(
            16, 2, sp=sp, rotary=False, gate_logit_normalizer=8.0 if sp.rank else 16.0
        )
        loop = Chunks(Mask.causal(8), 8, 1, sp).forward(last=True)
        cache = {"whole": None, "chunk": next(loop), "cache": Cache(sp, 1, 8)}[part]
        with pytest.raises(RanksDisagree, match=r"rank 0 has .*16\.0.*, rank 1 has .*8\.0"):
            layer(torch.zeros(1, 4, 16), cache=cache)

    on_ranks(2, work)


def test_wrong_calls_in_a_chunk_are_named_as_attention_of_a_layer():
    def work(sp):
        layer = LightningAttention(16, 2, sp=sp, rotary=False, layer=sp.rank)
        loop = Chunks(Mask.causal(8), 8, 1, sp).forward(last=True)
        with pytest.raises(ValueError) as caught:
            layer(torch.zeros(1, 4, 16), cache=next(loop))
        return str(caught.value)

    reason = "expected a layer below 1 in these Chunks, got 1"
    first, second = on_ranks(2, work)
    assert second == reason
    assert first.endswith(
        f"rank 1 of the group failed before the attention of a layer: ValueError: {reason}"
    )


def test_states_of_other_rows_are_refused():
    layer, cache, (x, *tables) = LightningAttention(32, 4).double(), Cache(None, 1, 99), inputs()
    layer(x, *tables, cache)
    for wrong, message in (
        (x[:1], r"expected q of \(2, 4, 8\) rows, heads and head size.* got \(1, 4, 8\)"),
        (x[:, :0], "the same new tokens, at least one, got 0 and 0"),
    ):
        cut = [table[: wrong.shape[1]] for table in tables]
        with pytest.raises(ValueError, match=message):
            layer(wrong[:, :40], *(t[:40] for t in cut), cache)
    with pytest.raises(ValueError, match=r"torch.float64 on cpu, .* torch.float32 on cpu"):
        layer.float()(x[:, :9].float(), *(t[:9] for t in tables), cache)


@pytest.mark.parametrize("cache", [None, Cache(None, 1, 50)], ids=["whole", "cache"])
def test_the_kernel_that_was_asked_for_is_used_or_refused(cache):
    layer = LightningAttention(32, 4, flash="triton").double()
    with pytest.raises(ValueError, match="no kernel for flash='triton'"):
        layer(*inputs(), cache)


def test_another_length_of_chunks_on_one_rank_is_an_error_on_all():
    """Layers that keep keys compare it with their memory. States reserve none."""

    def work(sp):
        chunks = Chunks(Mask.causal(40), 20, 1, sp, length=99 if sp.rank else None)
        layer, x = LightningAttention(16, 2, sp=sp, rotary=False), torch.zeros(1, 10, 16)
        with pytest.raises(RanksDisagree, match="length of Chunks: rank 0 has None, rank 1 has 99"):
            for chunk in chunks.forward(last=True):
                layer(x, cache=chunk)

    on_ranks(2, work)
