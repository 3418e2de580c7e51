"""Padded rows with context and spans, for adapters of models, against their definition."""

import itertools
import random

import pytest
import torch

from bmt_burst import Layout
from bmt_burst.adapters import batch


def random_marks(chance: random.Random, tokens: int) -> dict[str, torch.Tensor]:
    """Some of what can be known of tokens, in runs, and always where padding is."""
    marks = {}
    for name, numbers in (("attention_mask", 2), ("context", 2), ("span", 3)):
        if name == "attention_mask" or chance.random() < 0.6:
            cuts = sorted(chance.choices(range(tokens + 1), k=chance.randint(0, 5)))
            lengths = torch.tensor([0, *cuts, tokens]).diff()
            values = [chance.randrange(numbers) for _ in lengths]
            marks[name] = torch.tensor(values).repeat_interleave(lengths)
    return marks


def make_row(tokens, marks) -> batch.Row:
    kinds = batch._find_kinds(tokens, marks)
    return batch.Row(Layout.zigzag(tokens, 1), None, kinds)


@pytest.mark.parametrize("seed", range(24))
def test_masks_equal_their_definition(seed):
    chance = random.Random(seed)
    tokens = chance.randint(1, 30)
    causal = chance.random() < 0.7
    padding_sees = chance.random() < 0.5
    marks = random_marks(chance, tokens)
    row = make_row(tokens, marks)
    valid, at = marks["attention_mask"].bool(), torch.arange(tokens)
    before = at.unsqueeze(1) >= at if causal else torch.ones(tokens, tokens, dtype=torch.bool)
    if "context" in marks:
        context = marks["context"].bool()
        expected = valid.unsqueeze(1) & valid & (context | (~context.unsqueeze(1) & before))
    else:
        expected = (valid | padding_sees).unsqueeze(1) & valid & before
    if "span" in marks:
        expected &= marks["span"].unsqueeze(1) == marks["span"]
    mask = row.visible(causal, padding_sees)
    assert mask.dense().equal(expected)
    bounds = [0, *(valid.diff().nonzero().flatten() + 1).tolist(), tokens]
    assert row.valid == tuple(span for span in itertools.pairwise(bounds) if valid[span[0]])


def test_a_packed_row_has_as_many_slices_as_documents():
    """And as many again with contexts: what is seen of a document's, and what follows it."""
    tokens = 100_000
    span, context = torch.arange(tokens) // 10, (torch.arange(tokens) % 10 < 3).long()
    marks = {"attention_mask": torch.ones(tokens, dtype=torch.int64), "span": span}
    for more, slices in (({}, 10_000), ({"context": context}, 20_000)):
        row = make_row(tokens, marks | more)
        assert len(row.visible(causal=True, padding_sees=True).slices) == slices
