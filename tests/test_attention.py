"""The public function: what it refuses and leaves alone, and what autograd may do with it."""

import inspect
import logging
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from bmt_burst import (
    Layout,
    Mask,
    Scores,
    SequenceParallel,
    burst_attn_func,
    burst_attn_kvpacked_func,
    burst_attn_qkvpacked_func,
    burst_attn_varlen_func,
    nn,
    shard,
    simulate,
    unshard,
)
from bmt_burst.calls.inputs import unpack_tensor
from bmt_burst.loss import linear_cross_entropy_sum
from bmt_burst.merging.surrogate import surrogate_out
from tests.cases import random_qkv
from tests.reference import dense_results, relative_error
from tests.refusals import TRANSFORMS, refusal, refusal_of_rank, transform
from tests.rings import CPU_KERNELS


def qkv(batch=1, tokens=6, heads=4, kv_heads=2, head_size=8, dtype=torch.float32):
    return random_qkv(batch, tokens, heads, kv_heads, head_size, dtype)[:3]


@pytest.mark.parametrize("size", [1, 3])
def test_packed_tensors_are_views_of_what_is_computed_with(size):
    q, k, v, dout = random_qkv(2, 13, 4, 4, 8)
    kv, qkv = (torch.stack(x, 2) for x in ((k, v), (q, k, v)))

    def work(ring):
        given = {"causal": True, "process_group": ring, "return_lse": True}
        own, *packed, mine = (
            shard(x, ring.rank, ring.size).requires_grad_() for x in (q, k, v, kv, qkv, dout)
        )
        tensors, (own_kv, own_qkv) = (own, *packed[:2]), packed[2:]
        calls = [
            (burst_attn_func(*tensors, 0.3, "auto", **given), tensors),
            (burst_attn_kvpacked_func(own, own_kv, 0.3, "auto", **given), (own, own_kv)),
            (burst_attn_qkvpacked_func(own_qkv, 0.3, "auto", **given), (own_qkv,)),
        ]
        return [
            (out.detach(), lse, *torch.autograd.grad(out, leaves, mine.detach()))
            for (out, lse), leaves in calls
        ]

    for plain, of_kv, of_qkv in simulate(size, work):
        out, lse, *grads = plain
        for mine, alike in ((of_kv, (out, lse, grads[0], torch.stack(grads[1:], 2))),
                            (of_qkv, (out, lse, torch.stack(grads, 2)))):  # fmt: skip
            assert all(x.equal(y) for x, y in zip(mine, alike, strict=True))
    assert all(x._base is qkv for x in unpack_tensor("qkv", qkv, 3))


def test_what_is_not_packed_is_an_error_on_all_ranks():
    q, k, _, _ = random_qkv(1, 4, 2, 2, 8)

    def work(ring):
        with pytest.raises(ValueError) as error:
            burst_attn_kvpacked_func(
                q, k if ring.rank else torch.stack([k, k], 2), process_group=ring
            )
        return str(error.value)

    other, wrong = simulate(2, work)
    assert wrong == "kv must be (..., tokens, 2, heads, head size), got shape (1, 4, 2, 8)"
    assert "rank 1 of the group failed" in other
    with pytest.raises(ValueError, match=r"qkv must be \(..., tokens, 3, heads, head size\)"):
        burst_attn_qkvpacked_func(q)
    with pytest.raises(TypeError, match=r"qkv must be a torch\.Tensor"):
        burst_attn_qkvpacked_func([q, k, k])
    with pytest.raises(TypeError, match="wrong"):
        burst_attn_qkvpacked_func(q, wrong=1)


