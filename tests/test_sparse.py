"""InfLLM-V2: its choice of blocks, what excludes it, what recomputations keep, and its layers.

tests/conformance/test_extensions.py compares its attention with the definition, on many ranks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import random
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bmt_burst import (
    Cache,
    Chunks,
    InfLLMV2,
    Layout,
    Mask,
    burst_attn_func,
    burst_attn_kvpacked_func,
    burst_attn_varlen_func,
    kernels,
    simulate,
    strategies,
)
from bmt_burst.base import kept
from bmt_burst.blocks.far import packed_dtype
from bmt_burst.nn import BurstAttention, rope_tables
from bmt_burst.ranks.rings import Rings
from bmt_burst.ranks.sequence_parallel import SequenceParallel
from bmt_burst.sparse import Choices, choose, compressed, keep_choices
from bmt_burst.sparse.choice import choose_in_document
from bmt_burst.sparse.compressed import compress, sum_strides
from bmt_burst.sparse.plan import SparsePlan
from bmt_burst.spec import Spec
from bmt_burst.transport import ALONE
from tests.cases import made_layout, random_qkv
from tests.reference import assert_close
from tests.rings import ring_results
from tests.sparse import RELEASED, Case, chosen_blocks, oracle, random_case, record_choices

SMALL = InfLLMV2(
    block_size=4, kernel_size=4, kernel_stride=2, init_blocks=1, window_size=8, topk=3, dense_len=-1
)
BY_OTHERS = dataclasses.replace(SMALL, use_nope=True)
KEYS = torch.ones(1, 32, 1, 8, dtype=torch.float64)
QUERIES = KEYS.expand(1, 32, 2, 8)
# float64 sums of some hundred terms of about 1
EXACT = 1e-13


def make_inputs(case: Case, seed: int = 0, batch: int = 1):
    return random_qkv(
        batch, case.cu_seqlens[-1], case.heads, case.kv_heads, case.head_size, seed=seed
    )


def lse_gradient(dout):
    """Return a gradient of lse (B, H, S)."""
    return dout[..., 0].transpose(1, 2)


def attend(layout, tensors, inner=None, **options):
    """Return out, lse, dq, dk and dv of simulated ranks, for whole sequences."""
    given = {"causal": "mask" not in options, "dlse": lse_gradient(tensors[-1])}
    return ring_results(layout, tensors, tensors[0].shape[-1] ** -0.5, inner, **given | options)


def expected(tensors, cu_seqlens, sparse):
    """Return the results of `attend`, from the definition."""
    *leaves, dout = tensors
    leaves = [x.clone().requires_grad_() for x in leaves]
    rows = [oracle(*row, cu_seqlens, sparse) for row in zip(*leaves, strict=True)]
    out, lse = (torch.stack(parts) for parts in zip(*rows, strict=True))
    grads = torch.autograd.grad((out, lse), leaves, (dout, lse_gradient(dout)))
    return out.detach(), lse.detach(), *grads


def check(got, exact, tensors, bound=EXACT, what=None):
    assert_close(got, exact, tensors[-1], tensors[0].shape[-1] ** -0.5, bound, what)


@pytest.mark.parametrize("seed", range(5))
def test_choices_are_those_of_the_definition(seed):
    case = random_case(random.Random(seed))
    q, k, *_ = make_inputs(case, seed)
    found = choose(q, k, Mask.documents(case.cu_seqlens), case.sparse)
    assert found.dtype == torch.int32
    assert found.shape == (1, q.shape[1], case.kv_heads, case.sparse.most_blocks)
    scale = case.head_size**-0.5
    exact = chosen_blocks(q[0], k[0], case.cu_seqlens, case.sparse, scale)
    for row, of_query in zip(found[0].tolist(), exact, strict=True):
        padded = [[*blocks, *[-1] * (len(row[0]) - len(blocks))] for blocks in of_query]
        assert row == padded


@pytest.mark.parametrize("seed", range(3))
def test_calls_of_short_documents_are_dense(seed):
    """The longest document of the call decides, whichever ranks have it. Bits are equal."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, 50) for _ in range(chance.randint(1, 4))] + [50]
    chance.shuffle(lengths)
    cu_seqlens = tuple(itertools.accumulate(lengths, initial=0))
    mask, size = Mask.documents(cu_seqlens), chance.randint(1, 4)
    tensors = random_qkv(1, cu_seqlens[-1], 2, 1, 8, seed=seed)
    layout = made_layout(chance.choice(("zigzag", "striped", "balanced")), mask, size)
    dense = attend(layout, tensors, mask=mask)
    sparse = attend(layout, tensors, mask=mask, sparse=SMALL)
    for dense_len, expected in ((50, sparse), (51, dense)):
        constants = dataclasses.replace(SMALL, dense_len=dense_len)
        got = attend(layout, tensors, mask=mask, sparse=constants)
        assert all(a.equal(b) for a, b in zip(got, expected, strict=True))
    assert not sparse[0].equal(dense[0])
    q, k, *_ = tensors
    with pytest.raises(ValueError, match="dense_len=51 tokens, got at most 50: this call is dense"):
        choose(q, k, mask, constants)


