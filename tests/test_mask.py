"""Masks as data, against brute force; and what calls of attention refuse of them, on every rank."""

import itertools
import random
import re
import time

import numpy as np
import pytest
import torch

from bmt_burst import (
    InfLLMV2,
    Layout,
    Mask,
    Scores,
    SequenceParallel,
    Slice,
    burst_attn_func,
    burst_attn_varlen_func,
    nn,
    shift_labels,
    simulate,
)
from bmt_burst.sequence.tile import KernelCall
from bmt_burst.sparse import choose
from tests.cases import call_tensors, random_mask, random_qkv
from tests.refusals import refusal, refusal_of_rank


def pairs(tokens: int, sees) -> torch.Tensor:
    """(tokens, tokens) bool of a function of query and key."""
    return torch.tensor([[bool(sees(i, j)) for j in range(tokens)] for i in range(tokens)])


def test_the_keys_that_queries_see():
    for seed in range(200):
        mask = random_mask(chance := random.Random(seed), chance.randint(1, 30))
        start = chance.randrange(mask.seq_len)
        rows = mask.rows(start, chance.randint(start + 1, mask.seq_len))
        for one in (rows, *(Mask(rows.seq_len, (s,), rows.kv_len) for s in rows.slices)):
            seen = one.dense().any(0).nonzero().flatten().tolist()
            assert one.seen == ((seen[0], seen[-1] + 1) if seen else (0, 0))


def test_masks_that_have_names():
    assert Mask.causal(7).dense().equal(pairs(7, lambda i, j: j <= i))
    assert Mask.full(7).dense().all()
    assert Mask.causal(1).dense().all()
    document = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2])
    cuts = (0, 3, 4, 9)
    for causal, window in itertools.product((True, False), (None, 1, 2, 4, 99)):
        expected = pairs(
            9,
            lambda i, j, causal=causal, window=window: (
                document[i] == document[j]
                and (j <= i or not causal)
                and (window is None or abs(i - j) < window)
            ),
        )
        assert Mask.documents(cuts, causal, window).dense().equal(expected), (causal, window)
    assert Mask.documents((0, 5)) == Mask.causal(5)
    assert Mask.documents((0, 5), causal=False) == Mask.full(5)
    assert Mask.window(9, 3) == Mask.documents((0, 9), window=3)  # itself and two before it


def test_queries_are_the_last_tokens_of_the_keys():
    """As in flash-attn, in the whole sequence and in each document."""
    for n, m in ((3, 7), (7, 3), (1, 5), (4, 4)):
        expected = torch.ones(n, m).tril(m - n).bool()
        assert Mask.causal(n, kv_len=m).dense().equal(expected)
        assert Mask.full(n, kv_len=m).dense().equal(torch.ones(n, m).bool())
    assert Mask.causal(9).rows(5, 9) == Mask.causal(4, kv_len=9)
    assert Mask.causal(4, kv_len=4) == Mask.causal(4)
    cuts, kv_cuts = (0, 3, 3, 4, 9), (0, 5, 6, 6, 8)  # the third document has no keys
    for causal, window in itertools.product((True, False), (None, 1, 2, 4, 99)):
        mask = Mask.documents(cuts, causal, window, kv_cu_seqlens=kv_cuts)
        expected = torch.zeros(9, 8, dtype=torch.bool)
        for q, kv in zip(itertools.pairwise(cuts), itertools.pairwise(kv_cuts), strict=True):
            for i, j in itertools.product(range(*q), range(*kv)):
                ahead = (i - q[1]) - (j - kv[1])
                near = window is None or abs(ahead) < window
                expected[i, j] = (ahead >= 0 or not causal) and near
        assert mask.dense().equal(expected), (causal, window)


def test_cu_seqlens_may_be_any_sequence_of_whole_numbers():
    expected = Mask.documents((0, 3, 8))
    for given in (
        [0, 3, 8],
        np.array([0, 3, 8]),
        [np.int32(0), np.int64(3), 8],
        range(0, 9, 1)[::1],
        torch.tensor([0, 3, 8], dtype=torch.int32),
        torch.tensor([0, 3, 8]),
    ):
        mask = Mask.documents(given)
        assert mask == (expected if len(given) == 3 else Mask.documents(list(range(9))))
        assert all(type(x) is int for s in mask.slices for x in (*s.q, *s.kv))