def test_values_with_heads_of_their_own():
    """The default scale is that of q and k as they are passed, not as they are padded."""
    for size, value_size in ((6, 4), (4, 6)):
        q, k, v = qkv()
        q, k, v = q[..., :size], k[..., :size], v[..., :value_size]
        exact, exact_lse = dense_results(Mask.causal(6), [q, k, v], size**-0.5)
        out, lse = burst_attn_func(q, k, v, causal=True, return_lse=True)
        packed = burst_attn_varlen_func(q[0], k[0], v[0], (0, q.shape[1]), causal=True)
        assert out.is_contiguous() and packed.is_contiguous()  # callers join heads by view
        for mine, expected in ((out, exact), (lse, exact_lse), (packed, exact[0])):
            assert mine.shape == expected.shape
            assert relative_error(mine, expected) < 1e-5  # fp32 rounds at 6e-8

    def work(ring):
        x = torch.zeros(1, 3, 2, 8)
        burst_attn_func(x, x, x[..., : 8 - ring.rank], process_group=ring)

    with pytest.raises(ValueError, match="ranks differ in head size of v: rank 0 has 8, rank 1"):
        simulate(2, work)


WRONG_TENSORS = [
    (lambda q, k, v: (q.tolist(), k, v), "TypeError: q must be a torch.Tensor, got list"),
    (lambda q, k, v: (q[0], k, v), r"ValueError: q must be \(batch, .* got shape \(6, 4, 8\)"),
    (lambda q, k, v: (q.long(), k, v), "TypeError: q must be fp16, .* fp64, got torch.int64"),
    (lambda q, k, v: (q, k.double(), v), "TypeError: one dtype"),
    (lambda q, k, v: (q, k, v.to("meta")), "ValueError: one device"),
    (lambda q, k, v: (q, k, v[:, :-1]), "ValueError: k and v must have the same batch, tokens"),
    (lambda q, k, v: (q.repeat(2, 1, 1, 1), k, v), "ValueError: q and k differ in batch"),
    (lambda q, k, v: (q[..., :-1], k, v), "ValueError: q and k differ in head size"),
    (lambda q, k, v: (q[:, :, :3], k, v), "ValueError: k has 2 heads, which does not divide q's 3"),
    (lambda q, k, v: [x[:, :, :0] for x in (q, k, v)], "ValueError: q must have batch, .* above 0"),
    (lambda q, k, v: (q.to_sparse(), k, v), "TypeError: q must be a dense tensor"),
    (lambda q, k, v: (torch.nested.nested_tensor(list(q)), k, v), "TypeError: q must be a dense"),
    (lambda q, k, v: [x.to("meta") for x in (q, k, v)], "ValueError: reference: meta tensors have"),
]
SCORES = Scores.by_distance(Mask.causal(12), torch.zeros(1, dtype=torch.int32))
BIASED = {"scores": SCORES, "bias": torch.zeros(1, 4)}
WRONG_OPTIONS = [
    ({"flash": "triton"}, "ValueError: no kernel for flash='triton'"),
    ({"flash": "fast"}, "ValueError: expected flash to be one of .*, got 'fast'"),
    ({"flash": None}, "TypeError: flash must be the name of a kernel, got None"),
    ({"layout": "ring"}, "ValueError: unknown layout 'ring'"),
    ({"backward": "v"}, "ValueError: unknown backward 'v'"),
    ({"causal": torch.tensor(True)}, "TypeError: causal must be True or False, got a Tensor"),
    ({"causal": "yes"}, "TypeError: causal must be True or False, got 'yes'"),
    ({"softmax_scale": torch.tensor(0.5)}, "TypeError: softmax_scale must .* Tensor .*its item"),
    ({"softmax_scale": True}, "TypeError: softmax_scale must be a number, got True"),
    ({"softmax_scale": float("nan")}, "ValueError: softmax_scale must be .* finite, got nan"),
    ({"softmax_scale": 1e39}, r"ValueError: softmax_scale=1e\+39 is infinite in float32, in which"),
    ({"softmax_scale": 1e-39}, "ValueError: softmax_scale=1e-39 is zero in float32, in which"),
    ({"group_bytes": 2.0}, "TypeError: group_bytes must be a whole number, got 2.0"),
    ({"group_bytes": -1}, "ValueError: group_bytes must be a number of bytes below 2"),
    ({"softmax_scale": 0}, "ValueError: softmax_scale must be positive and finite, got 0"),
    ({"softcap": 0}, "ValueError: softcap must be positive and finite, got 0.0"),
    ({"softcap": math.nan}, "ValueError: softcap must be positive and finite, got nan"),
    ({"softcap": "50"}, "TypeError: softcap must be a number, got '50'"),
    ({"softcap": True}, "TypeError: softcap must be a number, got True"),
    ({"softcap": 1e-40}, "ValueError: softcap=1e-40, or softmax_scale=.* is zero or infinite"),
    ({"softcap": 1e38, "softmax_scale": 1e-10}, r"ValueError: softcap=1e\+38, or .* divided by it"),
    ({"softcap": 3.0, **BIASED}, "ValueError: expected softcap or a bias, got both"),
    ({"softcap": 2.0, "flash": "cpu"}, "ValueError: cpu: it does not support a softcap"),
    ({"sinks": [0.0, 0.0]}, "TypeError: sinks must be a torch.Tensor, got list"),
    ({"sinks": torch.zeros(3)}, r"ValueError: sinks must be \(4,\), one .*, got shape \(3,\)"),
    ({"sinks": torch.zeros(3, 4)}, r"ValueError: \(3, 4\): .* equal one, sinks.logsumexp\(0\)"),
    ({"sinks": torch.zeros(4).bfloat16()}, "TypeError: sinks must be torch.float32 for"),
    ({"sinks": torch.zeros(4, device="meta")}, "ValueError: sinks must be on q's device, .* meta"),
]


