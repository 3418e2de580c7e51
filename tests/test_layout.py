"""Layouts against brute force."""

import numpy as np
import pytest
import torch

from bmt_burst import IGNORE_INDEX, Layout, Mask, SequenceParallel, shard, shift_labels, unshard
from bmt_burst.sequence.layout import Stacked, Tail
from tests.refusals import refusal


@pytest.mark.parametrize("name", ["zigzag", "striped"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_balanced_layouts_give_every_rank_and_hop_equal_work(name, size):
    layout = Layout.named(name, 16 * size, size)
    positions = [layout.positions(rank) for rank in range(size)]

    def work(q_rank, kv_rank):
        return int((positions[q_rank].unsqueeze(1) >= positions[kv_rank]).sum())

    diagonal = 16 if name == "striped" else 0  # striped tiles have it or lack it
    for hop in range(1, size):
        hops = [work(rank, (rank - hop) % size) for rank in range(size)]
        assert max(hops) - min(hops) <= diagonal
    whole = [sum(work(rank, other) for other in range(size)) for rank in range(size)]
    assert max(whole) - min(whole) <= diagonal * (size - 1)


def test_divisible_shards_are_the_usual_ones():
    x = torch.arange(24)
    assert shard(x, 1, 3, 0, "zigzag").tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert shard(x, 1, 3, 0, "striped").tolist() == list(range(1, 24, 3))
    assert shard(x, 1, 3, 0, "contiguous").tolist() == list(range(8, 16))


@pytest.mark.parametrize("name", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize(("tokens", "most"), [(96, 32), (97, 32), (31, 8), (31, 30), (31, 99)])
def test_a_rank_has_an_equal_share_of_every_chunk(name, tokens, most):
    """Chunks have the sizes of torch.tensor_split, and each is cut as a sequence of its own."""
    x, size = torch.arange(tokens), 3
    chunks = Layout.chunks(tokens, size, most, name)
    pieces = x.tensor_split(-(-tokens // most))
    assert [x[slice(*span)].tolist() for span in chunks.spans] == [p.tolist() for p in pieces]
    assert max(map(len, pieces)) <= most
    for rank in range(size):
        expected = torch.cat([shard(piece, rank, size, 0, name) for piece in pieces])
        assert chunks.layout.shard(x, rank, 0).equal(expected)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((96, 8, 7), "ValueError: a chunk of 6 of 96 tokens is too short for 8 ranks: "),
        ((31, 8, 8), "ValueError: a chunk of 7 of 31 tokens is .*at least 11"),
        ((7, 8, 8), "ValueError: a sequence of 7 tokens is too short for 8 ranks"),
        ((96, 8, 0), "ValueError: expected chunks of at least one token, got tokens=0"),
        ((96, 8, 32.0), r"TypeError: tokens must be a whole number, got 32\.0"),
        ((96, 8, 32, "balanced"), "ValueError: unknown layout 'balanced'"),
    ],
)
def test_chunks_that_cannot_be_cut_are_refused(arguments, error):
    with refusal(error):
        Layout.chunks(*arguments)


def test_labels_are_shifted_over_the_whole_sequence():
    tokens = torch.arange(20).view(2, 10)
    labels = shift_labels(tokens)
    assert labels[:, :-1].equal(tokens[:, 1:])
    assert (labels[:, -1] == IGNORE_INDEX).all()
    for rank in range(3):
        own, target = shard(tokens, rank, 3), shard(labels, rank, 3)
        valid = target != IGNORE_INDEX
        assert target[valid].equal(own[valid] + 1)


def test_labels_need_negative_numbers():
    for dtype in (torch.uint8, torch.bool, torch.float32):
        with pytest.raises(TypeError, match="signed integer"):
            shift_labels(torch.zeros(1, 3, dtype=dtype))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["zigzag"], 8, 2), "layout must be one of .*, got list"),
        (("zigzag", 8.0, 2), r"seq_len must be a whole number, got 8\.0"),
        (("zigzag", 8, True), "size must be a whole number, got True"),
        (("zigzag", torch.tensor(8), 2), "seq_len must be a whole number, got a Tensor"),
        (("zigzag", None, 2), "seq_len must be a whole number, got None"),
    ],
)
def test_layouts_of_what_is_no_number_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        Layout.named(*arguments)


