"""Masks as users have them: of rows, packed documents, blind queries and windows."""

import itertools
import random

import pytest
import torch

from bmt_burst import (
    Layout,
    Mask,
    burst_attn_func,
    burst_attn_kvpacked_func,
    burst_attn_varlen_func,
    simulate,
)
from bmt_burst.ranks.rings import MOST_KEPT
from bmt_burst.sequence.layout import LAYOUTS, Balanced
from bmt_burst.sequence.tile import KernelCall
from tests.cases import call_tensors, made_layout, random_mask, random_qkv
from tests.reference import assert_close, dense_results, relative_error
from tests.refusals import refusal
from tests.rings import call_messages, ring_arguments, shard_results, worst_rank_error

SCALE = 0.3
NAMES = [*LAYOUTS, Balanced.name]


def assert_equal(got, mask, tensors):
    """Check out, lse, dq, dk, dv against dense attention."""
    assert_close(got, dense_results(mask, tensors, SCALE), tensors[3], SCALE, 1e-12)


def results_of_rows(masks, layouts, tensors, inner=None, kv_layouts=None, **options):
    """Return out, lse, dq, dk, dv of rows of a call with their own masks and layouts."""
    size, keys = layouts[0].size, kv_layouts or layouts

    def work(ring):
        shards = [
            torch.stack(
                [layout.shard(row, ring.rank, 0) for layout, row in zip(rows, x, strict=True)]
            )
            for rows, x in zip((layouts, keys, keys, layouts), tensors, strict=True)
        ]
        groups = ring_arguments(ring, inner or size)
        return shard_results(shards, SCALE, mask=masks, **options, **groups)

    results = simulate(size, work)
    rows = range(len(layouts))
    whole = [
        [
            (keys if i > 2 else layouts)[row].unshard([r[i][row] for r in results], int(i == 1))
            for i in range(5)
        ]
        for row in rows
    ]
    return [[x.unsqueeze(0) for x in row] for row in whole]


@pytest.mark.parametrize("seed", range(8))
def test_rows_have_masks_and_layouts_of_their_own(seed):
    """Each row is what it is alone. The last seeds have keys of other lengths and layouts."""
    chance = random.Random(seed)
    size, inner = [(1, 1), (2, 2), (3, 3), (4, 2)][seed % 4]
    tokens, rows = size * chance.randint(2, 8), chance.randint(2, 3)
    keys = tokens + size * chance.randint(0, 4) if seed > 3 else tokens
    masks = [random_mask(chance, keys).rows(keys - tokens, keys) for _ in range(rows)]
    layouts = [made_layout(chance.choice(NAMES), mask, size) for mask in masks]
    options = {
        "backward": chance.choice(("q", "kv")),
        "group_bytes": chance.choice((0, 5000, 1 << 30)),
        "layout": layouts,
    }
    kv_layouts = None
    if seed > 3:
        kv_layouts = [made_layout(chance.choice(NAMES), mask.transposed, size) for mask in masks]
        options["kv_layout"] = kv_layouts
    call = KernelCall.whole(tokens, keys)
    tensors = call_tensors(call, rows, 4, 2, 8, seed=seed)
    got = results_of_rows(masks, layouts, tensors, inner, kv_layouts, **options)
    for row, (mask, mine) in enumerate(zip(masks, got, strict=True)):
        assert_equal(mine, mask, [x[row : row + 1] for x in tensors])


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("zigzag", list), ("balanced", tuple), (["contiguous", "balanced", "striped"], tuple)],
)
def test_rows_in_layouts_by_name(layout, kind):
    """One name for all rows, or one for each; "balanced" is each row's own."""
    masks = [
        Mask.documents((0, 5, 24)),
        Mask.documents((0, 11, 13, 24), causal=False),
        Mask.window(24, 4),
    ]
    names = [layout] * 3 if isinstance(layout, str) else layout
    layouts = [made_layout(name, mask, 3) for name, mask in zip(names, masks, strict=True)]
    tensors = random_qkv(3, 24, 2, 2, 8)
    given = layout if isinstance(layout, str) else kind(layout)
    for row, mine in enumerate(results_of_rows(kind(masks), layouts, tensors, layout=given)):
        assert_equal(mine, masks[row], [x[row : row + 1] for x in tensors])