@pytest.mark.parametrize(("change", "error"), WRONG_TENSORS)
def test_wrong_tensors_are_refused(change, error):
    with refusal(error):
        burst_attn_func(*change(*qkv()))


@pytest.mark.parametrize(("options", "error"), WRONG_OPTIONS)
def test_wrong_options_of_one_rank_are_an_error_on_all(options, error):
    def work(ring):
        with refusal_of_rank(1, ring.rank, error):
            burst_attn_func(*qkv(), process_group=ring, **(options if ring.rank else {}))

    simulate(2, work)


def test_tensors_without_values_of_their_own_are_refused(one_process):
    mesh = init_device_mesh("cpu", (1,))
    dtensors = [distribute_tensor(x, mesh, [Shard(1)]) for x in qkv()]
    with pytest.raises(
        TypeError,
        match=r"q must be a plain tensor, a DTensor has no values of its own: give its to_local",
    ):
        burst_attn_func(*dtensors)
    assert burst_attn_func(*(x.to_local() for x in dtensors)).shape == (1, 6, 4, 8)
    with pytest.raises(TypeError, match="hidden must be a plain tensor, a DTensor"):
        linear_cross_entropy_sum(
            dtensors[0], torch.zeros(3, 8), torch.zeros(1, 6, 4, dtype=torch.int64)
        )
    fakes = list(map(FakeTensorMode().from_tensor, qkv()))
    with refusal("TypeError: q must be a plain tensor, a FakeTensor has no values of its own"):
        burst_attn_func(*fakes)


def test_numbers_of_numpy_are_numbers():
    """Also where another rank has Python's."""

    def work(ring):
        plain = {"softmax_scale": 0.5, "causal": True, "deterministic": False, "group_bytes": 4096}
        numpy = {"softmax_scale": np.float32(0.5), "causal": np.True_, "deterministic": np.False_}
        numpy["group_bytes"] = np.int64(4096)
        options = numpy if ring.rank else plain
        return burst_attn_func(*qkv(), process_group=ring, **options)

    first, second = simulate(2, work)
    assert first.shape == second.shape


