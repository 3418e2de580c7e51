"""Functions of ring-flash-attention, computed here, against dense attention; tokens are cut without
Layouts.
"""

import inspect
import itertools
import re

import pytest
import torch

import bmt_burst.compat.ring_flash_attn as compat
from bmt_burst import Mask, Scores, Slice, burst_attn_func, simulate
from bmt_burst.compat.flash import _read_cached
from tests.helpers import (
    attention_errors,
    dense_results,
    random_qkv,
    relative_error,
    run_ranks,
    size_of_terms,
)

TAIL = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) alibi_slopes=None "
    "deterministic=False return_attn_probs=False group=None"
)
VARLEN = "cu_seqlens max_seqlen"
LLAMA3 = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k heads_k_stride local_k_slice"
ROUNDING = 1e-12  # of fp64, relative to the whole tensor


def own_tokens(kind, tokens, rank, size):
    """The positions that a rank has of a sequence."""
    if kind == "stripe":
        return torch.arange(rank, tokens, size)
    if kind == "ring":
        return torch.arange(tokens).chunk(size)[rank]
    chunks = torch.arange(tokens).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def own_tokens_of_each(kind, bounds, rank, size):
    """The positions that a rank has of documents each of which is cut."""
    spans = itertools.pairwise(bounds)
    return torch.cat([start + own_tokens(kind, stop - start, rank, size) for start, stop in spans])


def banded(bounds, low, high):
    return Mask(
        bounds[-1], tuple(Slice(span, span, low, high) for span in itertools.pairwise(bounds))
    )


def packed(tensors, form):
    """q, k, v (..., heads, D) as a function of a form takes them."""
    q, k, v = tensors
    if form == "_qkvpacked":
        return [torch.stack([q, k, v], -3)]
    return [q, torch.stack([k, v], -3)] if form == "_kvpacked" else [q, k, v]


def unpacked_gradients(grads, form):
    if form == "_qkvpacked":
        return grads[0].unbind(-3)
    return (grads[0], *grads[1].unbind(-3)) if form == "_kvpacked" else grads


def errors(
    size, mask, name, form, own, *, batch=None, arguments=lambda rank: (), heads=4, **options
):
    """Relative errors of out, lse, dq, dk, dv; `own(rank)` are a rank's positions. Packed without
    `batch`.
    """
    tensors = random_qkv(
        batch or 1, mask.seq_len, heads, heads if form == "_qkvpacked" else heads // 2, 8
    )
    function = getattr(compat, name.replace("_func", f"{form}_func"))

    def work(ring):
        local = [x[:, own(ring.rank)] if batch else x[0, own(ring.rank)] for x in tensors]
        inputs = [x.requires_grad_() for x in packed(local[:3], form)]
        given = {"softmax_scale": 0.3, "return_attn_probs": True, "group": ring, **options}
        out, lse, nothing = function(*inputs, *arguments(ring.rank), **given)
        assert nothing is None
        assert (lse.dtype, lse.requires_grad) == (torch.float64, True)
        given["return_attn_probs"] = False
        assert function(*(x.detach() for x in inputs), *arguments(ring.rank), **given).equal(out)
        grads = unpacked_gradients(torch.autograd.grad(out, inputs, local[3]), form)
        return [x.detach() if batch else x.detach().unsqueeze(0) for x in (out, lse, *grads)]

    results = simulate(size, work)
    expected = dense_results(mask, tensors, 0.3)
    found = []
    for rank, of_rank in enumerate(results):
        shards = [
            exact[:, :, own(rank)] if i == 1 else exact[:, own(rank)]
            for i, exact in enumerate(expected)
        ]
        found += attention_errors(of_rank, shards, tensors[3], 0.3).values()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["", "_kvpacked", "_qkvpacked"])
