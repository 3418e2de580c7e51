"""Whole sequences as handles: `SequenceParallel.sequence`, and layers and calls that take one."""

import gc
import itertools
import random
import weakref

import pytest
import torch

from bmt_burst import (
    IGNORE_INDEX,
    Layout,
    Mask,
    SequenceParallel,
    burst_attn_func,
    burst_attn_qkvpacked_func,
    lightning_attn_func,
    nn,
    simulate,
)
from bmt_burst.errors import RanksDisagree
from bmt_burst.lightning.rates import alibi_slopes
from bmt_burst.transport import ALONE
from tests.cases import random_qkv
from tests.reference import assert_close, dense_results
from tests.refusals import refusal
from tests.rings import on_ranks, shard_results

MASK = Mask.documents((0, 5, 17, 24))
ROWS = [MASK, Mask.causal(24)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_call_with_it_equals_dense_attention(size):
    tensors = random_qkv(1, 24, 4, 2, 8)

    def work(sp):
        batch = sp.sequence(MASK)
        shards = [batch.shard(x) for x in tensors]
        got = shard_results(shards, 0.3, mask=batch)
        return [batch.unshard(x, 2 if i == 1 else 1) for i, x in enumerate(got)]

    for got in on_ranks(size, work):
        assert_close(got, dense_results(MASK, tensors, 0.3), tensors[3], 0.3, 1e-12)


def test_lightning_attention_takes_it():
    x, slopes = torch.randn(2, 24, 2, 8, dtype=torch.float64), alibi_slopes(2).double()

    def work(sp):
        batch = sp.sequence(ROWS)
        out = lightning_attn_func(*[batch.shard(x)] * 3, slopes, mask=batch)
        with pytest.raises(ValueError, match="expected mask=sequence alone"):
            lightning_attn_func(*[batch.shard(x)] * 3, slopes, mask=batch, layout="contiguous")
        apart = sp.sequence(MASK, "contiguous", "zigzag")
        with pytest.raises(ValueError, match="expected a sequence without kv_layout"):
            lightning_attn_func(*[apart.shard(x)] * 3, slopes, mask=apart)
        return batch.unshard(out)

    expected = lightning_attn_func(x, x, x, slopes, mask=ROWS, process_group=ALONE)
    for out in on_ranks(2, work):
        assert (out - expected).abs().max() < 1e-12


def test_it_has_what_a_training_script_needs():
    tokens = torch.arange(48).view(2, 24)

    def work(sp):
        batch = sp.sequence(ROWS)
        positions = batch.positions()
        assert batch.select(positions) is positions
        whole = batch.unshard(positions.unsqueeze(-1)).squeeze(-1)
        expected = torch.stack([mask.positions() for mask in ROWS])
        assert whole.equal(expected)
        assert batch.longest(positions).tolist() == [12, 24]
        labels = batch.shift_labels(tokens)
        ends = [4, 16, 23]
        assert (labels[0, ends] == IGNORE_INDEX).all() and labels[1, 4] == 29
        assert batch.sum(torch.tensor(sp.rank + 1)) == 3
        return batch.seq_len, batch.batch

    assert on_ranks(2, work) == [(24, 2)] * 2


def test_a_window_needs_no_length():
    tensors = random_qkv(1, 24, 2, 2, 8)

    def work(sp):
        layer = nn.BurstAttention(16, 2, sp=sp, window=4).double()
        for part in layer.parameters():
            torch.nn.init.ones_(part)
        layout, x = sp.layout_of(24), tensors[0].flatten(2)
        tables = nn.rope_tables(layout.positions(sp.rank), 8)
        mine = layout.shard(x, sp.rank)
        return layer(mine, *tables).equal(layer(mine, *tables, mask=Mask.causal(24)))

    assert on_ranks(2, work) == [True, True]


def test_it_prints_itself():
    [shown, _] = on_ranks(2, lambda sp: str(sp.sequence(MASK, "zigzag")))
    assert shown.startswith("24 tokens, 3 documents, ")
    assert shown.endswith("rank 0: 0-5, 18-23\nrank 1: 6-11, 12-17")


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"mask": "causal"}, "failed before a call of sequence: TypeError: mask must be a Mask"),
        ({"mask": None}, "failed before a call of sequence: TypeError: mask must be a Mask"),
        ({"mask": MASK, "layout": "none"}, "ValueError: unknown layout 'none'"),
        ({"mask": MASK, "layout": Layout.zigzag(24, 3)}, "expected a layout on 2 ranks, got one"),
        (
            {"mask": Mask.documents((0, 5, 17, 20, 24)), "layout": "zigzag"},
            "ranks differ in mask or causal of a sequence: rank 0 has '24 tokens in 3 slices', "
            "rank 1 has '24 tokens in 4 slices'; the first query that differs is 20: it sees keys "
            "17-20 on rank 0 and keys 20 on rank 1",
        ),
        (
            {"mask": MASK, "layout": "contiguous"},
            "ranks differ in layout of a sequence: rank 0 has 'zigzag of 24 tokens', rank 1 has "
            "'contiguous of 24 tokens'; rank 0 puts tokens 0-5 on rank 0, rank 1 puts tokens 0-11",
        ),
    ],
)
def test_ranks_compare_it(theirs, message):
    def work(sp):
        given = {"mask": MASK, "layout": "zigzag"} if sp.rank == 0 else theirs
        with pytest.raises((ValueError, TypeError)) as caught:
            sp.sequence(**given)
        sp.sequence(MASK)  # the group is usable
        return str(caught.value)

    assert message in on_ranks(2, work)[0]