@pytest.mark.parametrize("causal", [True, False])
def test_rows_with_layouts_alone(causal):
    """The mask of each is causal, or full."""
    layouts = [Layout.zigzag(24, 3), Layout.balanced(Mask.documents((0, 20, 24)), 3)]
    tensors = random_qkv(2, 24, 2, 1, 8)
    got = results_of_rows(None, layouts, tensors, layout=layouts, causal=causal)
    mask = (Mask.causal if causal else Mask.full)(24)
    for row, mine in enumerate(got):
        assert_equal(mine, mask, [x[row : row + 1] for x in tensors])


def test_many_rows_fit_into_a_message():
    """Whatever ranks say of a call to each other."""
    masks = [Mask.documents((0, 2 + row, 130)) for row in range(120)]
    q, k, v = (x.expand(120, -1, -1, -1) for x in random_qkv(1, 65, 1, 1, 8)[:3])
    mixed = ["zigzag", "balanced", "contiguous"] * 40
    for layout in ("balanced", mixed):
        outs = simulate(
            2,
            lambda ring, x=layout: burst_attn_func(
                q, k, v, mask=masks, layout=x, process_group=ring
            ),
        )
        assert outs[0].shape == (120, 65, 1, 8)


def packed_results(whole, tensors, cu_seqlens, kv_whole=None, **options):
    """As ring_results, of burst_attn_varlen_func on the first row."""
    keys = kv_whole or whole

    def work(ring):
        layouts = whole, keys, keys, whole
        q, k, v, dout = (
            layout.shard(x[0], ring.rank, 0) for layout, x in zip(layouts, tensors, strict=True)
        )
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out, lse = burst_attn_varlen_func(
            *inputs, cu_seqlens, SCALE, process_group=ring, return_lse=True, **options
        )
        assert (out.shape, lse.shape) == (q.shape, (q.shape[1], q.shape[0]))
        return out.detach(), lse, *torch.autograd.grad(out, inputs, dout)

    results = simulate(whole.size, work)
    return [
        layout.unshard([r[i] for r in results], int(i == 1)).unsqueeze(0)
        for i, layout in enumerate((whole, whole, whole, keys, keys))
    ]


CUTS = (0, 3, 4, 17, 31)


@pytest.mark.parametrize(
    ("causal", "window", "size"), [(True, None, 1), (True, 4, 3), (False, None, 3), (False, 4, 1)]
)
def test_packed_documents(causal, window, size):
    mask, tensors = Mask.documents(CUTS, causal, window), random_qkv(1, 31, 4, 2, 8)
    kinds = [list(CUTS), CUTS, torch.tensor(CUTS, dtype=torch.int32), torch.tensor(CUTS)]
    layouts = ["zigzag", Layout.balanced(mask, size), "balanced", Layout.striped(31, size)]
    for cuts, layout in zip(kinds, layouts, strict=True):
        whole = made_layout(layout, mask, size) if isinstance(layout, str) else layout
        got = packed_results(whole, tensors, cuts, causal=causal, window=window, layout=layout)
        assert_equal(got, mask, tensors)


KV_CUTS = (0, 5, 5, 30, 35)  # of the same documents; the second has no keys


@pytest.mark.parametrize("layout", ["zigzag", "balanced", "striped"])
def test_packed_documents_of_two_lengths(layout):
    """By name a layout is that of both sides, each for its own length."""
    tensors = call_tensors(KernelCall.whole(31, 35), 1, 4, 2, 8)
    for causal, window in ((True, None), (False, None), (True, 4)):
        mask = Mask.documents(CUTS, causal, window, kv_cu_seqlens=KV_CUTS)
        layouts = [made_layout(layout, x, 3) for x in (mask, mask.transposed)]
        options = {"causal": causal, "window": window, "cu_seqlens_k": torch.tensor(KV_CUTS)}
        got = packed_results(layouts[0], tensors, CUTS, layouts[1], layout=layout, **options)
        assert_equal(got, mask, tensors)
        options |= {"layout": layouts[0], "kv_layout": layouts[1]}
        again = packed_results(layouts[0], tensors, CUTS, layouts[1], **options)
        assert all(x.equal(y) for x, y in zip(got, again, strict=True))


