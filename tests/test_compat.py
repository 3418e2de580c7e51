"""Functions of ring-flash-attention, computed here, against dense attention.

Tokens are cut without Layouts. Its adapter substitutes the attention of transformers' models.
"""

import inspect
import itertools
import re

import pytest
import torch
import torch.distributed as dist
from transformers import MistralConfig, MistralForCausalLM

import bmt_burst.compat.ring_flash_attn as compat
from bmt_burst import Mask, Scores, Slice, burst_attn_func, simulate
from bmt_burst.compat.ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params
from tests.cases import random_qkv
from tests.launcher import run_in_turn
from tests.reference import attention_errors, dense_results, relative_error
from tests.test_transformers import SIZES

TAIL = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) alibi_slopes=None "
    "deterministic=False return_attn_probs=False group=None"
)
DOCUMENTS = {  # arguments between tensors and options, by the name of a function
    "ring_flash_attn": "",
    "zigzag_ring_flash_attn": "",
    "stripe_flash_attn": "",
    "ring_flash_attn_varlen": "cu_seqlens max_seqlen",
    "zigzag_ring_flash_attn_varlen": "cu_seqlens max_seqlen",
    "llama3_flash_attn_varlen": (
        "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k heads_k_stride local_k_slice"
    ),
}
FORMS = {"": "q k v", "_kvpacked": "q kv", "_qkvpacked": "qkv"}
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


def packed(q, k, v, form):
    """The tensors (..., heads, D) as a function of a form takes them."""
    if form == "_qkvpacked":
        return [torch.stack([q, k, v], -3)]
    return [q, torch.stack([k, v], -3)] if form == "_kvpacked" else [q, k, v]


def largest_error(
    size, mask, name, own, *, form="", batch=None, arguments=lambda rank: (), **options
):
    """Return the largest relative error at positions `own(rank)`. No `batch` means packed."""
    tensors = random_qkv(batch or 1, mask.seq_len, 2, 2 if form == "_qkvpacked" else 1, 8)
    function = getattr(compat, f"{name}{form}_func")

    def work(ring):
        local = [x[:, own(ring.rank)] if batch else x[0, own(ring.rank)] for x in tensors]
        inputs = [x.requires_grad_() for x in local[:3]]
        args = *packed(*inputs, form), *arguments(ring.rank)
        given = {"softmax_scale": 0.3, "group": ring, **options}
        out, lse, nothing = function(*args, return_attn_probs=True, **given)
        assert nothing is None
        assert (lse.dtype, lse.requires_grad) == (torch.float64, True)
        assert function(*args, **given).equal(out)
        grads = torch.autograd.grad(out, inputs, local[3])
        return [x.detach() if batch else x.detach().unsqueeze(0) for x in (out, lse, *grads)]

    found, expected = [], dense_results(mask, tensors, 0.3)
    for rank, of_rank in enumerate(simulate(size, work)):
        shards = [
            exact[:, :, own(rank)] if i == 1 else exact[:, own(rank)]
            for i, exact in enumerate(expected)
        ]
        found += attention_errors(of_rank, shards, tensors[3], 0.3).values()
    return max(found)


@pytest.mark.parametrize(("form", "size"), [("", 3), ("_kvpacked", 2), ("_qkvpacked", 1)])
@pytest.mark.parametrize(
    ("kind", "name", "causal"),
    [
        ("ring", "ring_flash_attn", True),
        ("ring", "ring_flash_attn", False),
        ("zigzag", "zigzag_ring_flash_attn", True),
        ("stripe", "stripe_flash_attn", True),
        ("ring", "ring_flash_attn_varlen", True),
        ("ring", "ring_flash_attn_varlen", False),
        ("zigzag", "zigzag_ring_flash_attn_varlen", True),
    ],
)
def test_functions_equal_dense_attention(kind, name, causal, form, size):
    is_packed = name.endswith("varlen")
    local = (0, 2, 2, 8, 12) if is_packed else (0, 8)  # the second document has no tokens
    bounds = tuple(dict.fromkeys(size * bound for bound in local))
    error = largest_error(
        size,
        Mask.documents(bounds, causal),
        name,
        lambda rank: own_tokens_of_each(kind, bounds, rank, size),
        form=form,
        batch=None if is_packed else 2,
        arguments=lambda rank: (torch.tensor(local, dtype=torch.int32), 6) if is_packed else (),
        causal=causal,
    )
    assert error < ROUNDING


def prepared(cu_seqlens, causal, rank, size):
    """The arguments of llama3's functions between tensors and options."""
    *made, keys = compat.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, size)
    return *made, 1, keys


MANY = 3 * compat._STARTS_A_MESSAGE  # documents, of which ranks tell each other in several messages