def test_numbers_of_numpy_are_numbers():
    layout = Layout.zigzag(np.int64(11), np.uint8(2))
    assert layout == Layout.zigzag(11, 2)
    assert type(layout.seq_len) is type(layout.size) is int
    assert layout.positions(np.int32(1)).equal(layout.positions(1))
    x = torch.arange(22).view(2, 11)
    assert shard(x, np.int64(0), np.int64(2), np.int64(-1)).equal(shard(x, 0, 2, -1))


@pytest.mark.parametrize("dim", [2, -3, 100])
def test_dimensions_that_are_not_there_are_refused(dim):
    x, layout, sp = torch.zeros(8, 8, dtype=torch.int64), Layout.zigzag(8, 1), SequenceParallel()
    calls = [
        lambda: layout.shard(x, 0, dim),
        lambda: layout.unshard([x], dim),
        lambda: shard(x, 0, 1, dim),
        lambda: unshard([x], dim),
        lambda: shift_labels(x, dim),
        lambda: sp.shard(x, dim),
        lambda: sp.unshard(x, 8, dim),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"a tensor of shape \(8, 8\) has no dimension {dim}"):
            call()


def test_a_dimension_is_a_whole_number_and_what_is_cut_a_tensor():
    with pytest.raises(TypeError, match=r"dim must be a whole number, got 1\.0"):
        shard(torch.zeros(1, 8), 0, 2, 1.0)
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor, got list"):
        shard([1, 2, 3, 4], 0, 2, 0)
    for join in (unshard, Layout.zigzag(8, 2).unshard):
        with pytest.raises(TypeError, match=r"expected a torch\.Tensor, got list"):
            join([[1, 2], [3, 4]], 0)


def test_wrong_shards_are_refused():
    with pytest.raises(ValueError, match=r"expected shards of \[4, 4\] tokens"):
        Layout.zigzag(8, 2).unshard([torch.zeros(1, 3), torch.zeros(1, 5)])


@pytest.mark.parametrize(
    ("layout", "lines"),
    [
        (Layout.zigzag(8000, 2), ["rank 0: 0-1999, 6000-7999", "rank 1: 2000-3999, 4000-5999"]),
        (Layout.striped(7, 3), ["rank 0: 0-6 by 3", "rank 1: 1-4 by 3", "rank 2: 2-5 by 3"]),
        (Layout.chunks(12, 2, 6), ["rank 0: 0-1, 5, 6-7, 11", "rank 1: 2-3, 4, 8-9, 10"]),
        (Tail(Layout.contiguous(9, 2), 5), ["rank 0: no tokens", "rank 1: 0-3"]),
        (Stacked([Layout.striped(5, 2), Layout.contiguous(4, 2)]),
         ["rank 0: 0-4 by 2, 5-6", "rank 1: 1-3 by 2, 7-8"]),
    ],
)  # fmt: skip
def test_layouts_print_runs(layout, lines):
    assert str(layout).splitlines() == lines


DOCUMENTS = Mask.documents(range(0, (1 << 17) + 1, 64))


@pytest.mark.parametrize("size", [2, 24, 25, 64])
@pytest.mark.parametrize(
    "make",
    [
        lambda size: Layout.balanced(DOCUMENTS, size),
        lambda size: Layout.zigzag(1 << 17, size),
        lambda size: Layout.striped(1 << 17, size),
        lambda size: Layout.chunks(1 << 17, size, 1 << 10),
        lambda size: Stacked([Layout.striped(1 << 12, size)] * 40),
    ],
)
def test_a_printed_layout_fits_on_a_screen(make, size):
    layout = make(size)
    lines = str(layout).splitlines()
    assert len(lines) == min(size, 24) and max(map(len, lines)) <= 100
    assert "\n" not in repr(layout) and len(repr(layout)) <= 100
    if size > 24:
        assert lines.pop() == f"... {size - 23} more ranks"
    for rank, line in enumerate(lines):
        runs = line.removeprefix(f"rank {rank}: ").split(", ")
        more = int(runs.pop().split()[1]) if "more" in line else 0
        assert len(runs) + more == len(layout.shards[rank])
        assert not more or len(line) > 70