def choose_on_a_rank(ring, layout, q, k, mask):
    """Return the blocks that a call keeps, from keys in any spans, and queries' positions."""
    problem = strategies.Problem(
        mask=mask,
        layout=layout,
        spec=Spec(q.shape[-1] ** -0.5),
        kernel=kernels.load("reference"),
        sizes=strategies.Sizes(1, q.shape[2], k.shape[2], q.shape[3], q.dtype, partial=q.dtype),
        inner=ring.size,
        outer=1,
    )
    q, k = (layout.shard(x, ring.rank) for x in (q, k))
    rings, found = Rings(ring, ALONE), []
    for span_bytes in (0, 5000, 1 << 30):
        near = strategies.load("ring").plan(problem, ring.rank)
        plan = SparsePlan(problem, SMALL, ring.rank, near, span_bytes)
        plan.reserve(rings, q.device, with_backward=False)
        found.append(plan.choose(rings, q, k).int())
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])
    return found[0], layout.positions(ring.rank)[plan.choosers.tokens]


DTYPES = [torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_choice_is_the_same_on_any_ranks_bit_for_bit(dtype):
    """With ties: keys repeat, and a kernel overlaps two blocks. A dtype has half of the layouts."""
    q, k = (x.to(dtype) for x in random_qkv(1, 123, 8, 2, 24)[:2])
    k[:, 32:64] = k[:, :32]
    mask = Mask.documents((0, 20, 123))
    alone = choose(q, k, mask, SMALL)
    names = "zigzag", "striped", "contiguous", "balanced"
    for number, size in enumerate((2, 3, 4, 8), 2 * DTYPES.index(dtype)):
        layout = made_layout(name := names[number % 4], mask, size)
        work = functools.partial(choose_on_a_rank, layout=layout, q=q, k=k, mask=mask)
        later = []
        for got, positions in simulate(size, work):
            assert got.equal(alone[:, positions, :, : SMALL.topk]), (size, name)
            later += positions.tolist()
        assert sorted(later) == [*range(20 + SMALL.exact_tokens, 123)]


def test_a_choice_keeps_no_tensors():
    q, k, *_ = random_qkv(1, 64, 2, 1, 8)
    [row] = q
    kept = weakref.ref(row)
    choose_in_document(row, torch.arange(64), compress(sum_strides(k[0], SMALL), SMALL), SMALL, 1.0)
    del row
    assert kept() is None


@pytest.mark.parametrize(("most", "width"), [(32768, 2), (32769, 4)])
def test_kept_numbers_of_blocks_fit_their_dtype(most, width):
    """Half the memory is enough if all numbers have 16 bits."""
    kept = torch.tensor([0, most - 1, -1], dtype=torch.int32).to(packed_dtype(most))
    assert kept.element_size() == width
    assert kept.tolist() == [0, most - 1, -1]


def test_autocast_does_not_change_the_choice():
    """Its scores are summed in fp32, as without autocast."""
    q, k, v = (x.bfloat16() for x in random_qkv(1, 300, 4, 2, 16)[:3])
    layer = BurstAttention(32, 4, 2, 8, sparse=SMALL).bfloat16()
    x, tables = torch.randn(1, 300, 32, dtype=torch.bfloat16), rope_tables(torch.arange(300), 8)

    def results():
        attended = burst_attn_func(q, k, v, causal=True, sparse=SMALL)
        with torch.no_grad():
            generated = layer(x, *tables, Cache(None, 1, 300))
        return choose(q, k, Mask.causal(300), SMALL), attended, generated

    plain = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for got, expected in zip(results(), plain, strict=True):
            assert got.equal(expected)


def test_packed_and_varlen_functions_are_sparse_too():
    q, k, v, _ = random_qkv(1, 64, 2, 1, 8)
    exact, _ = oracle(q[0], k[0], v[0], (0, 20, 64), SMALL)
    got = burst_attn_varlen_func(q[0], k[0], v[0], (0, 20, 64), causal=True, sparse=SMALL)
    assert (got - exact).abs().max() < EXACT
    whole = burst_attn_func(q, k, v, causal=True, sparse=SMALL)
    packed = burst_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True, sparse=SMALL)
    assert packed.equal(whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparse": 3}, "sparse must be an Extension, such as InfLLMV2(), got int"),
        ({"choose_by": (torch.ones(1), torch.ones(1))}, "expected queries of choose_by of shape"),
        ({"choose_by": torch.ones(1)}, "choose_by must be a pair of queries and keys, got Tensor"),
        (
            {"sparse": BY_OTHERS} | {"choose_by": (QUERIES, QUERIES)},
            "keys of choose_by of shape (1, 32, 1",
        ),
        (
            {"sparse": BY_OTHERS} | {"choose_by": (QUERIES, KEYS.long())},
            "must be floating point, got torch",
        ),
        ({"strategy": "ulysses"}, "ulysses"),
    ],
)
def test_wrong_calls_raise_on_all_ranks(options, message):
    q, k, v, _ = random_qkv(1, 32, 2, 1, 8)

    def work(ring):
        wrong = options if ring.rank else {}
        with pytest.raises(ValueError if ring.rank == 0 else (TypeError, ValueError)) as caught:
            burst_attn_func(
                q, k, v, process_group=ring, **{"causal": True, "sparse": SMALL, **wrong}
            )
        return str(caught.value)

    for error in simulate(2, work):
        assert message in error