def test_causal_queries_are_the_last_tokens_of_the_keys():
    """Without a mask: packed keys and values, on one rank and three."""
    q, k, v, _ = call_tensors(KernelCall.whole(7, 31), 2, 4, 2, 8)
    for causal, size in itertools.product((True, False), (1, 3)):
        mask = (Mask.causal if causal else Mask.full)(7, kv_len=31)
        layouts = Layout.zigzag(7, size), Layout.zigzag(31, size)

        def work(ring, layouts=layouts, causal=causal):
            kv = layouts[1].shard(torch.stack((k, v), 2), ring.rank)
            q_local = layouts[0].shard(q, ring.rank)
            return burst_attn_kvpacked_func(q_local, kv, SCALE, causal=causal, process_group=ring)

        out = layouts[0].unshard(simulate(size, work))
        assert relative_error(out, dense_results(mask, [q, k, v], SCALE)[0]) < 1e-12


def test_packed_documents_alone_and_without_lse():
    q, k, v = (x[0] for x in random_qkv(1, 31, 4, 2, 8)[:3])
    out = burst_attn_varlen_func(q, k, v, CUTS)
    assert out.shape == q.shape
    for start, stop in itertools.pairwise(CUTS):
        parts = (x[None, start:stop] for x in (q, k, v))
        assert relative_error(out[start:stop], burst_attn_func(*parts)[0]) < 1e-14
    positional = burst_attn_varlen_func(q, k, v, CUTS, 0.3, "cpu", True, 4, None, (None, None))
    assert positional.equal(burst_attn_varlen_func(q, k, v, CUTS, 0.3, causal=True, window=4))
    further = {"backward": "kv", "deterministic": True, "group_bytes": 0, "strategy": "ring"}
    assert burst_attn_varlen_func(q, k, v, CUTS, **further).equal(out)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"q": torch.zeros(1, 31, 4, 8)}, r"ValueError: q must be packed, \(tokens, heads, head"),
        ({"v": torch.zeros(31, 1, 8).double()}, "ValueError: k and v must have the same batch"),
        ({"cu_seqlens_k": (0, 31)}, "ValueError: expected cu_seqlens_k of as many documents as"),
        (
            {"cu_seqlens_k": (0, 3, 4, 17, 32)},
            r"ValueError: cu_seqlens_k .* has 32 keys, the ranks",
        ),
        ({"cu_seqlens_k": (0, 5, 4, 17, 31)}, "ValueError: cu_seqlens_k must not decrease"),
        ({"kv_layout": 3}, "TypeError: kv_layout must be .*, got int"),
    ],
)
def test_wrong_packed_documents_are_refused(change, error):
    q, k, v = (x[0] for x in random_qkv(1, 31, 4, 2, 8)[:3])
    with refusal(error):
        burst_attn_varlen_func(**{"q": q, "k": k, "v": v, "cu_seqlens": CUTS, **change})


@pytest.mark.parametrize("count", [5, 8, 10])
def test_flash_attns_order_of_arguments_is_refused_by_the_first_wrong_one(count):
    """On every rank, also where one of them alone uses it."""
    tensors = random_qkv(1, 12, 4, 2, 8)[:3]
    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
    flash_attn = [cu_seqlens, cu_seqlens, 7, 7, 0.0, None, True][: count - 3]
    message = (
        r"softmax_scale must be a number, got a Tensor: .* takes cu_seqlens_k by name "
        r"and no"
    )
    with pytest.raises(TypeError, match=message):
        burst_attn_varlen_func(*(x[0] for x in tensors), *flash_attn)

    def work(ring):
        mine = [Layout.zigzag(12, 2).shard(x[0], ring.rank, 0) for x in tensors]
        arguments = flash_attn if ring.rank else [cu_seqlens]
        with pytest.raises(TypeError if ring.rank else ValueError, match=message):
            burst_attn_varlen_func(*mine, *arguments, process_group=ring)

    if count < 9:  # the ninth is taken for the group
        simulate(2, work)