@pytest.mark.parametrize("given", [(0, 0, 3, 8), (0, 3, 3, 3, 8), (0, 3, 8, 8), (0, 0, 3, 3, 8, 8)])
def test_documents_may_be_empty(given):
    expected = Mask.documents((0, 3, 8), window=2)
    for cu_seqlens in (given, torch.tensor(given, dtype=torch.int32)):
        mask = Mask.documents(cu_seqlens, window=2)
        assert (mask, mask.digest) == (expected, expected.digest)


def test_positions_start_anew_in_each_document():
    """Also in gaps. The conformance suite has the positions of every kind of mask."""
    assert Mask.documents((0, 3, 4, 9)).positions().tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    gaps = Mask(9, (Slice((2, 4), (2, 4), 0), Slice((4, 7), (4, 7), 0)))
    assert gaps.positions().tolist() == [0, 1, 0, 1, 0, 1, 2, 0, 1]


def test_trees_of_drafts_have_neither_positions_nor_next_tokens():
    """Tokens 2 to 4 are one draft after tokens 0 and 1, and tokens 5 and 6 another one."""
    first, second = Slice((0, 5), (0, 5), 0), (Slice((5, 7), (0, 2)), Slice((5, 7), (5, 7), 0))
    tree = Mask(9, (first, *second))
    for work, message in (
        (tree.positions, "token 5 does not see token 4, as in a tree of drafts: make the mask by"),
        (
            lambda: shift_labels(torch.arange(9), mask=tree),
            "token 5 does not see token 4, as in a tree of drafts: make the labels from",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            work()
    for seed in range(200):
        mask = random_mask(chance := random.Random(seed), chance.randint(1, 30))
        dense, wide = mask.dense(), [s for s in mask.slices if (s.low, s.high) != (0, 1)]
        breaks = [
            i
            for start, stop in Mask(mask.seq_len, tuple(wide)).parts
            if any(start <= s.q[0] < stop for s in wide)
            for i in range(start + 1, stop)
            if not dense[i, i - 1]
        ]
        assert mask.first_break == min(breaks, default=None)


def test_equal_masks_are_equal_and_unlike_ones_are_not():
    slices = (Slice((0, 4), (0, 4), 0), Slice((4, 9), (4, 9), 0))
    mask = Mask(9, slices[::-1])
    assert mask == Mask(9, slices) == Mask.documents((0, 4, 9))
    assert hash(mask) == hash(Mask.documents((0, 4, 9)))
    others = [
        Mask.documents((0, 4, 10)),
        Mask.documents((0, 4, 9), causal=False),
        Mask.documents((0, 4, 9), window=2),
        Mask(9, (*slices, Slice((4, 5), (0, 1)))),
        Mask(9, (Slice((0, 4), (0, 4)), slices[1])),
        Mask(9, slices, kv_len=10),
        Mask(10, slices, kv_len=9),
        Mask(9, ()),
    ]
    assert len({mask, *others}) == len({m.digest for m in (mask, *others)}) == 1 + len(others)
    assert mask != "causal"
    # what hides all is nothing
    assert Mask(9, (*slices, Slice((5, 5), (0, 1)), Slice((0, 1), (5, 6), 0))) == mask


def test_a_digest_is_the_same_in_every_process():
    assert Mask.documents((0, 3, 8), window=2).digest == "587bf77bbbd73f59596715627c344ad9"


def test_a_mask_prints_a_drawing():
    lines = str(Mask.documents((0, 2, 4))).splitlines()
    assert lines[0] == "4 tokens, 2 documents, 6 visible pairs (37.5%)"
    assert lines[1:] == ["#", "# #", "    #", "    # #"]
    assert str(Mask.causal(2, kv_len=4)).splitlines() == [
        "2 queries, 4 keys, 7 visible pairs (87.5%)",
        "# # #",
        "# # # #",
    ]
    assert repr(Mask.full(2, kv_len=4)) == "Mask(2, (Slice((0, 2), (0, 4), None, None)), kv_len=4)"
    long = str(Mask.causal(1 << 20)).splitlines()
    assert long[0].startswith("1,048,576 tokens, 1 document, ")
    assert len(long) == 33
    assert long[-1].count("#") == 31
    assert (
        repr(Mask.documents((0, 2, 4)))
        == "Mask(4, (Slice((0, 2), (0, 2), 0, None), Slice((2, 4), (2, 4), 0, None)))"
    )
    assert repr(Mask.documents(range(9))).endswith(", ...))")


SQUARE = Slice((0, 4), (0, 4))
QKV = random_qkv(1, 4, 1, 1, 8)


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ((Slice((0, 8), (6, 8), 0), SQUARE, Slice((7, 8), (0, 8))), r"overlap: .*Slice\(\(7, 8\)"),
        ((Slice((0, 9), (0, 4)),), r"q=\(0, 9\) of a slice is out of range: the mask has 8 tokens"),
        ((Slice((0, 4), (-1, 4)),), r"kv=\(-1, 4\) of a slice is out of range"),
        ((Slice((4, 3), (0, 4)),), r"q=\(4, 3\) of a slice is out of range"),
    ],
)
def test_slices_that_cannot_be_are_refused(slices, message):
    with pytest.raises(ValueError, match=message):
        Mask(8, slices)