@pytest.mark.parametrize(
    ("q", "k", "scale", "message"),
    [
        (torch.zeros(9, 2, 8), torch.zeros(9, 1, 8), -1.0, "softmax_scale must be positive"),
        (torch.zeros(9, 2, 8), torch.zeros(9, 1, 8), "1", "softmax_scale must be a number"),
        (torch.zeros(9, 2, 8), torch.zeros(9, 0, 8), None, "at least one head in k"),
        (torch.zeros(0, 9, 2, 8), torch.zeros(0, 9, 1, 8), None, "got shapes"),
        (torch.zeros(9, 2, 8), torch.zeros(9, 1, 8).double(), None, "one floating point dtype"),
        (torch.zeros(9, 2, 8).int(), torch.zeros(9, 1, 8).int(), None, "one floating point dtype"),
    ],
)
def test_what_cannot_be_chosen_by_is_refused(q, k, scale, message):
    with pytest.raises((TypeError, ValueError), match=message):
        choose(q, k, Mask.causal(9), SMALL, softmax_scale=scale)


def test_ranks_must_all_keep_their_choices_or_none():
    """Otherwise one would choose again, and wait for the keys of the others."""
    tensors = random_qkv(1, 32, 2, 1, 8)[:3]

    def work(ring):
        leaves = [x.clone().requires_grad_() for x in tensors]
        options = {"context_fn": keep_choices} if ring.rank else {}
        out = checkpoint(
            lambda *qkv: burst_attn_func(*qkv, causal=True, process_group=ring, sparse=SMALL),
            *leaves,
            use_reentrant=False,
            **options,
        )
        with pytest.raises(ValueError, match="ranks differ in"):
            out.sum().backward()

    simulate(2, work)


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"topk": 1}, "topk of at least init_blocks [+] 1 = 2, got 1"),
        ({"window_size": 100}, "window_size to be a multiple of block_size=64, got 100"),
        ({"kernel_size": 64}, "kernel_size = 2 [*] kernel_stride = 32, got 64"),
        ({"block_size": 40}, "block_size to be a multiple of kernel_stride=16, got 40"),
        ({"dense_len": -2}, "dense_len of at least -1"),
        ({"init_blocks": -1}, "init_blocks of at least 0"),
        ({"window_size": 0}, "window_size of at least 1"),
        ({"topk": 2.5}, "topk must be a whole number"),
        ({"use_nope": 1}, "use_nope must be True or False"),
    ],
)
def test_wrong_constants_are_refused(constants, message):
    with pytest.raises((TypeError, ValueError), match=message):
        InfLLMV2(**constants)