def messages(mask, layout, inner=None, backward="kv", group_bytes=1 << 30):
    """Return the peer and bytes of each message of each rank, in the forward and the backward."""
    tensors = random_qkv(1, layout.seq_len, 2, 1, 8, torch.float32)
    options = {"mask": mask, "backward": backward, "group_bytes": group_bytes}
    sent = call_messages(layout, tensors, inner or layout.size, **options)
    return [[[*itertools.chain(*half)] for half in halves] for halves in sent]


@pytest.mark.parametrize(("tokens", "group_bytes"), [(64, 0), (4096, 1 << 30)])
@pytest.mark.parametrize(
    ("inner", "there", "back"),
    # rank 3 hands on what crossed hosts, and back
    [(4, (1, 1, 1, 0), (0, 1, 1, 1)), (2, (1, 1, 1, 1), (0, 1, 1, 2))],
)
def test_of_a_window_less_than_a_window_travels_whatever_the_length(
    tokens, group_bytes, inner, there, back
):
    """Contiguous: each rank sends its last window - 1 tokens to the next, and gets gradients."""
    window, token = 9, 2 * 8 * 4  # bytes of k and v of a token
    sent = messages(
        Mask.window(tokens, window), Layout.contiguous(tokens, 4), inner, group_bytes=group_bytes
    )
    for (forward, backward), sends, returns in zip(sent, there, back, strict=True):
        assert sum(size for _, size in forward) == sends * (window - 1) * token
        assert sum(size for _, size in backward) == (sends + returns) * (window - 1) * token
        assert len({peer for peer, _ in forward}) == sends


@pytest.mark.parametrize("inner", [4, 2, 1])
@pytest.mark.parametrize("backward", ["q", "kv"])
def test_what_is_whole_on_a_rank_does_not_travel(inner, backward):
    """No message where no document crosses ranks, else only between ranks that share it."""
    documents = Mask.documents((0, 4, 16, 20, 32, 47, 48, 64))
    for layout in (Layout.contiguous(64, 4), Layout.balanced(Mask.documents(range(0, 65, 8)), 4)):
        mask = documents if layout.name == "contiguous" else Mask.documents(range(0, 65, 8))
        assert messages(mask, layout, inner, backward) == [[[], []]] * 4
    sent = messages(
        Mask.documents((0, 4, 16, 20, 40, 47, 48, 64)), Layout.contiguous(64, 4), 4, backward
    )
    assert [sorted({peer for half in halves for peer, _ in half}) for halves in sent] == [
        [],
        [2],
        [1],
        [],
    ]


def test_plans_of_the_last_masks_are_kept():
    """Also one that is used again and again, as by a model of two masks that come in turn."""
    again = Mask.causal(64)
    masks = [
        Mask.documents((0, 1 + number % 63, 64), window=2 + number // 63)
        for number in range(MOST_KEPT + 9)
    ]

    def work(ring):
        q, k, v = random_qkv(1, 32, 1, 1, 4)[:3]
        plans = set()
        for mask in masks:
            for each in (again, mask):
                burst_attn_func(q, k, v, mask=each, process_group=ring)
            [history] = ring.histories.values()
            assert len(history.plans) <= MOST_KEPT
            kept = {plan.problem.mask: id(plan) for plan in history.plans.values()}
            plans.add(kept.pop(again))
        return len(plans), [*kept]

    assert simulate(2, work) == [(1, masks[1 - MOST_KEPT :])] * 2


def test_calls_are_not_confused_with_those_that_look_alike_on_a_rank():
    """Sequences of 16 and 15 tokens are both 8 tokens to rank 0."""
    calls = []
    for tokens in (16, 15, 16, 15, 14):
        tensors = random_qkv(1, tokens, 2, 2, 8)
        exact = dense_results(Mask.causal(tokens), tensors, SCALE)
        calls.append((Layout.zigzag(tokens, 2), tensors, exact))

    def work(ring):
        options = {"causal": True, "layout": "zigzag", "process_group": ring}
        return max(worst_rank_error(ring.rank, *call, SCALE, **options) for call in calls)

    assert max(simulate(2, work)) < 1e-12
