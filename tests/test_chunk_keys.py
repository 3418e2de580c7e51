"""The keys that chunks see and keep.

tests/test_chunks.py attends to them, with random masks and layouts.
"""

from __future__ import annotations

from bmt_burst import Layout, Mask
from bmt_burst.memories.chunk_keys import ChunkKeys, find_keys
from bmt_burst.sequence.span import overlap


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