def test_overlaps_are_found_whenever_there_are_some():
    for seed in range(300):
        chance = random.Random(seed)
        slices = []
        for _ in range(chance.randint(2, 4)):
            spans = [tuple(sorted(chance.sample(range(10), 2))) for _ in range(2)]
            low, high = (chance.choice((None, chance.randint(-9, 9))) for _ in range(2))
            slices.append(Slice(*spans, low, high))
        seen = sum(Mask(9, (s,)).dense().int() for s in slices)
        if seen.max() > 1:
            with pytest.raises(ValueError, match="slices overlap"):
                Mask(9, tuple(slices))
        else:
            assert Mask(9, tuple(slices)).area == seen.sum()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Mask(8, (((0, 4), (0, 4)),)), "TypeError: slices must be Slices, got tuple"),
        (lambda: Mask(8, (Slice(4, (0, 4)),)), r"TypeError: q of a slice must be \(start, .*got 4"),
        (lambda: Mask(8, (Slice((0, 4.0), (0, 4)),)), r"TypeError: q of a slice must .* got 4\.0"),
        (lambda: Mask(8, (Slice((0, 4), (0, 4), 0.5),)), r"TypeError: low must be .* got 0\.5"),
        (lambda: Mask(8.0, ()), r"TypeError: seq_len must be a whole number, got 8\.0"),
        (lambda: Mask(0, ()), "ValueError: seq_len must be at least 1, got 0"),
        (lambda: Mask.full(True), "TypeError: seq_len must be a whole number, got True"),
        (lambda: Mask.window(8, 0), "ValueError: window must be at least 1, got 0"),
        (lambda: Mask.causal(8).windowed(2.0), r"TypeError: window must be a whole .* got 2\.0"),
        (lambda: Mask.window(8, 1 << 63), r"ValueError: window must be below 2\^63, got .*64 bits"),
        (lambda: Mask(8, (SQUARE._replace(low=-1 << 63),)), r"ValueError: low must be below 2\^63"),
        (lambda: Mask.stacked([]), "ValueError: expected at least one mask to stack"),
        (lambda: Mask.stacked(["causal"]), "TypeError: expected Masks to stack, got str"),
        (lambda: Mask.full(8, kv_len=0), "ValueError: kv_len must be at least 1, got 0"),
        (lambda: Mask(8, (), kv_len=9.0), r"TypeError: kv_len must be a whole number, got 9\.0"),
        (
            lambda: Mask(8, (Slice((0, 4), (0, 10)),), kv_len=9),
            r"ValueError: kv=\(0, 10\) of a slice is out of range: the mask has 9 keys",
        ),
        (
            lambda: Mask.documents((0, 8), kv_cu_seqlens=(0, 4, 9)),
            "ValueError: expected kv_cu_seqlens of as many documents as cu_seqlens, 1, got 2",
        ),
        (
            lambda: Mask.documents((0, 8), kv_cu_seqlens=(0, 9, 4)),
            "ValueError: kv_cu_seqlens must not decrease, got 4 after 9",
        ),
        (
            lambda: Mask.causal(8).rows(4, 4),
            "ValueError: expected rows 0 <= start < stop <= 8, got",
        ),
        (lambda: Mask.causal(8).rows(0, 9), "ValueError: expected rows .* start=0 and stop=9"),
        (lambda: Mask.causal(8).rows(0.0, 4), r"TypeError: start must be a whole .* got 0\.0"),
        *(
            (make, f"ValueError: {name}: expected a mask of queries and keys of one sequence")
            for name, make in (
                (r"windowed\(\)", lambda: Mask.causal(3, 8).windowed(2)),
                ("positions in documents", lambda: Mask.causal(3, 8).positions()),
                (
                    "positions in documents",
                    lambda: shift_labels(torch.zeros(1, 3).long(), mask=Mask.causal(3, 8)),
                ),
                (
                    "scores of a bias",
                    lambda: Scores.by_distance(Mask.causal(3, 8), torch.zeros(1).int()),
                ),
                ("sparse attention", lambda: choose(QKV[0], QKV[1], Mask.full(4, 8), InfLLMV2())),
            )
        ),
    ],
)
def test_what_makes_no_mask_is_refused(make, error):
    with refusal(error):
        make()