def test_long_masks_are_compared_in_several_messages():
    bounds = range(0, 5001, 5)
    masks = Mask.documents(bounds), Mask.documents([*bounds[:900], 4501, *bounds[901:]])

    def work(sp):
        q = torch.zeros(1, 2500, 1, 8)
        with pytest.raises(ValueError) as caught:
            burst_attn_func(q, q, q, mask=masks[sp.rank], process_group=sp.process_group)
        return str(caught.value)

    assert (
        "the first query that differs is 4500: it sees keys 4500 on rank 0 and keys 4495-450"
        in (on_ranks(2, work)[0])
    )


@pytest.mark.parametrize("more", [{"layout": "striped"}, {"causal": True}, {"kv_layout": "zigzag"}])
def test_a_call_with_it_takes_no_other_mask_or_layout(more):
    batch = SequenceParallel().sequence(MASK)
    x = torch.zeros(1, 24, 2, 8)
    with pytest.raises(ValueError, match="expected mask=sequence alone"):
        burst_attn_func(x, x, x, mask=batch, **more)


def test_a_call_with_it_takes_its_own_group_only():
    def work(sp):
        batch, x = sp.sequence(MASK), torch.zeros(1, 12, 2, 8)
        other = sp.process_group.subring([sp.rank])
        with pytest.raises(ValueError, match="expected no group with mask=sequence"):
            burst_attn_func(x, x, x, mask=batch, process_group=other)
        groups = {"process_group": sp.process_group, "double_group": sp.double_group}
        return burst_attn_func(x, x, x, mask=batch, **groups).shape

    assert on_ranks(2, work) == [(1, 12, 2, 8)] * 2


CALLS = {
    "separate": (burst_attn_func, lambda x: [x, x, x]),
    "packed": (burst_attn_qkvpacked_func, lambda x: [torch.stack([x, x, x], 2)]),
    "lightning": (lightning_attn_func, lambda x: [x, x, x, alibi_slopes(2)]),
}
SOFTMAX = {"backward": "fast"}, {"layout": "striped"}, {"flash": 3}, {"dropout_p": 0.1}
WRONG = [*itertools.product(("separate", "packed"), SOFTMAX)]
WRONG += [("lightning", wrong) for wrong in ({"layout": "contiguous"}, {"softcap": 3.0})]


@pytest.mark.parametrize(("kind", "wrong"), WRONG, ids=str)
def test_its_ranks_are_told_of_a_wrong_argument(kind, wrong):
    """A call names no group, and the default one may have other ranks."""
    function, arguments = CALLS[kind]

    def work(sp):
        batch, tensors = sp.sequence(MASK), arguments(torch.zeros(1, 12, 2, 8))
        expected = (TypeError, ValueError) if sp.rank else RanksDisagree
        with pytest.raises(expected, match=next(iter(wrong)) if sp.rank else "rank 1"):
            function(*tensors, mask=batch, **wrong if sp.rank else {})
        return function(*tensors, mask=batch).shape  # the group is usable

    assert on_ranks(2, work) == [(1, 12, 2, 8)] * 2


