"""Autocast: attention casts its inputs as torch's own does, on all ranks alike."""

import copy

import pytest
import torch
import torch.nn.functional as F

from bmt_burst import (
    Cache,
    SequenceParallel,
    burst_attn_func,
    burst_attn_kvpacked_func,
    burst_attn_qkvpacked_func,
    burst_attn_varlen_func,
    shard,
    simulate,
    unshard,
)
from bmt_burst.nn import BurstAttention, rope_tables
from bmt_burst.scores import Scores
from bmt_burst.sequence.mask import Mask
from tests.cases import random_qkv
from tests.reference import relative_error

BF16 = 0.02  # errors are a few of 2^-8
MIXED = (torch.float32, torch.bfloat16, torch.float16, torch.float32)


def inputs(*dtypes, kv_heads=4, tokens=12):
    return [
        x.to(dtype) for x, dtype in zip(random_qkv(2, tokens, 4, kv_heads, 8), dtypes, strict=True)
    ]


def dense(q, k, v, dout):
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def varlen(q, k, v, dout, **options):
    tensors = (x.flatten(0, 1) for x in (q, k, v))
    return burst_attn_varlen_func(*tensors, (0, 12, 24), causal=True, **options).unflatten(
        0, (2, 12)
    )


FUNCTIONS = {
    "dense": lambda q, k, v, dout: burst_attn_func(q, k, v, causal=True),
    "kvpacked": lambda q, k, v, dout: burst_attn_kvpacked_func(
        q, torch.stack((k, v), 2), causal=True
    ),
    "qkvpacked": lambda q, k, v, dout: burst_attn_qkvpacked_func(
        torch.stack((q, k, v), 2), causal=True
    ),
    "varlen": varlen,
}