CU_SEQLENS = [
    ((1, 8), r"ValueError: cu_seqlens must be \(0, .* with at least one token, got \(1, 8\)"),
    ((), r"ValueError: cu_seqlens must be \(0, .* with at least one token, got \(\)"),
    ((0, 0, 0), r"ValueError: cu_seqlens must be \(0, .* at least one token, got \(0, 0, 0\)"),
    ((0, 5, 3, 8), "ValueError: cu_seqlens must not decrease, got 3 after 5"),
    ((0, 2.0), r"TypeError: cu_seqlens must be a whole number, got 2\.0"),
    ("0123", "TypeError: cu_seqlens must be a sequence of whole numbers, got str"),
    (None, "TypeError: cu_seqlens must be a sequence of whole numbers, got NoneType"),
    (torch.tensor([0.0, 8.0]), "TypeError: integers of one dimension, got .* torch.float32"),
    (torch.tensor([[0, 8]]), r"TypeError: tensor of integers of one dimension, got shape \(1, 2\)"),
    (torch.zeros(2, dtype=torch.int32, device="meta"), "ValueError: on the CPU, got meta"),
    ((0, 1 << 70), r"ValueError: cu_seqlens must be below 2\^63, got a number of 71 bits"),
]


def test_long_masks_cost_little():
    """10,000 documents take a tenth of what comparing each with each would take."""
    began = time.process_time()
    mask = Mask.documents(range(0, 100_001, 10))
    assert mask.area == 10_000 * 55
    assert len(mask.parts) == 10_000
    assert Mask(mask.seq_len, mask.slices) == mask
    assert time.process_time() - began < 5


def test_the_largest_numbers_have_a_digest():
    most = (1 << 63) - 1
    masks = (
        Mask.window(8, most),
        Mask.causal(most),
        Mask(8, (SQUARE._replace(low=1 - most, high=most),)),
    )
    assert all(mask.transposed.transposed.digest == mask.digest for mask in masks)
    assert masks[0].dense().equal(Mask.causal(8).dense())


def test_many_slices_of_the_same_queries_cost_little():
    """Of what shares queries only bands are compared, of those whose keys meet."""
    slices = tuple(Slice((0, 1500), (i, i + 1)) for i in range(1500))
    began = time.process_time()
    assert Mask(1500, slices).area == 1500**2
    assert time.process_time() - began < 1.7  # 0.2 s; 3.5 s if bands were compared each with each


