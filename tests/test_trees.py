"""Trees of tokens: masks against brute force, positions, windows and chunks.

tests/conformance/test_masks.py attends with a tree over ranks.
"""

import random
import time

import pytest
import torch
from torch import Tensor

from bmt_burst import Chunks, Layout, Mask, burst_attn_func, shift_labels
from bmt_burst.sequence.mask import Slice
from tests.cases import random_qkv
from tests.refusals import refusal

Tree = tuple[list[int], list[int | None]]


def random_tree(chance: random.Random, nodes: int, longest: int) -> Tree:
    """Return lengths and parents. Some trees have several roots."""
    parents = [
        None if not i or chance.random() < 0.15 else chance.randrange(i) for i in range(nodes)
    ]
    return [chance.randint(1, longest) for _ in range(nodes)], parents


def in_order(lengths: list[int], parents: list[int | None]) -> Tree:
    """Return a tree whose nodes are followed by their descendants."""
    order, waiting = list[int](), [i for i, parent in enumerate(parents) if parent is None][::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += [i for i, parent in enumerate(parents) if parent == order[-1]][::-1]
    place = {node: i for i, node in enumerate(order)}
    above = [parents[node] for node in order]
    return [lengths[i] for i in order], [None if p is None else place[p] for p in above]


def by_force(lengths: list[int], parents: list[int | None]) -> tuple[Tensor, Tensor]:
    """Return the visible pairs and the depths."""
    node = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).tolist()
    above, first = list[set[int]](), list[int]()
    for parent in parents:
        above.append(set() if parent is None else above[parent] | {parent})
        first.append(0 if parent is None else first[parent] + lengths[parent])
    sees = [
        [b in above[a] or (a == b and j <= i) for j, b in enumerate(node)]
        for i, a in enumerate(node)
    ]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return torch.tensor(sees), torch.tensor([first[n] + t - starts[n] for t, n in enumerate(node)])


def test_trees_and_their_windows_are_those_of_brute_force():
    """Alone, and stacked with documents."""
    documents = Mask.documents((0, 3, 8))
    for seed in range(300):
        tree = random_tree(random.Random(seed), seed % 10 + 1, 5)
        mask, (visible, depths) = Mask.tree(*tree), by_force(*tree)
        assert mask.dense().equal(visible)
        assert mask.positions().equal(depths)
        assert mask.rows(0, mask.seq_len) is mask
        stacked = Mask.stacked([documents, mask])
        assert stacked.positions().equal(torch.cat([documents.positions(), depths]))
        for window in (1, 2, 6):
            near = (depths.unsqueeze(1) - depths) < window
            windowed = mask.windowed(window)
            assert windowed.dense().equal(visible & near)
            assert windowed.positions().equal(depths)
            assert (
                Mask(mask.seq_len, windowed.slices).slices == windowed.slices
            )  # they are disjoint
            both = Mask.stacked([documents.windowed(window), windowed])
            assert stacked.windowed(window) == both


def test_a_tree_is_not_the_mask_with_its_slices():
    """Windows differ, so plans and digests must not be shared."""
    tree = Mask.tree([2, 3, 3], [None, 0, 0])
    plain = Mask(8, tree.slices)
    assert tree != plain and tree.digest != plain.digest
    assert tree.windowed(3).area > plain.windowed(3).area
    assert "2 branches" in str(tree)


def test_wrong_trees_are_refused():
    for lengths, parents, message in (
        ([3, 0], [None, 0], r"lengths\[1\] must be at least 1, got 0"),
        ([3, 2], [None, 1], r"parents\[1\] must be None or an earlier node, 0 to 0, got 1"),
        ([3], [0], r"parents\[0\] must be None, got 0"),
        ([3, 2], [None], "expected as many parents as lengths, at least one, got 1 parents and 2"),
        ([], [], "at least one, got 0 parents and 0 lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            Mask.tree(lengths, parents)
    with pytest.raises(TypeError, match="lengths must be a sequence of whole numbers, got int"):
        Mask.tree(3, [None])
    for lengths, parents in (([2.5], [None]), ([None], [None]), ([2], ["root"])):
        with pytest.raises(TypeError, match=r"must be .*(whole|int)"):
            Mask.tree(lengths, parents)
    tree = Mask.tree([2, 3, 3], [None, 0, 0])
    with refusal("ValueError: token 5 does not see token 4, as in a tree of drafts: make the lab"):
        shift_labels(torch.arange(8), mask=tree)
    drafts = Mask(2, (Slice((0, 2), (0, 2), 0, 1), Slice((1, 2), (0, 1), 2)))
    unknown = Mask(3, (Slice((0, 1), (0, 1)), Slice((1, 2), (1, 2)), Slice((2, 3), (0, 1))))
    assert Mask.stacked([tree, drafts]).depths
    with pytest.raises(ValueError, match=r"positions\(\) expected documents in which each"):
        Mask.stacked([tree, unknown])


@pytest.mark.parametrize("kind", ["flat", "chain", "random"])
def test_trees_of_many_nodes_are_planned_soon(kind):
    chance = random.Random(3)
    lengths, parents = {
        "flat": ([2000] + [200] * 499, [None] + [0] * 499),
        "chain": ([50] * 500, [None, *range(499)]),
        "random": in_order(
            [chance.randint(1, 300) for _ in range(500)],
            [None, *map(chance.randrange, range(1, 500))],
        ),
    }[kind]
    began = time.process_time()
    mask = Mask.tree(lengths, parents)
    assert len(mask.slices) <= 500
    Layout.balanced(mask, 8)
    assert time.process_time() - began < 0.5  # 0.03 s on an idle core


@pytest.mark.parametrize("window", [None, 9])
def test_a_tree_in_chunks_equals_the_whole(window):
    mask = Mask.tree([20, 9, 14, 8], [None, 0, 0, 2])
    *inputs, dout = random_qkv(1, mask.seq_len, 4, 2, 8)
    whole = [x.clone().requires_grad_() for x in inputs]
    near = mask if window is None else mask.windowed(window)
    out = burst_attn_func(*whole, mask=near, layout="contiguous")
    expected = [out, *torch.autograd.grad(out, whole, dout)]
    chunks, found = Chunks(mask, 16, 1), []
    for chunk in chunks.forward():
        chunk.attend(0, *map(chunk.shard, inputs), window=window)
    for chunk in chunks.backward():
        own = [chunk.shard(x).requires_grad_() for x in inputs]
        part = chunk.attend(0, *own, window=window)
        found.append([part, *torch.autograd.grad(part, own, chunk.shard(dout))])
    for ours, theirs in zip(zip(*found, strict=True), expected, strict=True):
        assert (torch.cat(ours[::-1], 1) - theirs).abs().max() < 1e-12