@pytest.mark.parametrize(
    ("kind", "name"), [("ring", "ring"), ("zigzag", "zigzag_ring"), ("stripe", "stripe")]
)
def test_batches_equal_dense_attention(kind, name, form, size):
    for batch, causal in itertools.product((1, 2), (True, False) if kind == "ring" else (True,)):
        mask = Mask.causal(24) if causal else Mask.full(24)
        found = errors(
            size,
            mask,
            f"{name}_flash_attn_func",
            form,
            lambda rank: own_tokens(kind, 24, rank, size),
            batch=batch,
            causal=causal,
        )
        assert max(found) < ROUNDING


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["", "_kvpacked", "_qkvpacked"])
@pytest.mark.parametrize(("kind", "name"), [("ring", "ring"), ("zigzag", "zigzag_ring")])
def test_documents_that_are_each_cut_equal_dense_attention(kind, name, form, size):
    local = (0, 2, 2, 8, 12)  # the second has no tokens
    bounds = tuple(dict.fromkeys(size * bound for bound in local))
    for causal in (True, False) if kind == "ring" else (True,):
        found = errors(
            size,
            Mask.documents(bounds, causal),
            f"{name}_flash_attn_varlen_func",
            form,
            lambda rank: own_tokens_of_each(kind, bounds, rank, size),
            arguments=lambda rank: (torch.tensor(local, dtype=torch.int32), 6),
            causal=causal,
        )
        assert max(found) < ROUNDING


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["", "_kvpacked", "_qkvpacked"])
@pytest.mark.parametrize("causal", [True, False])
def test_documents_in_sequence_equal_dense_attention(form, size, causal):
    for bounds in ((0, 5, 6, 16, 24), (0, 24), (0, 1, 2, 3, 12, 23, 24)):
        whole = torch.tensor(bounds, dtype=torch.int32)

        def arguments(rank, whole=whole):
            *made, keys = compat.llama3_flash_attn_prepare_cu_seqlens(whole, causal, rank, size)
            return *made, 1, keys

        found = errors(
            size,
            Mask.documents(bounds, causal),
            "llama3_flash_attn_varlen_func",
            form,
            lambda rank: own_tokens("ring", 24, rank, size),
            arguments=arguments,
            causal=causal,
        )
        assert max(found) < ROUNDING