def test_constants_are_those_of_a_config_and_print():
    assert InfLLMV2.from_dict(RELEASED) == InfLLMV2()
    assert InfLLMV2().to_dict() == RELEASED
    assert "topk=64" in str(InfLLMV2())
    with pytest.raises(ValueError, match=r"got \['top_k'\]"):
        InfLLMV2.from_dict({"top_k": 3})


@pytest.fixture
def chosen(monkeypatch):
    return record_choices(monkeypatch)


class Residual(torch.nn.Module):
    """A layer without weights, whose attention keeps its choices in `choices`, if any."""

    def forward(self, q, k, v, ring, choices):
        with choices.of(self) if choices else contextlib.nullcontext():
            return q + burst_attn_func(q, k, v, causal=True, process_group=ring, sparse=SMALL)


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": False},
        {"use_reentrant": True},
        {"use_reentrant": False, "context_fn": keep_choices},
    ],
)
def test_choices_are_kept_in_every_kind_of_checkpointing(options, chosen):
    """Two forwards run before the two backwards."""
    layout, layers = Layout.zigzag(64, 2), [Residual(), Residual()]
    tensors = [random_qkv(1, 64, 4, 2, 8, seed=seed) for seed in (0, 1)]

    def work(ring, is_checkpointed):
        def forward(q, k, v):
            choices = None if "context_fn" in options else Choices()
            for layer in layers:
                args = q, k, v, ring, choices
                q = checkpoint(layer, *args, **options) if is_checkpointed else layer(*args)
            return q

        parts = [[layout.shard(x, ring.rank) for x in of_one] for of_one in tensors]
        leaves = [[x.requires_grad_() for x in of_one[:3]] for of_one in parts]
        outs = [forward(*of_one) for of_one in leaves]
        for out, (*_, dout) in zip(outs, parts, strict=True):
            out.backward(dout)
        return [x.grad for of_one in leaves for x in of_one]

    exact = simulate(2, lambda ring: work(ring, is_checkpointed=False))
    made = len(chosen)
    assert made == 2 * 2 * len(layers)  # ranks and forwards
    kept = simulate(2, lambda ring: work(ring, is_checkpointed=True))
    assert len(chosen) == 2 * made
    for mine, expected in zip(kept, exact, strict=True):
        assert all(a.equal(b) for a, b in zip(mine, expected, strict=True))


@pytest.mark.parametrize(
    ("inner", "is_reentrant"), [("keep_choices", False), ("both", False), ("both", True)]
)
def test_checkpoints_in_checkpoints_choose_once(inner, is_reentrant, chosen):
    """A reentrant outer checkpoint keeps no choices, so the calls around the inner one choose."""
    layer, tensors = Residual(), random_qkv(1, 64, 4, 2, 8)

    def attend(q, k, v):
        return q + burst_attn_func(q, k, v, causal=True, sparse=SMALL)

    def middle(q, k, v, choices):
        return attend(q, k, v) if inner == "keep_choices" else layer(q, k, v, None, choices)

    def whole(q, k, v, choices, is_checkpointed):
        q = attend(q, k, v)
        if not is_checkpointed:
            q = middle(q, k, v, choices)
        else:
            options = {"use_reentrant": False, "context_fn": keep_choices}
            q = checkpoint(middle, q, k, v, choices, **options)
        return attend(q, k, v)

    found = []
    for is_checkpointed in (False, True):
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        args = *leaves, Choices(), is_checkpointed
        chosen.clear()
        if is_checkpointed and is_reentrant:
            out = checkpoint(whole, *args, use_reentrant=True)
        elif is_checkpointed:
            out = checkpoint(whole, *args, use_reentrant=False, context_fn=keep_choices)
        else:
            out = whole(*args)
        out.backward(tensors[3])
        found.append([out, *(x.grad for x in leaves)])
        assert len(chosen) == (5 if is_checkpointed and is_reentrant else 3)
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