@pytest.mark.parametrize(
    ("bounds", "form", "size", "causal"),
    [
        ((0, 5, 6, 16, 24), "", 3, True),
        ((0, 5, 6, 16, 24), "_kvpacked", 3, False),
        ((0, 5, 6, 16, 24), "_qkvpacked", 4, True),
        ((0, 24), "", 1, False),
        ((0, 1, 2, 3, 12, 23, 24), "", 2, True),
        ((*range(MANY - 5), 2 * MANY), "", 2, True),
    ],
)
def test_documents_in_sequence_equal_dense_attention(bounds, form, size, causal):
    whole = torch.tensor(bounds, dtype=torch.int32)
    error = largest_error(
        size,
        Mask.documents(bounds, causal),
        "llama3_flash_attn_varlen",
        lambda rank: own_tokens("ring", bounds[-1], rank, size),
        form=form,
        arguments=lambda rank: prepared(whole, causal, rank, size),
        causal=causal,
    )
    assert error < ROUNDING


def test_compiled_programs_may_call_them():
    """With breaks of the graph, as around burst_attn_func."""
    q, k, v, _ = random_qkv(1, 8, 2, 2, 8)
    whole = torch.tensor([0, 3, 8])

    def program(q, k, v):
        packed, arguments = (q[0], k[0], v[0]), prepared(whole, True, 0, 1)
        out = compat.llama3_flash_attn_varlen_func(*packed, *arguments, causal=True)
        return compat.ring_flash_attn_func(q + 1, k, v, causal=True)[0] + out

    assert torch.compile(program, backend="eager")(q, k, v).equal(program(q, k, v))


@pytest.mark.parametrize(
    ("window", "causal", "low", "high"),
    [
        ((5, 5), True, 0, 6),
        ((3, 2), False, -2, 4),
        ((-1, 2), False, -2, None),
        ([7, -1], False, None, 8),
        ((0, 0), False, 0, 1),
    ],
)
def test_windows_are_those_of_flash_attn(window, causal, low, high):
    bounds = (0, 6, 24)
    spans = itertools.pairwise(bounds)
    error = largest_error(
        3,
        Mask(24, tuple(Slice(span, span, low, high) for span in spans)),
        "ring_flash_attn_varlen",
        lambda rank: own_tokens_of_each("ring", bounds, rank, 3),
        arguments=lambda rank: (torch.tensor((0, 2, 8)), 6),
        causal=causal,
        window_size=window,
    )
    assert error < ROUNDING


@pytest.mark.parametrize(
    ("rank", "causal", "cu_seqlens_q", "cu_seqlens_k", "longest", "keys"),
    [
        (0, True, (0, 5, 6, 8), (0, 5, 6, 8), (5, 5), slice(0, 8)),
        (0, False, (0, 5, 6, 8), (0, 5, 6, 16), (5, 10), slice(0, 16)),
        (1, True, (0, 8), (0, 10), (8, 10), slice(6, 16)),
    ],
)
def test_prepared_cu_seqlens(rank, causal, cu_seqlens_q, cu_seqlens_k, longest, keys):
    whole = torch.tensor((0, 5, 6, 16, 24), dtype=torch.int32)
    of_q, of_k, *others = compat.llama3_flash_attn_prepare_cu_seqlens(whole, causal, rank, 3)
    assert (of_q.dtype, of_k.dtype) == (torch.int32, torch.int32)
    assert (tuple(of_q.tolist()), tuple(of_k.tolist())) == (cu_seqlens_q, cu_seqlens_k)
    assert others == [*longest, keys]


def test_functions_have_the_names_and_arguments_of_that_package():
    for (name, documents), (form, tensors) in itertools.product(DOCUMENTS.items(), FORMS.items()):
        function = getattr(compat, f"{name}{form}_func")
        parameters = inspect.signature(function).parameters.values()
        shown = [str(p.replace(annotation=p.empty)).replace(" ", "") for p in parameters]
        assert shown == f"{tensors} {documents} {TAIL}".split()
        assert function.__name__ == f"{name}{form}_func"
        assert "dropout_p must be 0 and alibi_slopes None" in function.__doc__
    q, k, v, _ = random_qkv(1, 8, 2, 2, 8)
    options = {"softmax_scale": 0.5, "causal": True, "window_size": (2, 0), "deterministic": True}
    by_place = compat.ring_flash_attn_func(q, k, v, 0.0, 0.5, True, (2, 0), None, True)
    assert by_place.equal(compat.ring_flash_attn_func(q, k, v, **options))


def what_each_says(size, work):
    """The errors of all ranks."""

    def caught(ring):
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
            work(ring)
        return f"{error.type.__name__}: {error.value}"

    return simulate(size, caught)


