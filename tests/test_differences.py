"""The first difference between the masks or layouts of two ranks, in words."""

import functools
import json
import random
import re

import pytest

from bmt_burst import Layout, Mask, Slice
from bmt_burst.sequence.differences import layout_difference, mask_difference
from bmt_burst.sequence.layout import Stacked
from examples.mask_kinds import EXAMPLES
from tests.cases import random_mask


def as_sent(x):
    return json.loads(json.dumps(x))


def difference(one, other, **options):
    return mask_difference(as_sent(one.slices), as_sent(other.slices), **options)


FIRST = "the first query that differs is"


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (Mask.causal(300), Mask.full(300), "0: it sees keys 0 on rank 0 and keys 0-299 on rank 1"),
        (
            Mask.documents((0, 200, 300)),
            Mask.documents((0, 250, 300)),
            "200: it sees keys 200 on rank 0 and keys 0-200 on rank 1",
        ),
        (
            Mask.causal(1 << 40),
            Mask.window(1 << 40, 1 << 20),
            "1048576: it sees keys 0-1048576 on rank 0 and keys 1-1048576 on rank 1",
        ),
        (Mask.causal(8), Mask.causal(10), "8: it sees no key on rank 0 and keys 0-8 on rank 1"),
        (
            Mask(300, [Slice((0, 300), (0, 201)), Slice((201, 300), (201, 300), 0)]),
            Mask(300, [Slice((0, 300), (0, 251)), Slice((251, 300), (251, 300), 0)]),
            "0: it sees keys 0-200 on rank 0 and keys 0-250 on rank 1",
        ),
        (
            Mask(3, [Slice((0, 1), (0, 1)), Slice((2, 3), (0, 1)), Slice((2, 3), (2, 3))]),
            Mask(3, [Slice((0, 1), (0, 1)), Slice((2, 3), (0, 3))]),
            "2: it sees keys 0, 2 on rank 0 and keys 0-2 on rank 1",
        ),
    ],
    ids=["full", "documents", "window", "lengths", "prefix", "tree"],
)
def test_the_first_query_that_differs(one, other, text):
    assert difference(one, other) == f"{FIRST} {text}"


def test_ranks_are_named_and_many_spans_are_cut():
    one = Mask(20, [Slice((0, 1), (2 * i, 2 * i + 1)) for i in range(10)])
    text = difference(one, Mask(20, ()), ranks=(2, 5))
    expected = "0: it sees keys 0, 2, 4, 6, ... 6 more spans on rank 2 and no key on rank 5"
    assert text == f"{FIRST} {expected}"


def test_equal_pairs_are_no_difference():
    """However they are cut into slices, and whatever the length."""
    whole = Mask.causal(9)
    cut = [Slice((0, 4), (0, 4), 0), Slice((4, 9), (0, 4), 0), Slice((4, 9), (4, 9), 0)]
    assert difference(whole, Mask(9, cut)) == difference(whole, Mask(12, whole.slices)) == ""


def random_masks(chance):
    """Return two masks of one length or two, perhaps of examples, such as trees."""
    makers = [functools.partial(random_mask, chance), *EXAMPLES.values()]
    return [chance.choice(makers)(chance.choice([21, 24])) for _ in range(2)]


@pytest.mark.parametrize("seed", range(60))
def test_it_is_what_dense_masks_say(seed):
    one, other = random_masks(random.Random(seed))
    rows = [
        [mask.dense()[i].nonzero().flatten().tolist() if i < mask.seq_len else []
         for i in range(max(one.seq_len, other.seq_len))]
        for mask in (one, other)
    ]  # fmt: skip
    differ = [i for i, (a, b) in enumerate(zip(*rows, strict=True)) if a != b]
    text = difference(one, other)
    if not differ:
        assert text == ""
        return
    assert text.startswith(f"{FIRST} {differ[0]}: ")
    if "more" not in text:
        sees = re.search("sees (.*) on rank 0 and (.*) on rank 1", text).groups()
        for line, its_rows in zip(sees, rows, strict=True):
            spans = [x.split("-") for x in re.findall(r"\d+(?:-\d+)?", line)]
            keys = [key for span in spans for key in range(int(span[0]), int(span[-1]) + 1)]
            assert keys == its_rows[differ[0]]


def test_long_masks_take_little_time():
    """Many documents whose slices are cut in two ways, and differ in the last query only."""
    documents = [(start, start + 8) for start in range(0, 1 << 16, 8)]
    one = [Slice(span, span, 0) for span in documents]
    other = [
        Slice(rows, (start, rows[1]), 0)
        for start, stop in documents
        for rows in ((start, start + 3), (start + 3, stop))
    ]
    other[-1] = other[-1]._replace(kv=(other[-1].kv[0], (1 << 16) - 1))
    expected = "65535: it sees keys 65528-65535 on rank 0 and keys 65528-65534 on rank 1"
    assert mask_difference(one, other) == f"{FIRST} {expected}"


def runs(layout):
    return as_sent([[(r.start, r.stop, r.step) for r in shard] for shard in layout.shards])


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (Layout.zigzag(16, 2), Layout.zigzag(16, 2), ""),
        (
            Layout.contiguous(16, 2),
            Layout.zigzag(16, 2),
            "rank 0 puts tokens 0-7 on rank 0, rank 1 puts tokens 0-3 there",
        ),
        (
            Layout.zigzag(16, 2),
            Layout.striped(16, 2),
            "rank 0 puts tokens 0-3 on rank 0, rank 1 puts tokens 0-14 by 2 there",
        ),
        (
            Stacked([Layout.contiguous(4, 2), Layout.contiguous(4, 2)]),
            Stacked([Layout.contiguous(4, 2), Layout.zigzag(4, 2)]),
            "rank 0 puts tokens 4-5 on rank 0, rank 1 puts tokens 4 there",
        ),
        (
            Layout.contiguous(2, 2),
            Layout.zigzag(4, 2),
            "rank 0 puts no more tokens on rank 0, rank 1 puts tokens 3 there",
        ),
    ],
)
def test_the_first_run_that_differs(one, other, text):
    assert layout_difference(runs(one), runs(other)) == text
    assert layout_difference(runs(one), runs(other), (3, 4)) == re.sub(
        "^rank 0|rank 1", lambda m: "rank 3" if m[0] == "rank 0" else "rank 4", text
    )