def test_layers_take_it_as_their_cache_on_their_ranks_only():
    def work(sp):
        layer, x = nn.BurstAttention(16, 2, sp=sp), torch.zeros(1, 24, 16)
        tables = nn.rope_tables(torch.arange(24), 8)
        alone = SequenceParallel().sequence(MASK)
        with refusal("ValueError: expected a WholeSequence of this model's 2 ranks, got"):
            layer(x, *tables, cache=alone)
        with refusal("ValueError: expected a WholeSequence or a mask and layout, got both"):
            layer(x, *tables, cache=sp.sequence(MASK), mask=MASK)

    on_ranks(2, work)


def test_wrong_queries_of_a_layer_with_sinks_are_refused_on_all_ranks():
    def work(sp):
        layer, x = nn.BurstAttention(16, 2, sp=sp, sinks=True), torch.zeros(1, 12, 2, 8)
        with pytest.raises((TypeError, RanksDisagree), match=r"q must be a torch\.Tensor, got N"):
            layer.attend(None if sp.rank else x, x, x, nn.find_part(sp, None, MASK))

    on_ranks(2, work)


def test_rows_with_layouts_of_their_own_are_cut_along_tokens():
    def work(sp):
        batch, x = sp.sequence(ROWS), torch.zeros(2, 24, 12)
        for use, tensor, dim in (
            (batch.shard, x, 2),
            (batch.shard, torch.zeros(3, 24), 1),
            (batch.unshard, torch.zeros(2, 12, 12), 2),
        ):
            with pytest.raises(ValueError, match="expected a tensor of 2 rows and dim=1, since"):
                use(tensor, dim)

    on_ranks(2, work)


def test_equal_masks_of_later_batches_find_their_plans():
    def work(sp):
        x = torch.zeros(1, 12, 2, 8)
        for _ in range(3):
            mask = Mask.documents((0, 5, 17, 24))
            burst_attn_func(x, x, x, mask=sp.sequence(mask))
        history = sp.rings.history
        return len(history.plans), len(history.requests)

    assert on_ranks(2, work) == [(1, 1)] * 2


def test_what_is_kept_of_calls_does_not_hold_their_ranks():
    sp = SequenceParallel()
    batch, x = sp.sequence(MASK), torch.zeros(1, 24, 2, 8)
    burst_attn_func(x, x, x, mask=batch)
    lightning_attn_func(x, x, x, alibi_slopes(2), mask=MASK)
    known = weakref.ref(batch)
    del batch
    gc.collect()
    assert known() is None


def test_a_call_with_gradient_is_another_one():
    """Its plan also reserves memory for a backward."""

    def work(sp):
        x = torch.zeros(1, 12, 2, 8)
        for requires_grad in (False, True, False):
            given = x.clone().requires_grad_(requires_grad)
            burst_attn_func(given, given, given, causal=True, process_group=sp.process_group)
        history = sp.rings.history
        return len(history.plans), len(history.requests)

    assert on_ranks(2, work) == [(2, 2)] * 2


def test_a_layout_of_other_ranks_is_refused_after_one_of_these():
    x = torch.zeros(1, 12, 2, 8)
    burst_attn_func(x, x, x, causal=True, layout=Layout.zigzag(12, 1))
    with pytest.raises(ValueError, match="expected a layout on 1 ranks, got one on 2"):
        burst_attn_func(x, x, x, causal=True, layout=Layout.zigzag(12, 2))


def test_long_masks_of_hosts_with_many_ranks_are_compared():
    """One message between hosts has the masks of all ranks of a host."""

    def work(ring):
        chance = random.Random(ring.rank)
        bounds = sorted(chance.sample(range(1, 16 * 10**6), 150))
        place, host = ring.rank % 8, ring.rank // 8
        groups = ring.subring(range(8 * host, 8 * host + 8)), ring.subring((place, place + 8))
        sp = SequenceParallel(ring.rank, 16, double_group=groups, process_group=None)
        with pytest.raises(ValueError, match="ranks differ in mask or causal of a sequence"):
            sp.sequence(Mask.documents((0, *bounds, 16 * 10**6)))

    simulate(16, work)
