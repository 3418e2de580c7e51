"""Layers of yunchang over gloo, against dense attention; tokens are cut without Layouts."""

import inspect
import itertools

import pytest
import torch
import torch.distributed as dist

import bmt_burst.compat.ring_flash_attn as ring_flash_attn
from bmt_burst import Mask, Slice
from bmt_burst.compat import yunchang
from bmt_burst.compat.yunchang import (
    EXTRACT_FUNC_DICT,
    PROCESS_GROUP,
    AttnType,
    LongContextAttention,
    LongContextAttentionQKVPacked,
    UlyssesAttention,
    set_seq_parallel_pg,
)
from tests.cases import random_qkv
from tests.launcher import run_ranks
from tests.reference import dense_results, relative_error, size_of_terms

KINDS = ("basic", "strip", "zigzag")
TOKENS = 24
ROUNDING = 1e-12  # of fp64, relative to the whole tensor
# degrees of Ulysses and the ring, on four ranks, and whether neighbours share a sequence by Ulysses
GRIDS = [(4, 1, True), (2, 2, True), (2, 2, False), (1, 4, True)]


def own_tokens(kind, tokens, ulysses, ring, rank, low):
    """The positions that a rank has of a sequence; tensors are cut as tensors."""
    whole, size = torch.arange(tokens), ulysses * ring
    if kind == "basic":
        return whole.chunk(size)[rank]
    if kind == "strip":
        return whole.view(-1, ring).T.flatten().chunk(size)[rank]
    u, r = (rank % ulysses, rank // ulysses) if low else (rank // ring, rank % ring)
    chunks = whole.chunk(2 * ring)
    return torch.cat([chunks[r], chunks[2 * ring - 1 - r]]).chunk(ulysses)[u]


def error(layer, mask, extract, **options):
    """The largest error of this rank's out, dq, dk, dv. `extract` cuts tensors (B, S, ...)."""
    is_packed = isinstance(layer, LongContextAttentionQKVPacked)
    tensors = random_qkv(2, mask.seq_len, 4, 4 if is_packed else 2, 8)
    local = [extract(x).detach() for x in tensors]
    inputs = [x.requires_grad_() for x in local[:3]]
    args = [torch.stack(inputs, 2)] if is_packed else inputs
    out = layer(*args, softmax_scale=0.3, return_attn_probs=True, **options)
    grads = torch.autograd.grad(out, inputs, local[3])
    whole, _, *dense = dense_results(mask, tensors, 0.3, softcap=options.get("softcap"))
    pairs = zip([out, *grads], [whole, *dense], strict=True)
    least = size_of_terms(tensors[3], 0.3)
    return max(relative_error(mine, extract(exact), least) for mine, exact in pairs)


def hybrid(rank):
    """Return the errors of every case, and check what is extracted."""
    found, causal, full = [alone(rank)], Mask.causal(TOKENS), Mask.full(TOKENS)
    for (ulysses, ring, low), kind in itertools.product(GRIDS, KINDS):
        set_seq_parallel_pg(ulysses, ring, rank, 4, low)
        assert (PROCESS_GROUP.ULYSSES_PG.size(), PROCESS_GROUP.RING_PG.size()) == (ulysses, ring)
        own = own_tokens(kind, TOKENS, ulysses, ring, rank, low)

        def extract(x, kind=kind, ring=ring, ulysses=ulysses):
            return EXTRACT_FUNC_DICT[kind](x, rank, world_size=4, rd=ring, ud=ulysses)

        assert extract(torch.arange(2 * TOKENS).view(2, -1)).equal(torch.stack([own, own + TOKENS]))
        layer = LongContextAttention(ring_impl_type=kind)
        found.append(error(layer, causal, extract, causal=True))
        if ulysses == ring or kind == "basic":
            packed = LongContextAttentionQKVPacked(ring_impl_type=kind, attn_type=AttnType.TORCH)
            found.append(error(packed, causal, extract, causal=True))
        if kind == "basic" and low:
            found.append(error(layer, full, extract, softcap=0.7))
            banded = Mask(TOKENS, (Slice((0, TOKENS), (0, TOKENS), -2, 8),))
            found.append(error(layer, banded, extract, window_size=(7, 2), deterministic=True))
    return found


def alone(rank):
    """UlyssesAttention, with 4 heads on 4 ranks, in the way of its own script."""
    whole, group = UlyssesAttention(), UlyssesAttention(dist.new_group(range(4)))
    return max(
        error(layer, mask, lambda x: x.chunk(4, 1)[rank], **options)
        for layer, mask, options in (
            (whole, Mask.causal(TOKENS), {"causal": True, "dropout_p": 0}),
            (group, Mask.full(TOKENS), {"softcap": 0.7}),
            (group, Mask.window(TOKENS, 6), {"causal": True, "window_size": (5, 0)}),
        )
    )


def test_layers_equal_dense_attention():
    for found in run_ranks(4, hybrid):
        assert max(found) < ROUNDING


WRONG_GROUPS = [  # arguments of set_seq_parallel_pg on each of two ranks, and what rank 1 says
    ((2, 1, 0, 3), (2, 1, 1, 3), "expected rank 1 of 2, got 1 of 3"),
    ((2, 2, 0, 2), (2, 2, 1, 2), "2 x 2 ranks do not divide the world of 2"),
    ((1.0, 2, 0, 2), (1.0, 2, 1, 2), "sp_ulysses_degree must be a whole number"),
    ((1, 2, 0, 2), (2, 1, 1, 2), "ranks differ in sp_ulysses_degree of set_seq_parallel"),
    ((2, 1, 0, 2, True), (2, 1, 1, 2, False), "set_seq_parallel_pg: rank 0 has True, rank 1 has F"),
    ((2, 1, 0, 2), (2, 1, 1, 3), "expected rank 1 of 2, got 1 of 3"),
]


def misuse(rank):
    """Check the errors of calls, those of a wrong rank 1 on both ranks."""

    def fails(message, call, *args, **options):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            call(*args, **options)
        assert (message if rank else "") in str(error.value)
        return str(error.value)

    q, k, v, _ = random_qkv(1, 5, 2, 2, 8)
    basic, strip, zigzag = (EXTRACT_FUNC_DICT[kind] for kind in KINDS)
    fails("call set_seq_parallel_pg first", LongContextAttention)
    fails("call set_seq_parallel_pg first", zigzag, q, rank, 2, rd=1, ud=2)
    for *arguments, message in WRONG_GROUPS:
        told = fails(message, set_seq_parallel_pg, *arguments[rank])
    assert rank or "rank 1 of the group failed" in told
    set_seq_parallel_pg(1, 2, rank, 2)
    fails("expected rd=2, ud=1 and their product as", strip, q, rank, 2, rd=1, ud=2)
    fails("basic: expected a multiple of 2 tokens, got 5", basic, q, rank, 2)
    x = torch.ones(1, 6)
    fails("zigzag: expected a multiple of 4 tokens, got 6", zigzag, x, rank, 2, rd=2, ud=1)
    layers = {kind: LongContextAttention(ring_impl_type=kind) for kind in KINDS}
    fails("zigzag attention is causal", layers["zigzag"], q, k, v)
    fails("strip attention is causal", layers["strip"], q, k, v)
    message = "zigzag: expected a multiple of 4 tokens, got 10"
    fails(message, layers["zigzag"], q, k, v, causal=True)
    message = "ValueError: key must be (batch, tokens, heads, head size), got shape (5, 2, 8)"
    fails(message, layers["basic"], q, k if rank else k[0], v)
    message = "qkv must be (batch, tokens, 3, heads, head size), got shape (1, 5, 2, 8)"
    fails(message, LongContextAttentionQKVPacked(), q)
    message = "ring_impl_type must be in ['basic', 'strip', 'zigzag'], got 'stripe'"
    fails(message, LongContextAttention, ring_impl_type="stripe")
    fails("must be (2, 1), got (1, 1)", LongContextAttention, scatter_idx=1)
    fails("must be (3, 1), got (2, 1)", LongContextAttentionQKVPacked, 2)
    wrong = {"attn_processor": torch.nn.Identity()}
    fails("attn_processor must be None", LongContextAttention, **wrong)
    message = "attn_type must be an AttnType that is exact, got "
    fails(f"{message}'fa'", LongContextAttention, attn_type="fa")
    fails(f"{message}<AttnType.SAGE_FP8", UlyssesAttention, None, attn_type=AttnType.SAGE_FP8)
    fails("expected dropout_p=0", UlyssesAttention(), q, k, v, dropout_p=0.1)
    message = "UlyssesAttention() got an unexpected keyword argument 'scale'; its arguments are q"
    fails(message, UlyssesAttention(), q, k, v, scale=0.1)
    options = {"causal": True, "softcap": -0.5 * rank}
    told = fails("softcap must be positive", layers["strip"], q, k, v, **options)
    assert rank or "rank 1 of the group failed" in told


@pytest.mark.parametrize(
    ("kind", "hint"),
    [("basic_flashinfer", ".*'basic' takes the fastest"), ("zigzag_npu", ".*'zigzag'"), (3, '"?$')],
)
def test_unknown_kinds_are_refused_with_what_to_write(kind, hint):
    dicts = (EXTRACT_FUNC_DICT, yunchang.RING_IMPL_DICT, yunchang.RING_IMPL_QKVPACKED_DICT)
    message = rf"must be in \['basic', 'strip', 'zigzag'\], got {kind!r}{hint}"
    for functions in dicts:
        with pytest.raises(KeyError, match=message):
            functions[kind]
    with pytest.raises(ValueError, match=message):
        LongContextAttention(ring_impl_type=kind)


def test_wrong_calls_are_refused():
    run_ranks(2, misuse)


def test_groups_are_of_torch_distributeds_ranks():
    with pytest.raises(RuntimeError, match="before set_seq_parallel_pg"):
        set_seq_parallel_pg(1, 1, 0, 1)


def test_arguments_have_the_names_order_and_defaults_of_that_package():
    def shown(function):
        parameters = inspect.signature(function).parameters.values()
        return " ".join(str(p.replace(annotation=p.empty)).replace(" ", "") for p in parameters)

    attn_type = f"attn_type={AttnType.FA!r}".replace(" ", "")
    made = {
        LongContextAttention: "scatter_idx=2 gather_idx=1 ring_impl_type='basic' "
        f"use_pack_qkv=False use_sync=False {attn_type} attn_processor=None",
        LongContextAttentionQKVPacked: "scatter_idx=3 gather_idx=1 ring_impl_type='basic' "
        f"use_sync=False {attn_type}",
        UlyssesAttention: "sequence_process_group=None scatter_idx=2 gather_idx=1 use_sync=False "
        f"{attn_type}",
        UlyssesAttention().attend: "query key value dropout_p=0.0 softmax_scale=None causal=False "
        "window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False "
        "return_attn_probs=False",
        set_seq_parallel_pg: "sp_ulysses_degree sp_ring_degree rank world_size "
        "use_ulysses_low=True",
    }
    assert {function: shown(function) for function in made} == made


def test_names_are_where_that_package_has_them():
    from bmt_burst.compat.yunchang import comm, globals, hybrid, kernels, ring, ulysses
    from bmt_burst.compat.yunchang.hybrid import utils

    assert comm.EXTRACT_FUNC_DICT is EXTRACT_FUNC_DICT
    assert tuple(EXTRACT_FUNC_DICT) == KINDS
    assert yunchang.stripe_extract_local is EXTRACT_FUNC_DICT["strip"]
    assert globals.PROCESS_GROUP is PROCESS_GROUP
    assert hybrid.LongContextAttentionQKVPacked is LongContextAttentionQKVPacked
    assert kernels.AttnType is AttnType
    assert AttnType("fa3") is AttnType.FA3
    assert ulysses.UlyssesAttention is UlyssesAttention
    names = {"basic": "ring", "strip": "stripe", "zigzag": "zigzag_ring"}
    for kind, name in names.items():
        function = getattr(ring_flash_attn, f"{name}_flash_attn_func")
        assert utils.RING_IMPL_DICT[kind] is function
        assert getattr(ring, f"{name}_flash_attn_func") is function
        packed = getattr(yunchang, f"{name}_flash_attn_qkvpacked_func")
        assert yunchang.RING_IMPL_QKVPACKED_DICT[kind] is packed