@pytest.mark.parametrize("flash", CPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_scale_is_computed_with_or_refused(flash, dtype):
    """The dtype in which scores are scaled counts: fp16 takes scales above its largest number."""
    q, k, v = qkv(dtype=dtype)
    # Their products stay normal numbers below: some CPUs take others as zero in products of bf16.
    q, k = q.sign(), k.sign()
    for scale in (1e-300, 1e-39, 1e-30, 1e-10, 1e5, 1e30, 1e38, 3e38, 1e39, 1e300):
        tiny = 4.0 / scale if scale > 1 else 1.0  # of scores that are moderate once they are scaled
        if dtype != torch.float64 and not 1e-37 < scale < 2.3e38:
            with refusal(f"ValueError: is (zero|infinite) in float32, in which {dtype} scores"):
                burst_attn_func(q, k, v, scale, flash=flash)
            continue
        out = burst_attn_func(q * tiny**0.5, k * tiny**0.5, v, scale, flash=flash)
        exact, _ = dense_results(Mask.full(6), [q * tiny**0.5, k * tiny**0.5, v], scale)
        assert relative_error(out, exact) < 2e-2, scale


@pytest.mark.parametrize(
    ("rank_2", "message"),
    [
        ({"heads": 2}, "ranks differ in q heads: rank 0 has 4, rank 2 has 2"),
        ({"kv_heads": 1}, "ranks differ in kv heads"),
        ({"head_size": 16}, "ranks differ in head size"),
        ({"dtype": torch.float64}, "ranks differ in dtype"),
        ({"batch": 2}, "ranks differ in batch"),
        ({"tokens": 9}, r"the ranks hold \[6, 6, 9\] tokens, but zigzag cuts 21 into \[7, 7, 7\]"),
        ({"kv_heads": 3}, "k has 3 heads|rank 2 of the group failed before .*: k has 3 heads"),
        ({"causal": False}, "ranks differ in mask or causal: rank 0 has 'causal', rank 2 has 'fu"),
        ({"backward": "q"}, "ranks differ in backward"),
        ({"strategy": "all-gather"}, "ranks differ in strategy"),
        ({"deterministic": True}, "ranks differ in deterministic"),
        ({"group_bytes": 4096}, "ranks differ in group_bytes"),
        ({"softmax_scale": 0.5}, "ranks differ in softmax_scale"),
        ({"layout": "striped"}, "ranks differ in layout"),
        ({"softcap": 30.0}, "ranks differ in softcap: rank 0 has None, rank 2 has 30.0"),
        ({"sinks": torch.zeros(4)}, "ranks differ in sinks: rank 0 has False, rank 2 has True"),
        ({"flash": "reference"}, "ranks differ in the kernel of flash"),
        ({"softmax_scale": 10**400}, "softmax_scale must be finite, got a number of 1329 bits"),
        ({"group_bytes": 10**400}, "group_bytes must be a number of bytes below"),
        ({"grad": True}, "ranks differ in recording of gradients"),
    ],
)
def test_ranks_that_disagree_all_raise(rank_2, message):
    def work(ring):
        changes = rank_2 if ring.rank == 2 else {}
        of_tensors = ("heads", "kv_heads", "head_size", "dtype", "batch", "tokens")
        shape = {name: x for name, x in changes.items() if name in of_tensors}
        options = {name: x for name, x in changes.items() if name not in (*of_tensors, "grad")}
        tensors = [x.requires_grad_("grad" in changes) for x in qkv(**shape)]
        with pytest.raises(ValueError, match=message):
            burst_attn_func(*tensors, process_group=ring, **{"causal": True, **options})
        return True

    assert simulate(3, work) == [True] * 3


def test_groups_are_either_single_or_double():
    def work(ring):
        with pytest.raises(ValueError, match="expected process_group or double_group, got both"):
            burst_attn_func(*qkv(), process_group=ring, double_group=(ring, ring))
        with pytest.raises(ValueError, match="both groups or neither"):
            burst_attn_func(*qkv(), double_group=(ring, None))
        with pytest.raises(TypeError, match="double_group: expected a pair"):
            burst_attn_func(*qkv(), double_group=None)
        with pytest.raises(TypeError, match="expected intra to be a group or a pair"):
            burst_attn_func(*qkv(), double_group=((ring, None), ring))
        pair = ring, ring.subring([ring.rank])
        with pytest.raises(ValueError, match=r"of inter to have the same ranks .* and 0 of 1"):
            burst_attn_func(*qkv(), double_group=(ring, pair))
        with pytest.raises(TypeError, match=r"a ProcessGroup or DeviceMesh .*, a bmtrain .* int"):
            burst_attn_func(*qkv(), process_group=0)

    simulate(2, work)


class Forgetful(torch.autograd.Function):
    """The identity of x, without a gradient on some ranks."""

    @staticmethod
    def forward(ctx, x, forgets):
        ctx.forgets = forgets
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None if ctx.forgets else grad, None


def test_a_rank_without_a_gradient_of_out_takes_part_in_the_backward():
    q, k, v, dout = (torch.randn(1, 9, 2, 8, dtype=torch.float64) for _ in range(4))
    layout = Layout.contiguous(9, 3)

    def work(ring):
        mine = [layout.shard(x, ring.rank).requires_grad_() for x in (q, k, v)]
        out = burst_attn_func(*mine, causal=True, layout=layout, process_group=ring)
        out = Forgetful.apply(out, ring.rank == 1)
        return torch.autograd.grad(out, mine, layout.shard(dout, ring.rank))

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    dout[:, 3:6] = 0
    expected = torch.autograd.grad(burst_attn_func(*inputs, causal=True), inputs, dout)
    for i, grads in enumerate(zip(*simulate(3, work), strict=True)):
        assert torch.allclose(layout.unshard(list(grads)), expected[i])


@pytest.mark.parametrize("backward", ["q", "kv"])
def test_one_tensor_may_be_query_key_and_value_and_gradients_may_be_views(backward):
    """q, k, v and their gradients share memory. The output's gradient is an expanded scalar."""
    x = random_qkv(1, 10, 2, 2, 8)[0]
    _, _, *grads = dense_results(Mask.full(10), [x, x, x, torch.ones_like(x)], 8**-0.5)

    def work(ring):
        mine = x[:, ring.rank * 5 : ring.rank * 5 + 5].clone().requires_grad_()
        out = burst_attn_func(
            mine, mine, mine, layout="contiguous", backward=backward, process_group=ring
        )
        out.sum().backward()
        return mine.grad

    assert relative_error(torch.cat(simulate(2, work), 1), sum(grads)) < 1e-12


def test_second_derivatives_on_one_rank_are_refused_on_all():
    def work(ring):
        inputs = [x.requires_grad_() for x in qkv()]
        out = burst_attn_func(*inputs, process_group=ring)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            torch.autograd.grad(out.sum(), inputs, create_graph=ring.rank == 1)
        out = burst_attn_func(*inputs, process_group=ring)
        assert len(torch.autograd.grad(out.sum(), inputs)) == 3
        return str(caught.value)

    first, second = simulate(2, work)
    assert first.startswith(
        "rank 1 of the group failed before the backward of call 1: RuntimeError: burst_attn_func is"
    )
    assert second.startswith("burst_attn_func is differentiable once")


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transforms_on_one_rank_are_refused_on_all(kind):
    q, message = qkv()[0], TRANSFORMS[kind].format("burst_attn_func")

    def work(ring):
        x = q.clone()

        def attend(x):
            return burst_attn_func(x, x, x, process_group=ring)

        with pytest.raises((RuntimeError, ValueError)) as caught:
            if ring.rank:
                transform(kind, attend, x)
            else:
                out = attend(x.requires_grad_(kind == "batched gradients"))
                out.sum().backward()
        assert attend(q).shape == q.shape
        return str(caught.value)

    first, second = simulate(2, work)
    assert message in first
    assert first.startswith("rank 1 of the group failed before ")
    assert second.startswith(message)


@pytest.mark.parametrize("kind", ["separate", "kv", "qkv", "varlen"])
def test_arguments_that_do_not_fit_on_one_rank_are_an_error_on_all(kind):
    q, k, v = qkv(kv_heads=4)
    function, *tensors = {
        "separate": (burst_attn_func, q, k, v),
        "kv": (burst_attn_kvpacked_func, q, torch.stack((k, v), 2)),
        "qkv": (burst_attn_qkvpacked_func, torch.stack((q, k, v), 2)),
        "varlen": (burst_attn_varlen_func, q[0], k[0], v[0], (0, 12)),
    }[kind]
    cases = [
        (tensors, {"wrong": 1}, rf"{function.__name__}\(\) .*argument 'wrong'"),
        (tensors, {"window_size": (3, 0)}, r"argument 'window_size': .*\(left, 0\) is window"),
        (tensors[:-1], {}, rf"{function.__name__}\(\) missing"),
        ((*tensors, 0.5), {"softmax_scale": 0.5}, "multiple values"),
    ]

    def work(ring):
        for args, named, reason in cases:
            args, named = (args, named) if ring.rank else (tensors, {})
            with refusal_of_rank(1, ring.rank, f"TypeError: {reason}"):
                function(*args, process_group=ring, **named)
        return function(*tensors, process_group=ring)

    assert all(out.isfinite().all() for out in simulate(2, work))


def test_wrong_inputs_of_a_layer_on_one_rank_are_an_error_on_all():
    x, cos = torch.randn(1, 6, 32), torch.ones(6, 4)
    cases = [
        ((None, cos, cos), "TypeError: x must be a torch.Tensor, got NoneType"),
        ((x, cos, None), "TypeError: sin must be a torch.Tensor, got NoneType"),
        ((x[0], cos, cos), r"ValueError: x must be \(batch, tokens, 32\), got shape \(6, 32\)"),
        ((x[..., :8], cos, cos), r"ValueError: x must be \(batch, tokens, 32\), .*\(1, 6, 8\)"),
        ((x, cos[:1], cos), r"ValueError: cos must be \(..., 6, 4\), .* got shape \(1, 4\)"),
        ((x.double(), cos, cos), "RuntimeError: dtype"),
        ((x, cos, cos, object()), "TypeError: cache must be a chunk of bmt_burst.Chunks or a bm"),
        ((x, cos, cos), "TypeError: unexpected keyword argument 'wrong'"),
    ]

    def work(ring):
        layer = nn.BurstAttention(32, 4, sp=SequenceParallel(ring.rank, 2, process_group=ring))
        for wrong, error in cases:
            with refusal_of_rank(1, ring.rank, error):
                named = {"wrong": 1} if "'wrong'" in error and ring.rank else {}
                layer(*(wrong if ring.rank else (x, cos, cos)), **named)
        return layer(x, cos, cos)

    assert all(out.isfinite().all() for out in simulate(2, work))
    names = list(inspect.signature(nn.BurstAttention.forward).parameters)
    assert names == ["self", "x", "cos", "sin", "cache", "mask", "layout"]


def test_signatures_show_all_arguments():
    """The first ten are BurstAttention's own, in its order."""
    own = list(inspect.signature(burst_attn_func).parameters)
    official = "q k v softmax_scale flash causal optimize_bwd_comm deterministic process_group"
    assert own[:10] == [*official.split(), "double_group"]
    assert list(inspect.signature(burst_attn_kvpacked_func).parameters) == ["q", "kv", *own[3:]]
    assert list(inspect.signature(burst_attn_qkvpacked_func).parameters) == ["qkv", *own[3:]]
    varlen = inspect.signature(burst_attn_varlen_func).parameters
    assert {"strategy", "group_bytes", "window"} <= set(varlen)
    assert all(x.kind is not x.VAR_KEYWORD for x in varlen.values())


def test_auto_logs_once_which_kernel_it_took(caplog):
    from bmt_burst import kernels

    kernels._announce.cache_clear()
    with caplog.at_level(logging.INFO, logger="bmt_burst"):
        for tokens in (101, 102, 101):  # of which no call was made before
            burst_attn_func(*qkv(tokens=tokens))
    assert [r.getMessage() for r in caplog.records] == [
        "flash='auto' took the cpu kernel for torch.float32 on cpu"
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("magnitude", "head_size"), [(1e-30, 16), (1.0, 16), (1e30, 16), (1.0, 2), (1.0, 80)]
)
def test_surrogate_out_has_the_right_delta(magnitude, head_size, dtype):
    """To far less than o' is rounded to, except for tiny numbers of fp16 and two entries."""
    dout = random_qkv(2, 5, 3, 3, head_size, dtype)[3]
    if dtype == torch.float16:
        magnitude = 1.0
    dout = dout * magnitude
    dout[0, 0] = 0
    dout[1, 1, :, 1:] = 0
    delta = torch.randn(2, 3, 5) * magnitude
    delta[0, :, 0] = 0
    delta[1, :, 1] = 0.375 * dout[1, 1, :, 0].float()  # an out in dout's dtype has that one
    out = surrogate_out(dout, delta)
    assert out.dtype == dtype
    assert out.isfinite().all()
    got = (out.double() * dout.double()).sum(-1).transpose(1, 2)
    bound = 2e-5 if head_size == 2 else 1e-6
    assert relative_error(got, delta) < bound


@pytest.mark.parametrize(("size", "scale"), [(2, 500.0), (4, 10.0)])
def test_a_saturated_softmax_has_the_gradients_of_one_rank(size, scale):
    """dq and dk are what cancellation leaves: a delta rounded to bf16 would be most of it."""
    *inputs, dout = random_qkv(1, 64, 4, 4, 32, torch.bfloat16)
    _, _, *exact = dense_results(Mask.causal(64), [*inputs, dout], scale)

    def errors(ranks):
        def work(ring):
            shards = [shard(x, ring.rank, ranks).requires_grad_() for x in inputs]
            out = burst_attn_func(
                *shards, scale, "cpu", causal=True, backward="q", process_group=ring
            )
            return torch.autograd.grad(out, shards, shard(dout, ring.rank, ranks))

        grads = zip(*simulate(ranks, work), strict=True)
        return [
            relative_error(unshard(mine), expected)
            for mine, expected in zip(grads, exact, strict=True)
        ]

    assert all(mine < 1.2 * alone for mine, alone in zip(errors(size), errors(1), strict=True))


@pytest.mark.parametrize("size", [1, 3])
def test_a_policy_of_activation_checkpointing_may_save_what_kernels_return(size):
    def policy(_context, operation, *_args, **_options):
        return (
            CheckpointPolicy.MUST_SAVE
            if "attention" in str(operation)
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def work(ring):
        *inputs, dout = (
            shard(x, ring.rank, size) for x in random_qkv(1, 24, 4, 2, 8, torch.bfloat16)
        )
        inputs = [x.requires_grad_() for x in inputs]

        def attend(*qkv):
            return burst_attn_func(*(x * 1.5 for x in qkv), causal=True, process_group=ring)

        contexts = partial(create_selective_checkpoint_contexts, policy)
        outs = (
            attend(*inputs),
            checkpoint(attend, *inputs, use_reentrant=False, context_fn=contexts),
        )
        plain, selective = ([out, *torch.autograd.grad(out, inputs, dout)] for out in outs)
        return all(a.equal(b) for a, b in zip(plain, selective, strict=True))

    assert all(simulate(size, work))