def over_gloo(rank, size):
    """As that package's own scripts call it: over the default group, with tensors that every rank
    has as a whole.
    """
    bounds, tensors = (0, 5, 6, 16, 24), random_qkv(1, 24, 4, 2, 8)
    q, k, v, dout = (x[0].chunk(size)[rank].clone() for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    *made, keys = compat.llama3_flash_attn_prepare_cu_seqlens(
        torch.tensor(bounds), True, rank, size
    )
    out = compat.llama3_flash_attn_varlen_func(
        *inputs, *made, heads_k_stride=1, local_k_slice=keys, causal=True
    )
    out.backward(dout)
    exact = dense_results(Mask.documents(bounds), tensors, 8**-0.5)
    pairs = zip([out, *(x.grad for x in inputs)], [exact[0], *exact[2:]], strict=True)
    least = size_of_terms(tensors[3], 8**-0.5)
    return [relative_error(mine, whole[0].chunk(size)[rank], least) for mine, whole in pairs]


@pytest.mark.parametrize("size", [2, 3])
def test_documents_in_sequence_over_gloo(size):
    assert max(itertools.chain(*run_ranks(size, over_gloo, size))) < ROUNDING


def test_compiled_programs_may_call_them():
    """With breaks of the graph, as around burst_attn_func."""
    q, k, v, _ = random_qkv(1, 8, 2, 2, 8)
    whole = torch.tensor([0, 3, 8])

    def program(q, k, v):
        out = compat.ring_flash_attn_func(q + 1, k, v, causal=True)
        *made, keys = compat.llama3_flash_attn_prepare_cu_seqlens(whole, True, 0, 1)
        return out[0] + compat.llama3_flash_attn_varlen_func(
            q[0], k[0], v[0], *made, 1, keys, causal=True
        )

    assert torch.compile(program, backend="eager")(q, k, v).equal(program(q, k, v))


def test_ranks_tell_each_other_of_many_documents():
    """More than one message holds."""
    count = 3 * compat._STARTS_A_MESSAGE
    bounds = (*range(count - 5), 2 * count)
    whole = torch.tensor(bounds)

    def arguments(rank):
        *made, keys = compat.llama3_flash_attn_prepare_cu_seqlens(whole, True, rank, 2)
        return *made, 1, keys

    found = errors(
        2,
        Mask.documents(bounds),
        "llama3_flash_attn_varlen_func",
        "",
        lambda rank: own_tokens("ring", 2 * count, rank, 2),
        arguments=arguments,
        causal=True,
        heads=2,
    )
    assert max(found) < ROUNDING


@pytest.mark.parametrize(
    ("window", "causal", "low", "high"),
    [
        ((5, -1), True, 0, 6),
        ((5, 5), True, 0, 6),
        ((3, 2), False, -2, 4),
        ((-1, 2), False, -2, None),
        ([7, -1], False, None, 8),
        ((0, 0), False, 0, 1),
        ((100, 100), False, -100, 101),
    ],
)
def test_windows_are_those_of_flash_attn(window, causal, low, high):
    size, bounds = 3, (0, 6, 24)
    found = errors(
        size,
        banded((0, 24), low, high),
        "ring_flash_attn_func",
        "",
        lambda rank: own_tokens("ring", 24, rank, size),
        batch=2,
        causal=causal,
        window_size=window,
    )
    found += errors(
        size,
        banded(bounds, low, high),
        "ring_flash_attn_varlen_func",
        "",
        lambda rank: own_tokens_of_each("ring", bounds, rank, size),
        arguments=lambda rank: (torch.tensor((0, 2, 8)), 6),
        causal=causal,
        window_size=window,
    )
    assert max(found) < ROUNDING


@pytest.mark.parametrize(
    ("cu_seqlens", "causal", "expected"),
    [
        (
            (0, 5, 6, 16, 24),
            True,
            [
                ((0, 5, 6, 8), (0, 5, 6, 8), 5, 5, slice(0, 8)),
                ((0, 8), (0, 10), 8, 10, slice(6, 16)),
                ((0, 8), (0, 8), 8, 8, slice(16, 24)),
            ],
        ),
        (
            (0, 5, 6, 16, 24),
            False,
            [
                ((0, 5, 6, 8), (0, 5, 6, 16), 5, 10, slice(0, 16)),
                ((0, 8), (0, 10), 8, 10, slice(6, 16)),
                ((0, 8), (0, 8), 8, 8, slice(16, 24)),
            ],
        ),
        (
            (0, 30),
            True,
            [
                ((0, 10), (0, 10), 10, 10, slice(0, 10)),
                ((0, 10), (0, 20), 10, 20, slice(0, 20)),
                ((0, 10), (0, 30), 10, 30, slice(0, 30)),
            ],
        ),
    ],
)
def test_prepared_cu_seqlens(cu_seqlens, causal, expected):
    for rank, (of_q, of_k, *rest) in enumerate(expected):
        whole = torch.tensor(cu_seqlens, dtype=torch.int32)
        made_q, made_k, *others = compat.llama3_flash_attn_prepare_cu_seqlens(
            whole, causal, rank, 3
        )
        assert (made_q.dtype, made_k.dtype) == (torch.int32, torch.int32)
        assert (tuple(made_q.tolist()), tuple(made_k.tolist()), *others) == (of_q, of_k, *rest)


def test_arguments_have_the_names_order_and_defaults_of_that_package():
    for name in compat.__all__:
        if not name.endswith("_func"):
            continue
        tensors = "qkv" if "_qkvpacked" in name else "q kv" if "_kvpacked" in name else "q k v"
        kind = LLAMA3 if name.startswith("llama3") else VARLEN if "varlen" in name else ""
        parameters = inspect.signature(getattr(compat, name)).parameters.values()
        shown = [str(p.replace(annotation=p.empty)).replace(" ", "") for p in parameters]
        assert shown == f"{tensors} {kind} {TAIL}".split()
    assert len(compat.__all__) == 21


def test_functions_have_their_own_names_and_docstrings():
    functions = {name: getattr(compat, name) for name in compat.__all__}
    assert {name: function.__name__ for name, function in functions.items()} == dict(
        zip(functions, functions, strict=True)
    )
    zigzag = functions["zigzag_ring_flash_attn_varlen_kvpacked_func"].__doc__
    assert zigzag.startswith("Compute attention of packed documents: q (T, H, D) and kv (T, 2, G,")
    assert "Each rank has an early and a late chunk of each document." in zigzag


def test_options_may_be_given_by_place():
    q, k, v, _ = random_qkv(1, 8, 2, 2, 8)
    [by_place] = simulate(
        1, lambda ring: compat.ring_flash_attn_func(q, k, v, 0.0, 0.5, True, (-1, -1), None, True)
    )
    [by_name] = simulate(
        1,
        lambda ring: compat.ring_flash_attn_func(
            q, k, v, softmax_scale=0.5, causal=True, deterministic=True
        ),
    )
    assert by_place.equal(by_name)
    with pytest.raises(TypeError, match=r"ring_flash_attn_func\(\) .*argument 'dropout'"):
        compat.ring_flash_attn_func(q, k, v, dropout=0.1)


def what_each_says(size, work):
    """The errors of all ranks."""

    def caught(ring):
        with pytest.raises((ValueError, TypeError)) as error:
            work(ring)
        return f"{error.type.__name__}: {error.value}"

    return simulate(size, caught)


def test_the_refusal_of_alibi_shows_what_to_write():
    """Its expressions, for documents of 5 and 7 tokens, give what flash-attn computes."""
    q, k, v, _ = random_qkv(1, 12, 4, 4, 8, torch.float32)
    mask, slopes = Mask.documents((0, 5, 12)), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    with pytest.raises(ValueError, match="expected alibi_slopes=None: ") as error:
        compat.ring_flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    found = re.search(r"scores=(.+) and bias=(.+)$", str(error.value))
    names = {"Scores": Scores, "mask": mask, "torch": torch, "n": 7, "slopes": slopes}
    scores, bias = (eval(text, names) for text in found.groups())
    for work in (
        lambda: burst_attn_func(q, k, v, causal=True, alibi_slopes=slopes),
        lambda: burst_attn_func(q, k, v, causal=True, window=3),
    ):
        with pytest.raises(TypeError, match=r"unexpected keyword argument .*: .*burst_attn_func"):
            work()
    with pytest.raises(TypeError, match=r": write group; write window_size=\(window - 1, 0\)$"):
        compat.ring_flash_attn_func(q, k, v, window=3, process_group=None)
    got = burst_attn_func(q, k, v, 0.3, scores=scores, bias=bias)
    distance = torch.arange(12).unsqueeze(1) - torch.arange(12)
    added = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3 - slopes.view(-1, 1, 1) * distance.abs()
    probs = added.masked_fill(~mask.dense(), -torch.inf).softmax(-1)
    assert relative_error(got, torch.einsum("bhqk,bkhd->bqhd", probs, v)) < 1e-6


WRONG = [
    ({"dropout_p": 0.1}, "expected dropout_p=0"),
    ({"alibi_slopes": torch.ones(2)}, "expected alibi_slopes=None"),
    ({"window_size": (-2, 0)}, "must have numbers of tokens"),
    ({"window_size": 5}, r"must be \(left, right\)"),
    ({"window_size": (1.5, 0)}, "whole number"),
    ({"deterministic": 3}, "deterministic must be True or False"),
    ({"softmax_scale": 0.0}, "softmax_scale must be positive"),
    ({"causal": None}, "causal must be True or False"),
    ({"return_attn_probs": "yes"}, "return_attn_probs must be True or False, got 'yes'"),
]


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(options, said):
    q, k, v, _ = random_qkv(1, 4, 2, 2, 8)

    def work(ring):
        given = {"causal": True} | (options if ring.rank else {})
        compat.zigzag_ring_flash_attn_func(q, k, v, group=ring, **given)

    other, wrong = what_each_says(2, work)
    assert re.search(said, wrong)
    assert "rank 1 of the group failed" in other


def test_any_failure_to_read_arguments_is_heard_by_all():
    """Not only a ValueError or TypeError: numbers of a meta tensor cannot be read."""
    q, k, v, _ = random_qkv(1, 4, 2, 2, 8)
    said = {}

    def work(ring):
        cu_seqlens = torch.tensor([0, 4], device="meta" if ring.rank else "cpu")
        with pytest.raises(NotImplementedError if ring.rank else ValueError) as error:
            compat.ring_flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens, 4, group=ring)
        said[ring.rank] = f"{error.value}"

    simulate(2, work)
    assert (
        said[0]
        == "rank 1 of the group failed before a call of burst_attn_func: NotImplementedError: "
        f"{said[1]}"
    )


