"""The contract of `Layout`, for each registered layout, counted one by one."""

from __future__ import annotations

import pickle

import pytest
import torch

from bmt_burst import Layout, Mask, shard, unshard
from bmt_burst.sequence.layout import LAYOUTS, Balanced, Chunked

NAMES = [*LAYOUTS, Balanced.name, Chunked.name]
# tokens, ranks
SHAPES = [(1, 1), (7, 1), (2, 2), (9, 2), (3, 3), (10, 3), (31, 4), (8, 8), (37, 8), (64, 8)]

each_layout = pytest.mark.parametrize("name", NAMES)
each_shape = pytest.mark.parametrize(("tokens", "size"), SHAPES)


def made(name: str, tokens: int, size: int) -> Layout:
    if name == Balanced.name:
        return Layout.balanced(
            Mask.documents(sorted({0, tokens // 3, tokens}), window=max(tokens // 2, 1)), size
        )
    if name == Chunked.name:
        return Layout.chunks(tokens, size, max(2 * size, 4))
    return Layout.named(name, tokens, size)


@each_layout
@each_shape
def test_each_position_has_one_owner(name, tokens, size):
    layout = made(name, tokens, size)
    positions = [layout.positions(rank).tolist() for rank in range(size)]
    assert sorted(p for mine in positions for p in mine) == list(range(tokens))
    assert all(mine == sorted(mine) for mine in positions), "positions rise in a shard"
    lengths = [layout.length(rank) for rank in range(size)]
    assert lengths == list(map(len, positions))
    chunks = len(layout.spans) if name == Chunked.name else 1
    assert max(lengths) - min(lengths) <= chunks, "one token of each chunk"
    for rank in range(size):
        for start, stop in ((0, tokens), (tokens // 3, tokens - 1), (1, 1), (2, 1)):
            inside = [p for p in positions[rank] if start <= p < stop]
            assert layout.count(rank, (start, stop)) == len(inside)
        assert [
            p for run in layout.runs(rank) for p in range(run.start, run.stop, run.step)
        ] == positions[rank]


@each_layout
@each_shape
def test_unshard_undoes_shard(name, tokens, size):
    layout = made(name, tokens, size)
    for dim in (0, 1, -1):
        x = torch.arange(tokens * 6).reshape(2, 3, tokens).movedim(-1, dim)
        parts = [layout.shard(x, rank, dim) for rank in range(size)]
        assert layout.unshard(parts, dim).equal(x)
        if name in LAYOUTS:
            assert parts[-1].equal(shard(x, size - 1, size, dim, name))
            assert unshard(parts, dim, name).equal(x)


@each_layout
def test_gradients_of_shards_are_shards_of_gradients(name):
    layout = made(name, 13, 3)
    x = torch.randn(2, 13, requires_grad=True)
    weights = torch.randn(2, 13)
    sum((layout.shard(x, rank) * layout.shard(weights, rank)).sum() for rank in range(3)).backward()
    assert x.grad.equal(weights)


@each_layout
def test_equality_hash_and_pickle(name):
    layout, other = made(name, 24, 4), made(name, 25, 4)
    twin = pickle.loads(pickle.dumps(layout))
    assert layout == twin == made(name, 24, 4)
    assert hash(layout) == hash(twin)
    assert layout != other
    assert layout.term == twin.term
    assert all(layout != made(another, 24, 4) for another in NAMES if another != name)


@each_layout
def test_wrong_sizes_are_refused(name):
    with pytest.raises(ValueError, match="too short for 5 ranks"):
        made(name, 4, 5)
    with pytest.raises(ValueError, match="at least one rank"):
        made(name, 4, 0)
    layout = made(name, 12, 3)
    with pytest.raises(ValueError, match="expected a rank from 0 to 2, got"):
        layout.positions(3)
    with pytest.raises(ValueError, match="tokens"):
        layout.shard(torch.zeros(1, 11), 0)


@each_layout
def test_it_prints(name):
    """All positions, if they fit on a screen."""
    layout = made(name, 10, 2)
    for rank, line in enumerate(str(layout).splitlines()):
        prefix, runs = line.split(": ")
        positions = [position for run in runs.split(", ") for position in read_run(run)]
        assert prefix == f"rank {rank}" and positions == layout.positions(rank).tolist()
    assert rank == 1
    assert name in repr(layout)


def read_run(run):
    """Return the positions of a printed run: "3", "3-9" or "3-9 by 2"."""
    ends, _, step = run.partition(" by ")
    first, _, last = ends.partition("-")
    return range(int(first), int(last or first) + 1, int(step or 1))
