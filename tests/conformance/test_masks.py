"""The contract of masks, for each registered kind: their pairs, and attention with them."""

from __future__ import annotations

import pickle
import random

import pytest
import torch

from bmt_burst import Layout, Mask
from examples.mask_kinds import EXAMPLES
from tests.cases import random_mask, random_qkv, random_two_lengths
from tests.launcher import run_script
from tests.reference import assert_close, dense_results
from tests.rings import ring_results

each_mask = pytest.mark.parametrize("kind", EXAMPLES)


def check_pairs(mask):
    """Count pairs one by one, by the definition of a slice."""
    tokens, dense = (mask.seq_len, mask.kv_len), mask.dense()
    one_by_one = torch.zeros(tokens, dtype=torch.int)
    for part in mask.slices:
        (q0, q1), (k0, k1), low, high = part
        for i in range(q0, q1):
            for j in range(k0, k1):
                one_by_one[i, j] += (low is None or low <= i - j) and (high is None or i - j < high)
        assert part.area == Mask(tokens[0], (part,), kv_len=tokens[1]).dense().sum() > 0
    assert one_by_one.max() <= 1, "slices share no pair"
    assert dense.equal(one_by_one.bool())
    assert mask.area == int(dense.sum())


def check_derived(mask):
    """Compare what is made of a mask with its pairs. It has the digest of a new mask."""
    tokens, dense = mask.seq_len, mask.dense()
    assert mask.transposed.dense().equal(dense.T)
    assert mask.transposed.transposed == mask
    assert mask.rows(0, tokens) == mask
    some = mask.rows(tokens // 3, tokens // 2 + 1)
    assert some.dense().equal(dense[tokens // 3 : tokens // 2 + 1])
    made = [mask, mask.transposed, some, some.transposed]
    if mask.kv_len == tokens:
        places = torch.arange(tokens) if mask.depths is None else mask.positions()
        ahead = places.unsqueeze(1) - places
        for window in (1, 3, 50):
            made.append(mask.windowed(window))
            assert made[-1].dense().equal(dense & (ahead < window))
    made.append(Mask.stacked([mask, Mask.causal(3), mask]))
    assert made[-1].dense().equal(torch.block_diag(dense, torch.ones(3, 3).tril(), dense).bool())
    for each in made:
        checked = Mask(each.seq_len, each.slices, kv_len=each.kv_len)  # its slices are accepted
        assert checked.slices == each.slices
        if each.depths is None:  # others are the masks of trees only if Mask.tree makes them
            assert (checked, checked.digest) == (each, each.digest)
    free = [dense[:, slice(*span)] for span in mask.equal_keys]
    assert all(columns.eq(columns[:, :1]).all() for columns in free)
    assert [p for part in mask.parts for p in range(*part)] == list(range(tokens))
    lengths = torch.tensor([stop - start for start, stop in mask.parts])
    part_of = torch.arange(len(lengths)).repeat_interleave(lengths)
    assert all(part_of[s.q[0]] == part_of[s.q[1] - 1] for s in mask.slices)
    if mask.kv_len == tokens:
        assert not dense[part_of.unsqueeze(1) != part_of].any(), "parts see nothing of each other"


@each_mask
@pytest.mark.parametrize("tokens", [1, 2, 13, 40, 64])
def test_each_kind_is_what_its_slices_are(kind, tokens):
    mask = EXAMPLES[kind](tokens)
    assert mask.seq_len == tokens
    check_pairs(mask)
    check_derived(mask)
    positions = torch.cat([torch.arange(stop - start) for start, stop in mask.parts])
    if mask.depths is not None:
        positions = mask.dense().sum(1) - 1
    assert mask.positions().equal(positions)


def test_random_masks_are_what_their_slices_are():
    """Every other one has two lengths."""
    for seed in range(200):
        chance = random.Random(seed)
        mask = random_mask(chance, chance.randint(1, 20))
        mask = random_two_lengths(chance, 4)[0] if seed % 2 else mask
        check_pairs(mask)
        check_derived(mask)


@each_mask
def test_equality_hash_digest_and_pickle(kind):
    mask = EXAMPLES[kind](40)
    twin = pickle.loads(pickle.dumps(mask))
    assert mask == twin == EXAMPLES[kind](40)
    assert hash(mask) == hash(twin)
    assert mask.digest == twin.digest
    assert all(mask != EXAMPLES[other](40) for other in EXAMPLES if other != kind)


@each_mask
def test_attention_with_it_equals_dense(kind):
    mask, tensors = EXAMPLES[kind](37), random_qkv(1, 37, 4, 2, 8)
    for layout in (Layout.zigzag(37, 2), Layout.balanced(mask, 3)):
        got = ring_results(layout, tensors, 0.3, mask=mask)
        assert_close(got, dense_results(mask, tensors, 0.3), tensors[3], 0.3, 1e-12)


@each_mask
def test_it_prints_and_draws(kind):
    text = str(EXAMPLES[kind](64))
    assert "visible pairs" in text
    assert len(text.splitlines()) == 33


def test_names_can_be_selected():
    """`pytest -k NAME` takes them as they are."""
    assert [name for name in EXAMPLES if len(name.split()) != 1] == []


def test_the_gallery_draws_itself(tmp_path):
    code, printed = run_script(None, "examples/masks.py", tmp_path)
    assert code == 0, printed
    assert (tmp_path / "masks.png").read_bytes().startswith(b"\x89PNG")
    assert all(f"{kind}: 64 tokens" in printed for kind in EXAMPLES)
