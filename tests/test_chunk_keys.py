"""The keys that chunks see and keep, against brute force."""

from __future__ import annotations

import random

import pytest
import torch

from bmt_burst import Layout, Mask
from bmt_burst.memories.chunk_keys import ChunkKeys, find_keys
from bmt_burst.sequence.layout import LAYOUTS
from bmt_burst.sequence.span import overlap
from tests.cases import random_mask


def count_kept(keys: ChunkKeys) -> int:
    return keys.kept.stop - keys.kept.start


def hide_later_chunks(mask: Mask, chunks: Layout) -> Mask:
    """Return the pairs of a mask whose key is in the chunk of the query or before it."""
    return Mask(
        mask.seq_len,
        tuple(
            s._replace(q=overlap(s.q, (start, stop)), kv=overlap(s.kv, (0, stop)))
            for s in mask.slices
            for start, stop in chunks.spans
        ),
    )


@pytest.mark.parametrize("seed", range(60))
def test_seen_keys_are_in_memory_and_no_key_is_kept_for_nobody(seed):
    chance = random.Random(seed)
    size, tokens = chance.choice((1, 2, 3, 5)), chance.randint(40, 70)
    most, window = chance.randint(2 * size + 2, 30), chance.choice((None, chance.randint(1, 40)))
    chunks = Layout.chunks(tokens, size, most, chance.choice([*LAYOUTS]))
    masks = tuple(
        hide_later_chunks(random_mask(chance, tokens), chunks) for _ in range(chance.choice((1, 2)))
    )
    rows = masks if window is None else [mask.windowed(window) for mask in masks]
    visible = torch.stack([row.dense() for row in rows])
    firsts = [
        min([start, *visible[:, start:stop].any(0).any(0).nonzero().flatten().tolist()])
        for start, stop in chunks.spans
    ]
    for rank in range(size):
        keys = find_keys(masks, chunks, rank, window)
        memory = torch.full((max(each.own.stop for each in keys),), -1)
        filled = 0
        for number, each in enumerate(keys):
            (start, stop), mine = chunks.spans[number], chunks.positions(rank)
            memory[each.own] = mine[(mine >= start) & (mine < stop)]
            filled = max(filled, each.own.stop)
            assert memory[each.seen].equal(mine[(mine >= firsts[number]) & (mine < stop)])
            assert memory[each.seen].equal(each.layout.positions(rank) + firsts[number])
            for mask, row in zip(each.masks, visible, strict=True):
                assert mask.dense().equal(row[start:stop, firsts[number] : stop])
            later = min(firsts[number + 1 :], default=tokens)
            kept = memory[each.last].clone()
            assert kept.equal(mine[(mine >= max(start, later)) & (mine < stop)])
            memory[each.kept] = kept
        assert filled == len(memory), "memory for no more than there is"


def test_causal_chunks_see_and_keep_all_keys_so_far():
    mask, chunks = Mask.causal(100), Layout.chunks(100, 3, 30)
    for number, keys in enumerate(find_keys((mask,), chunks, 1)):
        start, stop = chunks.spans[number]
        assert keys.masks == (Mask.causal(stop - start, kv_len=stop),)
        assert keys.seen == slice(0, keys.own.stop)
        assert keys.layout.seq_len == stop
    keys = find_keys((mask,), chunks, 1)
    assert max(each.own.stop for each in keys) == chunks.length(1)


def test_equal_chunks_of_a_window_have_equal_masks_and_layouts():
    """So their calls share a plan."""
    for name, window in (("zigzag", 7), ("striped", 20), ("contiguous", 45)):
        chunks = Layout.chunks(200, 2, 20, name)
        keys = find_keys((Mask.causal(200),), chunks, 0, window)
        late = [(x.masks, x.layout) for x in keys if x.first]
        assert len(late) > 5
        assert all(x == late[0] for x in late)


def test_a_chunk_that_begins_with_a_document_is_a_call_of_its_own():
    chunks = Layout.chunks(60, 2, 20)
    first, second, third = find_keys((Mask.documents((0, 20, 45, 60)),), chunks, 0)
    assert first.masks == second.masks == (Mask.causal(20),)
    assert first.layout == second.layout == Layout.zigzag(20, 2)
    assert [count_kept(x) for x in (first, second, third)] == [0, 10, 0]
    assert third.first == 20, "in the middle of its first document"


def test_all_keys_may_be_kept():
    chunks = Layout.chunks(60, 2, 20)
    keys = find_keys((Mask.causal(60),), chunks, 1, window=5, keeps_all=True)
    assert [count_kept(x) for x in keys] == [10, 10, 10]
    assert [x.first for x in keys] == [0, 16, 36]
