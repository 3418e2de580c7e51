"""Tilings by brute force: each visible pair is in one tile and one kernel call, no other is."""

import itertools
import random

import pytest
import torch

from bmt_burst import Layout, Mask, Slice
from bmt_burst.kernels.reference import visible
from bmt_burst.sequence.gathered_calls import kernel_calls
from bmt_burst.sequence.layout import LAYOUTS
from bmt_burst.sequence.span import in_turn
from bmt_burst.sequence.tiling import Tiling
from tests.cases import random_mask


def in_a_row(runs):
    """Where runs lie one after the other."""
    return [at for _, at in in_turn(span for *_, span in runs)]


@pytest.mark.parametrize(
    ("gap", "most", "spans"),
    [
        (700, 0.75, ((0, 1700),)),
        (700, 0.0, ((0, 500), (1200, 1700))),
        (800, 0.75, ((0, 500), (1300, 1800))),
    ],
)
def test_only_calls_that_may_include_long_gaps(gap, most, spans):
    """Of 1000 tokens in two tiles, up to 750 in the gap."""
    first, second = (0, 500), (500 + gap, 1000 + gap)
    [found] = kernel_calls([(x, x, 0, None) for x in (first, second)], None, most)
    assert (found.q_spans, found.kv_spans) == (spans, spans)
    places = (first, second) if len(spans) == 1 else (first, (500, 1000))
    assert found.call.tiles == tuple((x, x) for x in places)


def calls_of(mask, layout, rank):
    """Kernel calls of the own block, and of all others where they lie one after the other."""
    cut = Tiling(mask, layout)
    runs = cut.seen(rank)
    return kernel_calls(cut.own_tiles(rank)), kernel_calls(cut.tiles(rank, runs, in_a_row(runs)))


def test_few_kernel_calls():
    """Causal zigzag: what is earlier for all queries, and what the late half sees."""
    own, others = calls_of(Mask.causal(1 << 18), Layout.zigzag(1 << 18, 8), 3)
    assert [cut.call.is_causal and cut.call.is_whole for cut in own] == [True]
    assert len(others) == 2
    documents = Mask.documents(range(0, (1 << 14) + 1, 64))
    own, others = calls_of(documents, Layout.contiguous(1 << 14, 8), 3)
    assert [len(cut.call.tiles) for cut in own] == [32]
    assert others == []
    own, others = calls_of(documents.windowed(16), Layout.contiguous(1 << 14, 8), 3)
    assert [(cut.call.left, cut.call.right) for cut in own] == [(15, 0)]
    own, others = calls_of(Mask.window(1 << 14, 256), Layout.contiguous(1 << 14, 8), 3)
    assert [cut.call.q_tokens for cut in own] == [2048]
    assert [(cut.call.q_tokens, cut.call.kv_tokens) for cut in others] == [(255, 255)]


def test_a_mask_that_hides_all_has_no_tiles():
    cut = Tiling(Mask(12, ()), Layout.zigzag(12, 3))
    for rank in range(3):
        assert cut.own_tiles(rank) == cut.seen(rank) == kernel_calls([]) == []
    one = Tiling(Mask(12, (Slice((3, 4), (7, 8)),)), Layout.contiguous(12, 3))
    assert [one.seen(rank) != [] for rank in range(3)] == [True, False, False]


def count_pairs(calls, queries, keys, shape):
    """Count how often kernel calls compute each pair of some queries and keys, by position."""
    counts = torch.zeros(shape, dtype=torch.int)
    for rows, columns, call, _ in calls:
        i, j = (
            torch.cat([positions[slice(*span)] for span in spans])
            for positions, spans in ((queries, rows), (keys, columns))
        )
        counts[i.unsqueeze(1), j] += visible(call).int()
    return counts


def test_the_pairs_of_each_ranks_queries_and_of_its_keys():
    for seed in range(30):
        mask = random_mask(random.Random(seed), 60) if seed else Mask.causal(60)
        layout = Layout.balanced(mask, 4) if seed % 2 else Layout.zigzag(60, 4)
        tiling, visible = Tiling(mask, layout if seed else Layout.striped(60, 4)), mask.dense()
        for side, seen in ((tiling, visible.sum(1)), (tiling.transposed, visible.sum(0))):
            assert side.pairs == [seen[tiling.layout.positions(r)].sum() for r in range(4)]


def test_layouts_of_other_steps():
    """A band is a staircase. Calls of striped queries grow with the logarithm of their number."""
    names = [*LAYOUTS, "two steps"]
    for name, kv_name, seed in itertools.product(names, names, range(6)):
        chance = random.Random(seed)
        mask = Mask.causal(90, kv_len=120) if seed == 0 else random_mask(chance, 120).rows(20, 110)
        layouts = [
            TwoSteps(n, 3) if x == "two steps" else Layout.named(x, n, 3)
            for x, n in ((name, 90), (kv_name, 120))
        ]
        tiling, total = Tiling(mask, *layouts), 0
        for rank, owner in itertools.product(range(3), range(3)):
            runs = tiling.kv_layout.runs(owner)
            tiles = tiling.tiles(rank, runs, [run.span for run in runs])
            calls = kernel_calls(tiling.own_tiles(rank) if owner == rank else tiles)
            positions = layouts[0].positions(rank), layouts[1].positions(owner)
            total = total + count_pairs(calls, *positions, mask.dense().shape)
            if seed == 0 and name == "striped" and kv_name in ("contiguous", "zigzag"):
                assert len(calls) <= 7
        assert total.equal(mask.dense().int()), (name, kv_name, mask)


class TwoSteps(Layout):
    name = "two steps"

    def ranges(self, rank):
        middle = self.seq_len // 2
        return [
            range(rank, middle, self.size),
            *(range(p, p + 1) for p in range(middle + rank, self.seq_len, self.size)),
        ]


def test_keys_of_earlier_chunks_are_one_run_of_each_rank():
    """All queries see them, so their order is free. Only the last chunk's order counts."""
    keys = Layout.chunks(64 * 32, 4, 32)
    start, stop = keys.spans[-1]
    mask = Mask.documents((0, 1000, 64 * 32)).rows(start, stop)
    tiling = Tiling(mask, Layout.zigzag(stop - start, 4), keys)
    for rank in range(4):
        # before the document, in it, and two runs of the last chunk. Rank 0 has the first token of
        # the last chunk, which all queries see.
        assert len(tiling.kv_layout.runs(rank)) <= 5
        assert len(keys.runs(rank)) == 128
        assert tiling.kv_layout.length(rank) == keys.length(rank)