def test_shapes_and_layouts_that_do_not_fit():
    q, k, v, _ = random_qkv(1, 5, 2, 2, 8)
    cu_seqlens, keys = torch.tensor([0, 2, 5]), slice(0, 5)
    calls = {
        "zigzag attention is causal": lambda ring: compat.zigzag_ring_flash_attn_func(
            q, k, v, group=ring
        ),
        "striped attention is causal": lambda ring: compat.stripe_flash_attn_func(
            q, k, v, group=ring
        ),
        "two chunks of equal length": lambda ring: compat.zigzag_ring_flash_attn_func(
            q, k, v, causal=True, group=ring
        ),
        "got [2, 3] tokens on this rank": lambda ring: compat.zigzag_ring_flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens, 3, causal=True, group=ring
        ),
        "q must be (batch": lambda ring: compat.ring_flash_attn_func(q[0], k[0], v[0], group=ring),
        "q must be packed": lambda ring: compat.ring_flash_attn_varlen_func(
            q, k, v, cu_seqlens, 3, group=ring
        ),
        "they end at 5, but q has 4 tokens": lambda ring: compat.ring_flash_attn_varlen_func(
            q[0, :4], k[0, :4], v[0, :4], cu_seqlens, 3, group=ring
        ),
        "cu_seqlens must rise": lambda ring: compat.ring_flash_attn_varlen_func(
            q[0], k[0], v[0], torch.tensor([0, 6, 5]), 3, group=ring
        ),
        "whole numbers of one dimension": lambda ring: compat.ring_flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens.float(), 3, group=ring
        ),
        "cu_seqlens must be a tensor": lambda ring: compat.ring_flash_attn_varlen_func(
            q[0], k[0], v[0], 5, 3, group=ring
        ),
        "qkv must be (..., tokens, 3": lambda ring: compat.ring_flash_attn_qkvpacked_func(
            q, group=ring
        ),
        "kv must be a torch.Tensor": lambda ring: compat.ring_flash_attn_kvpacked_func(
            q, [k, v], group=ring
        ),
        "q must be a torch.Tensor": lambda ring: compat.ring_flash_attn_func(
            None, k, v, group=ring
        ),
        "as many tokens as q has": lambda ring: compat.llama3_flash_attn_varlen_func(
            q[0, :4],
            k[0, :4],
            v[0, :4],
            cu_seqlens,
            cu_seqlens,
            3,
            3,
            1,
            keys,
            causal=True,
            group=ring,
        ),
        "local_k_slice must be a slice": lambda ring: compat.llama3_flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens, cu_seqlens, 3, 3, 1, 5, causal=True, group=ring
        ),
        "of 2 and causal=False": lambda ring: compat.llama3_flash_attn_varlen_func(
            q[0], k[0], v[0], *prepared(torch.tensor([0, 2, 10]), True, ring), group=ring
        ),
    }
    for said, call in calls.items():
        everyone = what_each_says(2, call)
        assert any(said in line for line in everyone), (said, everyone)