BATCH = random_qkv(1, 5, 2, 2, 8)[:3]
PACKED = [x[0] for x in BATCH]
ENDS = torch.tensor([0, 2, 5])
WRONG = [  # a function, its arguments on rank 1, and what it says there
    ("zigzag_ring_flash_attn", BATCH, {}, "zigzag attention is causal"),
    ("stripe_flash_attn", BATCH, {}, "striped attention is causal"),
    ("zigzag_ring_flash_attn", BATCH, {"causal": True}, r"zigzag needs even .* got \[5\]"),
    ("ring_flash_attn", BATCH, {"dropout_p": 0.1}, "expected dropout_p=0"),
    ("ring_flash_attn", BATCH, {"window_size": (-2, 0)}, "window_size must be numbers of tokens"),
    ("ring_flash_attn", BATCH, {"window_size": 5}, r"window_size must be \(left, right\)"),
    ("ring_flash_attn", BATCH, {"window_size": (1.5, 0)}, "whole number"),
    ("ring_flash_attn", BATCH, {"deterministic": 3}, "deterministic must be True or False"),
    ("ring_flash_attn", BATCH, {"softmax_scale": 0.0}, "softmax_scale must be positive"),
    ("ring_flash_attn", BATCH, {"causal": None}, "causal must be True or False"),
    ("ring_flash_attn", BATCH, {"return_attn_probs": "yes"}, "return_attn_probs must be True"),
    ("ring_flash_attn", BATCH, {"window": 3}, r"_func\(\) .*'window'; .* window_size, .* group$"),
    ("ring_flash_attn", PACKED, {}, r"q must be \(batch, tokens, heads, .* got shape \(5, 2, 8\)"),
    ("ring_flash_attn", [None, *BATCH[1:]], {}, "q must be a torch.Tensor"),
    ("ring_flash_attn_kvpacked", BATCH[:2], {}, r"kv must be \(batch, tokens, 2, heads"),
    ("ring_flash_attn_qkvpacked", BATCH[:1], {}, r"qkv must be \(batch, tokens, 3, heads"),
    ("ring_flash_attn_varlen", [*BATCH, ENDS, 3], {}, r"q must be \(tokens, heads, head size\)"),
    ("ring_flash_attn_varlen", [*PACKED, ENDS[:2], 3], {}, r"must end at 5, .* got \(0, 2\)"),
    ("ring_flash_attn_varlen", [*PACKED, ENDS.flip(0), 3], {}, r"cu_seqlens must be \(0, "),
    ("ring_flash_attn_varlen", [*PACKED, ENDS.float(), 3], {}, "integers of one dimension"),
    ("ring_flash_attn_varlen", [*PACKED, 5, 3], {}, "cu_seqlens must be a sequence"),
    ("ring_flash_attn_varlen", [*PACKED, ENDS.to("meta"), 3], {}, "NotImplementedError: "),
    ("zigzag_ring_flash_attn_varlen", [*PACKED, ENDS, 3], {"causal": True}, r"got \[2, 3\]"),
    ("llama3_flash_attn_varlen", [*PACKED, ENDS, ENDS, 3, 3, 1, 5], {}, "local_k_slice.start must"),
]


@pytest.mark.parametrize(("name", "args", "options", "message"), WRONG)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(name, args, options, message):
    def work(ring):
        if ring.rank:
            getattr(compat, f"{name}_func")(*args, group=ring, **options)
        else:
            compat.ring_flash_attn_func(*BATCH, group=ring)

    other, wrong = what_each_says(2, work)
    assert re.search(message, wrong)
    assert f"rank 1 of the group failed before a call of burst_attn_func: {wrong[:50]}" in other


@pytest.mark.parametrize(
    ("wholes", "tokens", "prepared_causal", "message"),
    [
        (((0, 3, 10), (0, 6, 10)), 5, True, r"begin at \(0, 3, "),  # of different sequences
        (((0, 2, 10), (0, 2, 10)), 5, False, "of 2 and causal=True; "),
        (((0, 2, 10), (0, 2, 10)), 4, True, "for 4 tokens of rank"),
    ],
)
def test_llama3s_arguments_must_fit_together(wholes, tokens, prepared_causal, message):
    def work(ring):
        arguments = prepared(torch.tensor(wholes[ring.rank]), prepared_causal, ring.rank, 2)
        q, k, v = (x[:tokens] for x in PACKED)
        compat.llama3_flash_attn_varlen_func(q, k, v, *arguments, causal=True, group=ring)

    assert any(re.search(message, line) for line in what_each_says(2, work))