def results(function, tensors, dtype=None):
    """out, and the gradients of q, k and v, whose backward is outside of autocast."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        out = function(*leaves, tensors[3])
    return out, *torch.autograd.grad(out, leaves, tensors[3].to(out.dtype))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_inputs_are_cast_as_torchs_attention_casts_them(function, dtype):
    tensors = inputs(*[torch.float32] * 4)
    got, theirs = results(FUNCTIONS[function], tensors, dtype), results(dense, tensors, dtype)
    cast = results(FUNCTIONS[function], [x.to(dtype) for x in tensors])
    for mine, other, half in zip(got, theirs, cast, strict=True):
        assert mine.dtype == other.dtype
        assert mine.to(half.dtype).equal(half)
        assert relative_error(mine, other) < BF16


@pytest.mark.parametrize("dtypes", [[torch.float32] * 4, MIXED])
def test_kept_keys_are_cast_too(dtypes):
    """Those of chunks, and of new tokens."""
    *qkv, dout = inputs(*dtypes)
    expected, *_ = results(FUNCTIONS["dense"], [*qkv, dout], torch.bfloat16)
    cache = Cache(None, layers=1, limit=12)
    with torch.autocast("cpu", torch.bfloat16):
        found = [chunk.attend(0, *(x[:, chunk.span] for x in qkv)) for chunk in cache.prefill(9, 5)]
        found.append(cache.attend(0, *(x[:, 9:] for x in qkv)))
    assert {out.dtype for out in found} == {torch.bfloat16}
    assert relative_error(torch.cat(found, 1), expected) < BF16


@pytest.mark.parametrize("function", ["dense", "kvpacked", "varlen"])
def test_inputs_of_several_dtypes_are_of_one_under_autocast(function):
    """Norms and rotary embeddings make fp32 of queries and keys."""
    dtypes = (MIXED[0], MIXED[1], MIXED[1], MIXED[3]) if function == "kvpacked" else MIXED
    tensors = inputs(*dtypes)
    for mine, other in zip(
        *(results(f, tensors, torch.bfloat16) for f in (FUNCTIONS[function], dense)), strict=True
    ):
        assert mine.dtype == other.dtype
        assert relative_error(mine, other) < BF16
    with pytest.raises(TypeError, match="must have one dtype"):
        FUNCTIONS[function](*tensors)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_fp64_stays_fp64(function):
    tensors = inputs(*[torch.float64] * 4)
    got = results(FUNCTIONS[function], tensors, torch.bfloat16)
    expected = results(FUNCTIONS[function], tensors)
    assert all(a.equal(b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: (q.double(), k, v), TypeError, "must have one dtype"),
        (lambda *qkv: (x.long() for x in qkv), TypeError, r"q must be .* got torch\.int64"),
        (lambda *qkv: (x.to("meta") for x in qkv), ValueError, "meta tensors have no values"),
    ],
    ids=["fp64 and others", "whole numbers", "no values"],
)
def test_other_inputs_are_refused_and_not_cast(change, error, message):
    q, k, v, _ = inputs(*[torch.float32] * 4)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(error, match=message):
        burst_attn_func(*change(q, k, v))


def test_a_bias_and_sinks_stay_fp32():
    q, k, v, dout = inputs(*[torch.float32] * 4)
    scores = Scores.by_distance(Mask.causal(12), torch.arange(7, dtype=torch.int32).clamp(max=3))
    learned = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    bias, sinks = learned[0].requires_grad_(), learned[1, 0].detach().requires_grad_()

    def differentiated(*tensors):
        out, lse = burst_attn_func(*tensors, scores=scores, bias=bias, sinks=sinks, return_lse=True)
        return out, lse, *torch.autograd.grad(out, (bias, sinks), dout.to(out.dtype))

    with torch.autocast("cpu", torch.bfloat16):
        got = differentiated(q, k, v)
    assert [x.dtype for x in got] == [torch.bfloat16, *[torch.float32] * 3]
    expected = differentiated(*(x.bfloat16() for x in (q, k, v)))
    assert all(a.equal(b) for a, b in zip(got, expected, strict=True))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"sinks must be torch\.float32 for"),
    ):
        burst_attn_func(q, k, v, sinks=sinks.bfloat16())


def test_a_backward_within_autocast_is_the_same():
    q, k, v, dout = inputs(*[torch.float32] * 4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = burst_attn_func(*leaves)
        within = torch.autograd.grad(out, leaves, dout.bfloat16(), retain_graph=True)
    without = torch.autograd.grad(out, leaves, dout.bfloat16())
    assert all(a.equal(b) for a, b in zip(within, without, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_with_other_settings_all_raise(dtype):
    """Also where attention would be the same: what is around it is not."""

    def work(ring):
        own = (shard(x, ring.rank, 2) for x in inputs(*[dtype] * 4)[:3])
        with torch.autocast("cpu", torch.bfloat16, enabled=ring.rank == 1):
            difference = "rank 0 has None, rank 1 has 'torch.bfloat16'"
            with pytest.raises(ValueError, match=f"ranks differ in autocast: {difference}"):
                burst_attn_func(*own, process_group=ring)
        return True

    assert simulate(2, work) == [True] * 2


@pytest.mark.parametrize("norms", ["none", "as they are", "fp32"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_layer_computes_in_the_dtype_of_autocast(norms, size):
    """Tables of cos and sin are fp32, as are results of RMSNorm in some versions of torch."""
    torch.manual_seed(0)
    layer = BurstAttention(32, 4, 2, sinks=True, qk_norm_eps=None if norms == "none" else 1e-6)
    if norms == "fp32":
        for norm in (layer.q_norm, layer.k_norm):
            norm.register_forward_hook(lambda _module, _inputs, out: out.float())
    seen, x = [], torch.randn(2, 12, 32)
    layer.o_proj.register_forward_pre_hook(lambda _module, given: seen.append(given[0].dtype))
    cos, sin = rope_tables(torch.arange(12), 8)
    expected = layer(x, cos, sin)

    def work(ring):
        of_rank = copy.copy(layer)  # with the same parameters
        of_rank.sp = SequenceParallel(ring.rank, size, process_group=ring)
        return of_rank(
            shard(x, ring.rank, size),
            *(shard(table, ring.rank, size, dim=0) for table in (cos, sin)),
        )

    with torch.autocast("cpu", torch.bfloat16):
        out = unshard(simulate(size, work))
    assert seen == [torch.float32, *[torch.bfloat16] * size]
    assert relative_error(out, expected) < BF16
    grads, exact = (
        torch.autograd.grad(y.float().sum(), [*layer.parameters()]) for y in (out, expected)
    )
    for name, mine, other in zip(dict(layer.named_parameters()), grads, exact, strict=True):
        assert mine.dtype == torch.float32
        # some of them are nearly 0
        assert (mine - other).norm() < 2 * BF16 * max(other.norm(), 1), name