SCORES = Scores.by_distance(Mask.causal(12), torch.zeros(1, dtype=torch.int32))
UNEVEN = Scores.by_distance(Mask.documents((0, 5, 12)), torch.zeros(1, dtype=torch.int32))
BIAS = {"scores": SCORES, "bias": torch.zeros(1, 2).double()}
# What calls refuse of masks and layouts: the change that rank 2 of 3 makes, or all do; each holds 4
# of 12 tokens.
WRONG_ON_ALL = [
    ({"mask": Mask.causal(13)}, r"ValueError: the mask has 13 tokens, the ranks hold 12: \[4, 4"),
    ({"mask": Mask.causal(12), "causal": True}, "ValueError: expected mask or causal, got both"),
    ({"mask": torch.ones(12, 12).bool()}, "TypeError: mask must be a Mask .*, got Tensor"),
    ({"mask": [Mask.causal(12), None]}, "TypeError: mask must be .* for each row, got NoneType"),
    ({"mask": [Mask.causal(12)] * 3}, "ValueError: mask has 3 entries for a batch of 2 rows"),
    ({"mask": [Mask.causal(12), Mask.full(13)]}, "ValueError: the same number of tokens|13"),
    ({"layout": ["zigzag"] * 3}, "ValueError: layout has 3 entries for a batch of 2 rows"),
    ({"layout": ["zigzag", None]}, "TypeError: layout must be .* for each row, got NoneType"),
    ({"layout": 3}, "TypeError: layout must be .*, got int: pass its name, such as 'zigzag'"),
    ({"layout": ["zigzag", "striped"]}, "ValueError: a rank does not know the length of a seq"),
    ({"layout": ["zigzag", "spiral"], "mask": Mask.causal(12)}, "ValueError: unknown layout 'spi"),
    ({"layout": Layout.zigzag(12, 4)}, "ValueError: expected a layout on 3 ranks, got one on 4"),
    (
        {"layout": Layout.zigzag(13, 3), "mask": Mask.causal(12)},
        r"ValueError: the ranks hold \[4, 4, 4\] tokens, but zigzag cuts 13 into",
    ),
    (
        {"layout": [Layout.zigzag(12, 3), Layout.zigzag(13, 3)], "mask": Mask.causal(12)},
        "ValueError: a row's mask has 12 tokens, its layout 13",
    ),
    (
        {"layout": [Layout.zigzag(12, 3), Layout.zigzag(13, 3)]},
        "ValueError: layouts of rows must give a rank the same number of tokens",
    ),
    ({"mask": Mask.causal(12, 13)}, r"ValueError: the mask has 13 keys, the ranks hold 12: \[4, 4"),
    ({"mask": Mask.causal(13, 12)}, r"ValueError: the mask has 13 queries, the ranks hold 12: \["),
    (
        {"keys": 5, "mask": Mask.full(12)},
        "ValueError: the mask has 12 keys, the ranks hold 15: .*, pass a mask with their kv_len",
    ),
    ({"keys": 0}, "ValueError: expected q, k and v with tokens, got none on any rank"),
    ({"keys": 5, "layout": Layout.zigzag(12, 3)}, "ValueError: expected a kv_layout for 15 keys"),
    ({"kv_layout": Layout.zigzag(12, 4)}, "ValueError: a kv_layout on 3 ranks, got one on 4"),
    (
        {"kv_layout": Layout.zigzag(13, 3)},
        r"ValueError: the ranks hold \[4, 4, 4\] keys, but zigzag cuts 13 into",
    ),
    ({"kv_layout": "spiral"}, "ValueError: unknown kv_layout 'spiral'"),
    ({"kv_layout": 3}, "TypeError: kv_layout must be a Layout or one .*, got int: pass its name"),
    ({"kv_layout": ["zigzag"] * 3}, "ValueError: kv_layout has 3 entries for a batch of 2 rows"),
    (
        {"kv_layout": [Layout.zigzag(12, 3), Layout.zigzag(13, 3)], "mask": Mask.causal(12)},
        "ValueError: a row's mask has 12 keys, its kv_layout 13",
    ),
    (
        {"layout": Layout.zigzag(12, 3), "kv_layout": ["zigzag", "striped"]},
        "ValueError: .* length of a sequence with kv_layout='zigzag': expected a mask",
    ),
    *(
        ({**options, "strategy": name}, f"ValueError: strategy '{name}': expected queries and keys")
        for name in ("ulysses", "usp")
        for options in ({"keys": 5}, {"kv_layout": "striped"})
    ),
    ({"keys": 5, **BIAS}, "ValueError: a bias takes queries and keys of one sequence, got 4 quer"),
    *(
        (
            {**BIAS, **options},
            "ValueError: a bias takes queries and keys of one layout, got .*: omit kv_layout",
        )
        for options in (
            {"kv_layout": "striped"},
            {"kv_layout": ["zigzag", "striped"]},
            # the balanced layout of keys is another one
            {"layout": "balanced", "kv_layout": "balanced", "scores": UNEVEN},
        )
    ),
    *(
        (
            {"keys": 5, "mask": mask, "sparse": InfLLMV2()},
            "ValueError: sparse attention needs causal documents",
        )
        for mask in (Mask.full(12, 15), Mask.documents((0, 12), window=3, kv_cu_seqlens=(0, 15)))
    ),
]


DOCUMENTS = {cut: Mask.documents((0, cut, 12)) for cut in (5, 6)}
BALANCED = {cut: Layout.balanced(mask, 3) for cut, mask in DOCUMENTS.items()}


def attend(ring, **options):
    call = KernelCall.whole(4, options.pop("keys", 4))
    q, k, v = call_tensors(call, 2, 2, 2, 8)[:3]
    return burst_attn_func(q, k, v, process_group=ring, **options)