@pytest.mark.parametrize(("tokens", "rank"), [(7, 0), (8, 2), (8, -1)])
def test_what_cannot_be_prepared(tokens, rank):
    message = f"rank {rank} of 2 has no equal part of the {tokens} tokens"
    with pytest.raises(ValueError, match=message):
        compat.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, tokens]), True, rank, 2)


def test_the_refusal_of_alibi_shows_what_to_write():
    """Its expressions, for documents of 5 and 7 tokens, give what flash-attn computes."""
    q, k, v, _ = random_qkv(1, 12, 4, 4, 8, torch.float32)
    mask, slopes = Mask.documents((0, 5, 12)), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    with pytest.raises(ValueError, match="expected alibi_slopes=None: ") as error:
        compat.ring_flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    found = re.search(r"scores=(.+) and bias=(.+)$", str(error.value))
    names = {"Scores": Scores, "mask": mask, "torch": torch, "n": 7, "slopes": slopes}
    scores, bias = (eval(text, names) for text in found.groups())
    for wrong in ({"alibi_slopes": slopes}, {"window": 3}):
        with pytest.raises(TypeError, match=r"unexpected keyword argument .*: .*burst_attn_func"):
            burst_attn_func(q, k, v, causal=True, **wrong)
    got = burst_attn_func(q, k, v, 0.3, scores=scores, bias=bias)
    distance = torch.arange(12).unsqueeze(1) - torch.arange(12)
    added = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3 - slopes.view(-1, 1, 1) * distance.abs()
    probs = added.masked_fill(~mask.dense(), -torch.inf).softmax(-1)
    assert relative_error(got, torch.einsum("bhqk,bkhd->bqhd", probs, v)) < 1e-6


BOUND = 1e-5  # rounding of fp32, through two layers
LENGTHS = (7, 1, 8)  # of documents, that two ranks share
BOUNDS = torch.tensor([0, 7, 8, 16], dtype=torch.int32)


def made():
    """A model with a window, narrower than documents. Without flash-attn transformers refuses to
    ask for it.
    """
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, sliding_window=4, attn_implementation="eager")
    return MistralForCausalLM(config)


def of_a_model(rank):
    """Errors of this rank's logits and of the ranks' gradients together; documents were computed
    alone before.
    """
    model, documents = made(), [torch.randint(1, 64, (1, length)) for length in LENGTHS]
    whole = torch.cat([model(input_ids=document).logits for document in documents], 1)
    dlogits = torch.randn_like(whole)
    exact = torch.autograd.grad(whole, list(model.parameters()), dlogits)
    model.config._attn_implementation = "flash_attention_2"
    group = dist.new_group(range(2))
    substitute_hf_flash_attn(group, heads_k_stride=1)
    update_ring_flash_attn_params(BOUNDS, group)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    own = [x.chunk(2, 1)[rank] for x in (torch.cat(documents, 1), positions, dlogits, whole)]
    out = model(input_ids=own[0], position_ids=own[1]).logits
    grads = torch.autograd.grad(out, list(model.parameters()), own[2])
    for grad in grads:
        dist.all_reduce(grad)
    return [relative_error(x, y) for x, y in zip([out, *grads], [own[3], *exact], strict=True)]


def misuse(rank):
    model, tokens = made(), torch.ones(1, 8, dtype=torch.long)
    model.config._attn_implementation = "flash_attention_2"

    def fails(message, call, *args, **named):
        with pytest.raises((ValueError, RuntimeError), match=re.escape(message)):
            call(*args, **named)

    substitute_hf_flash_attn(None, 1)
    fails("call update_ring_flash_attn_params before a model", model, tokens)
    fails("cu_seqlens must be (0, ", update_ring_flash_attn_params, BOUNDS.flip(0), None)
    update_ring_flash_attn_params(BOUNDS, None)
    expected = "expected the 16 tokens of cu_seqlens in a row, got "
    fails(f"{expected}2 rows of 8 tokens on this rank of 2", model, tokens.expand(2, -1))
    fails(f"{expected}1 rows of 5 tokens on this rank of 2", model, tokens[:, :5])
    padding = {"attention_mask": (tokens.cumsum(1) < 8).long()}
    fails("does not support padding in attention_mask", model, tokens, **padding)
    fails("does not support is_causal=False", model, tokens, is_causal=False)
    fails("does not support sinks", model, tokens, s_aux=torch.ones(4))
    model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.1
    fails("expected dropout_p=0", model.train(), tokens)
    model.config.sparse_config = {"topk": 4}
    fails("does not support a sparse_config", model.eval(), tokens)


def test_logits_and_gradients_are_those_of_each_document_alone_and_wrong_calls_are_refused():
    _, errors_of_ranks = run_in_turn(2, misuse, of_a_model)
    for errors in errors_of_ranks:
        assert max(errors) < BOUND