def test_a_recomputation_with_more_calls_than_the_first_run_is_refused():
    leaves, runs = [x.requires_grad_() for x in random_qkv(1, 64, 4, 2, 8)[:3]], []

    def work(q, k, v):
        runs.append(None)
        for _ in runs:
            q = burst_attn_func(q, k, v, causal=True, sparse=SMALL)
        return q.sin()

    out = checkpoint(work, *leaves, use_reentrant=False, context_fn=keep_choices)
    with pytest.raises(RuntimeError, match="with 1 calls that keep results"):
        out.sum().backward()


def test_a_layer_that_runs_twice_in_a_forward_does_not_take_its_first_choice():
    layer, choices, args = Residual(), Choices(), random_qkv(1, 64, 4, 2, 8)[:3]
    layer(*args, None, choices)
    with pytest.raises(ValueError, match="two runs of a layer in one forward"):
        layer(*args, None, choices)


def test_a_recomputation_that_chooses_again_warns_once(caplog):
    attend = functools.partial(burst_attn_func, causal=True, sparse=SMALL)
    leaves = [x.requires_grad_() for x in random_qkv(1, 64, 4, 2, 8)[:3]]
    kept._warn_of_finding_again.cache_clear()
    for _ in range(2):
        checkpoint(attend, *leaves, use_reentrant=True).sum().backward()
    assert [x.message.split(":")[0] for x in caplog.records if "chooses" in x.message] == [
        "sparse attention chooses its blocks again in a recomputation, which costs time"
    ]


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_key_that_is_not_finite_changes_the_queries_that_chose_it(value):
    """A query's output is NaN where a score of its blocks makes it so, as in dense attention."""
    q, k, v, _ = random_qkv(1, 90, 4, 2, 8)
    spoilt, at = k.clone(), 14
    spoilt[0, at, 0, 3] = value
    layout = Layout.zigzag(90, 2)

    def work(ring):
        *mine, finite = (layout.shard(x, ring.rank) for x in (q, spoilt, v, k))
        options = {"sparse": BY_OTHERS, "choose_by": (mine[0], finite)}
        return burst_attn_func(*mine, causal=True, process_group=ring, **options)

    out = layout.unshard(simulate(2, work))[0]
    chosen = choose(q, k, Mask.causal(90), SMALL)[0, :, 0]
    sees = (chosen == at // SMALL.block_size).any(1) & (torch.arange(90) >= at)
    assert sees[24:].any()  # beyond the window
    assert not sees[at:].all()
    lost = sees.unsqueeze(1) & ((q[0, :, :2, 3] * value).isnan() | (q[0, :, :2, 3] * value > 0))
    assert out[:, :2].isnan().all(-1).equal(lost)
    assert out[:, :2].isnan().any(-1).equal(lost)
    assert out[:, 2:].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "bound", "seed"),
    [(torch.float32, 2**-18, 0), (torch.float16, 2**-10, 1), (torch.bfloat16, 2**-7, 2)],
    ids=str,
)
def test_other_dtypes_stay_near_the_definition(dtype, bound, seed):
    """The choice is that of the definition. bf16 rounds at 2^-9, fp16 at 2^-12, fp32 at 2^-24, and
    a partial result is rounded once more before it is merged.
    """
    chance = random.Random(seed)
    case = random_case(chance, tokens=50)
    tensors = [x.to(dtype) for x in make_inputs(case, seed)]
    wide = [x.double() for x in tensors]
    mask, size = Mask.documents(case.cu_seqlens), chance.randint(1, min(3, case.cu_seqlens[-1]))
    layout = made_layout(chance.choice(("zigzag", "striped")), mask, size)
    got = attend(layout, tensors, mask=mask, sparse=case.sparse, group_bytes=1000)
    exact = expected(wide, case.cu_seqlens, case.sparse)
    check(got, exact, wide, bound, case)