@pytest.mark.parametrize(("options", "error"), WRONG_ON_ALL)
def test_wrong_masks_of_all_ranks_or_one_are_an_error_on_every_rank(options, error):
    message = error.partition(": ")[2]

    def work(ring):
        with refusal(error):
            attend(ring, **options)
        assert not ring.traffic, "nothing is sent"
        assert attend(ring, mask=Mask.causal(12)).shape == (2, 4, 2, 8)  # all goes on
        with pytest.raises((ValueError, TypeError)) as caught:
            attend(ring, **(options if ring.rank == 2 else {"mask": Mask.causal(12)}))
        attend(ring)
        return str(caught.value)

    errors = simulate(3, work)
    theirs = re.compile(
        f"rank 2 of the group failed before a call of .*({message})|ranks differ in "
    )
    assert all(theirs.search(text) for text in errors[:2])
    assert re.search(f"{message}|ranks differ in ", errors[2])


@pytest.mark.parametrize(
    ("mine", "theirs", "term"),
    [
        ({"mask": DOCUMENTS[5]}, {"mask": DOCUMENTS[6]}, "mask or causal"),
        ({"mask": DOCUMENTS[5]}, {"mask": [*DOCUMENTS.values()]}, "masks or layouts by row"),
        ({"layout": BALANCED[5]}, {"layout": BALANCED[6]}, "layout"),
        ({"layout": [*BALANCED.values()]}, {"layout": BALANCED[5]}, "masks or layouts by row"),
        ({"kv_layout": "striped"}, {"kv_layout": "contiguous"}, "kv_layout"),
        ({"kv_layout": "striped"}, {}, "kv_layout"),
    ],
)
def test_ranks_with_unlike_masks_all_raise(mine, theirs, term):
    def work(ring):
        with refusal(rf"ValueError: ranks differ in ({term}): rank 0 has .*, rank 2 has"):
            attend(ring, **(theirs if ring.rank == 2 else mine))
        return attend(ring, **mine).shape

    assert simulate(3, work) == [(2, 4, 2, 8)] * 3


def test_equal_masks_may_be_given_differently():
    """A mask of its own for each row that is the same for all; numbers of numpy."""

    def work(ring):
        mask = (
            Mask.causal(np.int64(12))
            if ring.rank
            else [Mask(12, (Slice((0, 12), (0, 12), 0),))] * 2
        )
        return attend(ring, mask=mask, layout=["zigzag"] * 2), attend(ring, causal=True)

    for got, expected in simulate(3, work):
        assert got.equal(expected)


@pytest.mark.parametrize("wrong", [{"mask": "causal"}, {"mask": 3}, {"mask": ["causal"] * 2}])
def test_a_wrong_mask_of_a_layer_with_a_window_is_an_error_on_every_rank(wrong):
    """The ranks stay in step."""

    def work(ring):
        layer = nn.BurstAttention(
            16, 2, window=3, sp=SequenceParallel(ring.rank, 2, process_group=ring)
        )
        x, tables = torch.zeros(2, 6, 16), nn.rope_tables(torch.arange(6), 8)
        with pytest.raises((ValueError, TypeError, AttributeError)) as caught:
            layer(x, *tables, **(wrong if ring.rank else {"mask": Mask.causal(12)}))
        return str(caught.value), layer(x, *tables, mask=Mask.causal(12)).shape

    (theirs, _), (mine, _) = simulate(2, work)
    assert re.search("a Mask|expected a mask", mine)
    assert theirs.startswith("rank 1 of the group failed before the attention of a layer")
    assert mine[:30] in theirs


def test_wrong_cu_seqlens_of_one_rank_are_an_error_on_every_rank():
    def work(ring):
        q, k, v = (x[0] for x in random_qkv(1, 4, 2, 2, 8)[:3])
        for wrong, error in CU_SEQLENS:
            with refusal_of_rank(2, ring.rank, error):
                given = wrong if ring.rank == 2 else (0, 12)
                burst_attn_varlen_func(q, k, v, given, process_group=ring)
        for wrong in ((0, 11), (0, 5, 13)):
            with refusal(rf"ValueError: cu_seqlens has {wrong[-1]} tokens, the ranks hold 12"):
                burst_attn_varlen_func(q, k, v, wrong, process_group=ring)
        with pytest.raises(ValueError, match="ranks differ in cu_seqlens, causal or window: rank"):
            burst_attn_varlen_func(q, k, v, (0, 5 + ring.rank, 12), process_group=ring)
        with pytest.raises(ValueError, match="expected q, k and v with tokens, got none on any"):
            burst_attn_func(*(x[None, :0] for x in (q, k, v)), causal=True, process_group=ring)
        return True

    assert simulate(3, work) == [True] * 3