def prepared(cu_seqlens, causal, ring):
    *made, keys = compat.llama3_flash_attn_prepare_cu_seqlens(
        cu_seqlens, causal, ring.rank, ring.size
    )
    return *made, 1, keys


def test_ranks_whose_documents_do_not_fit_together_are_told():
    """One has the cu_seqlens of another sequence."""
    q, k, v, _ = random_qkv(1, 12, 2, 2, 8)
    wholes = torch.tensor([0, 3, 24]), torch.tensor([0, 6, 24])

    def work(ring):
        arguments = prepared(wholes[ring.rank], True, ring)
        compat.llama3_flash_attn_varlen_func(q[0], k[0], v[0], *arguments, causal=True, group=ring)

    first, second = what_each_says(2, work)
    assert "rank 1 of the group failed" in first
    assert "begin at (0, 3)" in second


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (([0, 7], True, 0, 2), "do not divide by 2 ranks"),
        (([0, 8], True, 2, 2), "expected a rank from 0 to 1, got 2"),
    ],
)
def test_what_cannot_be_prepared(given, said):
    cu_seqlens, *rest = given
    with pytest.raises(ValueError, match=said):
        compat.llama3_flash_attn_prepare_cu_seqlens(torch.tensor(cu_seqlens), *rest)


def test_numbers_on_a_gpu_are_read_again_once_written():
    x = torch.tensor([0, 3])
    assert _read_cached(x) is _read_cached(x)
    assert _read_cached(x) == (0, 3)
    x[1] = 7
    assert _read_cached(x) == (0, 7)