def over_ranks(size, layer, x, cos, sin):
    """Return the whole output of a layer that simulated ranks share."""
    layout = Layout.zigzag(x.shape[1], size)

    def work(ring):
        part = copy.deepcopy(layer)
        part.attach(SequenceParallel(ring.rank, size, process_group=ring))
        shards = (layout.shard(t, ring.rank, d) for t, d in ((x, 1), (cos, 0), (sin, 0)))
        return part(*shards)

    return layout.unshard(simulate(size, work))


def in_pieces(layer, x, cos, sin, cache):
    """Return a layer's output for 70 tokens that continue a cache, some at a time."""
    cuts = itertools.pairwise((0, 3, 50, 69, 70))
    return torch.cat([layer(x[:, a:b], cos[a:b], sin[a:b], cache) for a, b in cuts], 1)


def test_a_layer_chooses_by_queries_and_keys_before_rotation():
    layer = BurstAttention(32, 4, 2, 8, qk_norm_eps=1e-6, sparse=BY_OTHERS).double()
    torch.nn.init.normal_(layer.q_norm.weight)
    x, (cos, sin) = torch.randn(1, 70, 32, dtype=torch.float64), rope_tables(torch.arange(70), 8)
    q, k, v = (t[0] for t in layer.project_all(x, cos, sin)[:3])
    plain = [t[0] for t in layer.project_all(x, torch.ones_like(cos), torch.zeros_like(sin))[:3]]
    exact, _ = oracle(q, k, v, (0, 70), SMALL, choose_by=plain[:2])
    by_rotated, _ = oracle(q, k, v, (0, 70), SMALL)
    assert not torch.allclose(exact, by_rotated)
    exact = layer.o_proj(exact.flatten(1))
    for found in (
        over_ranks(2, layer, x, cos, sin),
        in_pieces(layer, x, cos, sin, Cache(None, 1, 70)),
    ):
        assert (found[0] - exact).abs().max() < EXACT
    q, k, v = layer.project_all(x, cos, sin)[:3]
    chunks = Chunks(Mask.causal(70), 70, 1).forward(last=True)
    for part in (Cache(None, 1, 70), next(chunks)):
        for given, message in (
            (None, "expected choose_by together with use_nope=True, got .* alone"),
            ((q, k[..., :4]), r"expected keys of choose_by of shape \(1, 70, 2, 8\) on cpu, got"),
        ):
            with pytest.raises(ValueError, match=message):
                layer.attend(q, k, v, part, given)
    chunks.close()  # which lets gradients be recorded again


def test_a_cache_adds_each_key_up_once(monkeypatch):
    """The sums are bit-identical to those of all keys at once, whatever tokens come together."""
    layer = BurstAttention(32, 4, 2, 8, sparse=dataclasses.replace(SMALL, dense_len=30))
    x, (cos, sin), cache = (
        torch.randn(1, 70, 32),
        rope_tables(torch.arange(70), 8),
        Cache(None, 1, 70),
    )
    summed = []
    monkeypatch.setattr(
        compressed, "sum_strides", lambda k, *args: summed.append(len(k)) or sum_strides(k, *args)
    )
    cuts = [0, 1, 2, 9, 10, *range(40, 71)]
    with torch.no_grad():
        for a, b in itertools.pairwise(cuts):
            layer(x[:, a:b], cos[a:b], sin[a:b], cache)
    # a stride has 2 tokens, of which one may have waited
    assert sum(summed) <= 70 + len(cuts)
    memory = cache._memories[0]
    whole = compress(sum_strides(memory.kept[0][0], SMALL), SMALL)
    found = memory.sums_of_keys.compress(0)
    assert found.scored.equal(whole.scored)
    assert found.normalizing.equal(whole.normalizing)


def test_a_layer_refuses_what_is_no_extension():
    with pytest.raises(TypeError, match=r"sparse must be an Extension, such as .*, got str"):
        BurstAttention(32, 4, sparse="InfLLMV2")
