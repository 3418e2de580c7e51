"""Layers of yunchang, computed here, over gloo against dense attention; tokens are cut without
Layouts.
"""

import importlib.util
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
    RING_IMPL_QKVPACKED_DICT,
    AttnType,
    LongContextAttention,
    UlyssesAttention,
    set_seq_parallel_pg,
)
from bmt_burst.compat.yunchang.comm import extracted_layout
from bmt_burst.compat.yunchang.hybrid.utils import RING_IMPL_DICT
from tests.helpers import dense_results, random_qkv, relative_error, run_ranks, size_of_terms

KINDS = ("basic", "strip", "zigzag")
OPTIONS = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False"
)
TOKENS = 48
ROUNDING = 1e-12  # of fp64, relative to the whole tensor
DEGREES = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(4, 1), (2, 2), (1, 4)]}


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


def cases(size):
    return itertools.product(DEGREES[size], KINDS, (True, False))


def error(layer, mask, extract, **options):
    """The largest relative error of this rank's out, dq, dk, dv; `extract` cuts tensors (B, S,
    ...).
    """
    tensors = random_qkv(2, mask.seq_len, 4, 2, 8)
    local = [extract(x).detach() for x in tensors]
    inputs = [x.requires_grad_() for x in local[:3]]
    out = layer(*inputs, softmax_scale=0.3, return_attn_probs=True, **options)
    grads = torch.autograd.grad(out, inputs, local[3])
    whole, _, *dense = dense_results(mask, tensors, 0.3, softcap=options.get("softcap"))
    pairs = zip([out, *grads], [whole, *dense], strict=True)
    least = size_of_terms(tensors[3], 0.3)
    return max(relative_error(mine, extract(exact), least) for mine, exact in pairs)


def hybrid(rank, size):
    """Errors in every case; what is extracted is looked at too."""
    found = []
    for (ulysses, ring), kind, low in cases(size):
        set_seq_parallel_pg(ulysses, ring, rank, size, low)
        assert (PROCESS_GROUP.ULYSSES_PG.size(), PROCESS_GROUP.RING_PG.size()) == (ulysses, ring)
        own = own_tokens(kind, TOKENS, ulysses, ring, rank, low)

        def extract(x, kind=kind, ring=ring, ulysses=ulysses):
            return EXTRACT_FUNC_DICT[kind](x, rank, world_size=size, rd=ring, ud=ulysses)

        assert extract(torch.arange(2 * TOKENS).view(2, TOKENS)).equal(
            torch.stack([own, own + TOKENS])
        )
        causal, layer = Mask.causal(TOKENS), LongContextAttention(ring_impl_type=kind)
        found.append(error(layer, causal, extract, causal=True))
        if kind == "basic":
            found.append(error(layer, Mask.full(TOKENS), extract, softcap=0.7))
            banded = Mask(TOKENS, (Slice((0, TOKENS), (0, TOKENS), -2, 8),))
            found.append(error(layer, banded, extract, window_size=(7, 2), deterministic=True))
    found.append(alone(rank, size))
    return found


def alone(rank, size):
    """UlyssesAttention, with 4 heads on up to 4 ranks, in the way of its own script."""
    layer = UlyssesAttention(dist.new_group(range(size)) if size % 2 else None)
    return max(
        error(layer, mask, lambda x: x.chunk(size, 1)[rank], **options)
        for mask, options in (
            (Mask.causal(TOKENS), {"causal": True, "dropout_p": 0}),
            (Mask.full(TOKENS), {}),
            (Mask.full(TOKENS), {"softcap": 0.7}),
            (Mask.window(TOKENS, 6), {"causal": True, "window_size": (5, 0)}),
        )
    )


@pytest.mark.parametrize("size", [3, 4])
def test_layers_equal_dense_attention(size):
    for found in run_ranks(size, hybrid, size):
        assert len(found) == len(DEGREES[size]) * 2 * 5 + 1
        assert max(found) < ROUNDING


def of_two_sequences(rank):
    """Ranks 0 and 1 share one, 2 and 3 another one; the other layers keep the groups that they were
    made with.
    """
    set_seq_parallel_pg(2, 2, rank, 4)
    before = LongContextAttention()
    set_seq_parallel_pg(1, 2, rank, 4)
    members = dist.get_process_group_ranks(PROCESS_GROUP.SEQUENCE_PG)
    assert members == [rank // 2 * 2, rank // 2 * 2 + 1]
    tensors = [x + rank // 2 for x in random_qkv(1, 8, 2, 2, 8)]
    local = [EXTRACT_FUNC_DICT["zigzag"](x, rank % 2, world_size=2, rd=2, ud=1) for x in tensors]
    out = LongContextAttention(ring_impl_type="zigzag")(*local[:3], causal=True)
    exact = dense_results(Mask.causal(8), tensors, 8**-0.5)[0]
    found = relative_error(
        out, EXTRACT_FUNC_DICT["zigzag"](exact, rank % 2, world_size=2, rd=2, ud=1)
    )
    tensors = random_qkv(1, 8, 2, 2, 8)
    out = before(*(x.chunk(4, 1)[rank] for x in tensors[:3]))
    return found, relative_error(
        out, dense_results(Mask.full(8), tensors, 8**-0.5)[0].chunk(4, 1)[rank]
    )


def test_groups_of_several_sequences():
    for found in run_ranks(4, of_two_sequences):
        assert max(found) < ROUNDING


def caught(call, *args, **options):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        call(*args, **options)
    return str(error.value)


def misuse(rank):
    q, k, v, _ = random_qkv(1, 5, 2, 2, 8)
    said = [
        caught(LongContextAttention),
        caught(EXTRACT_FUNC_DICT["zigzag"], q, rank, 2, rd=1, ud=2),
    ]
    said += [
        caught(set_seq_parallel_pg, 2, 1, rank, 3),
        caught(set_seq_parallel_pg, 2, 2, rank, 2),
        caught(set_seq_parallel_pg, 1.0, 2, rank, 2),
        caught(set_seq_parallel_pg, 1 + rank, 2 - rank, rank, 2),
        caught(set_seq_parallel_pg, 2, 1, rank, 2, rank == 0),
        caught(set_seq_parallel_pg, 2, 1, rank, 2 + rank),
    ]
    set_seq_parallel_pg(1, 2, rank, 2)
    zigzag, strip = (
        LongContextAttention(ring_impl_type="zigzag"),
        LongContextAttention(ring_impl_type="strip"),
    )
    said += [
        caught(EXTRACT_FUNC_DICT["strip"], q, rank, 2, rd=1, ud=2),
        caught(EXTRACT_FUNC_DICT["basic"], q, rank, 2),
        caught(EXTRACT_FUNC_DICT["zigzag"], torch.ones(1, 6), rank, 2, rd=2, ud=1),
        caught(zigzag, q, k, v),
        caught(strip, q, k, v),
        caught(zigzag, q, k, v, causal=True),
        caught(strip, q, k, v, causal=True, softcap=-0.5 * rank),
        caught(LongContextAttention, ring_impl_type="stripe"),
        caught(LongContextAttention, scatter_idx=1),
        caught(LongContextAttention, attn_processor=torch.nn.Identity()),
        caught(LongContextAttention, attn_type="fa"),
        caught(UlyssesAttention, None, attn_type=AttnType.SAGE_FP8),
        caught(UlyssesAttention(), q, k, v, dropout_p=0.1),
    ]
    return said


def test_groups_are_of_torch_distributeds_ranks():
    with pytest.raises(RuntimeError, match="before set_seq_parallel_pg"):
        set_seq_parallel_pg(1, 1, 0, 1)


def test_what_is_wrong_is_said():
    first, second = run_ranks(2, misuse)
    expected = [
        "call set_seq_parallel_pg first",
        "call set_seq_parallel_pg first",
        "as torch.distributed has it, got rank 1 of 3",
        "the world of 2 ranks does not divide by 2 x 2 ranks",
        "sp_ulysses_degree must be a whole number",
        "ranks differ in set_seq_parallel_pg: rank 0 has {'sp_ulysses_degree': 1, "
        "'sp_ring_degree': 2,",
        "ranks differ in set_seq_parallel_pg: rank 0 has {'sp_ulysses_degree': 2, "
        "'sp_ring_degree': 1,",
        "expected rank 1 of 2, as torch.distributed has it, got rank 1 of 3",
        "expected rd=2, ud=1 and their product as world_size",
        "basic: 5 tokens cannot be cut in 2 equal parts",
        "zigzag: 6 tokens cannot be cut in 2 equal parts, or 4",
        "zigzag attention is causal",
        "strip attention is causal",
        "zigzag: 10 tokens cannot be cut",
        "softcap must be positive",
        "expected a ring_impl_type of ['basic', 'strip', 'zigzag'], got 'stripe'",
        "must be (2, 1), got (1, 1)",
        "attn_processor must be None",
        "attn_type must be an AttnType, got 'fa'",
        "approximates attention",
        "expected dropout_p=0",
    ]
    for said, part in zip(second, expected, strict=True):
        assert part in said
    assert (
        "rank 1 of the group failed"
        in first[
            expected.index("expected rank 1 of 2, as torch.distributed has it, got rank 1 of 3")
        ]
    )
    assert "rank 1 of the group failed" in first[expected.index("softcap must be positive")]


def test_arguments_have_the_names_order_and_defaults_of_that_package():
    def shown(function):
        parameters = list(inspect.signature(function).parameters.values())[1:]
        return " ".join(str(p.replace(annotation=p.empty)).replace(" ", "") for p in parameters)

    forwards = {
        LongContextAttention: f"query key value {OPTIONS}",
        UlyssesAttention: f"query key value {OPTIONS}",
    }
    assert {layer: shown(layer.forward) for layer in forwards} == forwards
    attn_type = f"attn_type={AttnType.FA!r}".replace(" ", "")
    made = {
        LongContextAttention: "scatter_idx=2 gather_idx=1 ring_impl_type='basic' "
        f"use_pack_qkv=False use_sync=False {attn_type} attn_processor=None",
        UlyssesAttention: "sequence_process_group=None scatter_idx=2 gather_idx=1 use_sync=False "
        f"{attn_type}",
    }
    assert {layer: shown(layer.__init__) for layer in made} == made
    groups = inspect.signature(set_seq_parallel_pg).parameters.values()
    assert [p.name for p in groups] == [
        "sp_ulysses_degree",
        "sp_ring_degree",
        "rank",
        "world_size",
        "use_ulysses_low",
    ]


def test_names_are_where_that_package_has_them():
    from bmt_burst.compat.yunchang import comm, globals, hybrid, kernels, ring, ulysses

    assert comm.EXTRACT_FUNC_DICT is yunchang.EXTRACT_FUNC_DICT
    assert set(EXTRACT_FUNC_DICT) == set(KINDS)
    assert globals.PROCESS_GROUP is PROCESS_GROUP
    assert globals.HAS_FLASH_ATTN is (importlib.util.find_spec("flash_attn") is not None)
    assert hybrid.LongContextAttention is LongContextAttention
    assert hybrid.RING_IMPL_QKVPACKED_DICT is RING_IMPL_QKVPACKED_DICT
    assert all(getattr(yunchang, name) is getattr(ring, name) for name in ring.__all__)
    assert kernels.AttnType is AttnType
    assert ulysses.UlyssesAttention is UlyssesAttention


def test_functions_of_a_ring_are_those_of_ring_flash_attention():
    assert {name for name in ring_flash_attn.__all__ if name.endswith("_func")} - set(
        yunchang.ring.__all__
    ) == {f"llama3_flash_attn_varlen{form}_func" for form in ("", "_kvpacked", "_qkvpacked")}
    for name in yunchang.ring.__all__:
        assert getattr(yunchang, name) is getattr(ring_flash_attn, name)
    names = {"basic": "ring", "zigzag": "zigzag_ring", "strip": "stripe"}
    for form, functions in (("", RING_IMPL_DICT), ("_qkvpacked", RING_IMPL_QKVPACKED_DICT)):
        assert functions == {
            kind: getattr(ring_flash_attn, f"{name}_flash_attn{form}_func")
            for kind, name in names.items()
        }


@pytest.mark.parametrize(("ulysses", "ring"), [(3, 2), (2, 3), (6, 4), (1, 5)])
@pytest.mark.parametrize("low", [True, False])
def test_layouts_of_more_ranks(ulysses, ring, low):
    for kind in KINDS:
        layout = extracted_layout(kind, 4 * ulysses * ring, ulysses, ring, low)
        for rank in range(ulysses * ring):
            assert layout.positions(rank).equal(
                own_tokens(kind, layout.seq_len, ulysses, ring, rank, low)
            )
    assert repr(layout) == f"<zigzag of {4 * ulysses * ring} tokens on {ulysses} x {ring} ranks>"
