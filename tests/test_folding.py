"""Rows that share prefixes as one sequence: values, losses and gradients are those of each row."""

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from bmt_burst import Layout, SequenceParallel, simulate
from bmt_burst.folding import Folded, fold_prefixes
from bmt_burst.sequence.layout import IGNORE_INDEX
from models.cpm import CPM
from tests.test_model import SMALL, initialized


def random_rows(chance: random.Random, longest: int) -> list[list[int]]:
    """Return rows with nested branches, equal ones, and ones that are prefixes of others."""
    shared = [[chance.randrange(3) for _ in range(chance.randint(1, longest))] for _ in range(3)]
    rows = []
    for _ in range(chance.randint(1, 8)):
        text = chance.choice(shared)
        tail = [chance.randrange(3) for _ in range(chance.randint(0, longest // 2))]
        rows.append(text[: chance.randint(1, len(text))] + tail)
    return rows


def check_row(folded: Folded, row: list[int], places: Tensor) -> None:
    """Check that each token of a row sees the tokens before it, and has its next one as target."""
    visible, positions = folded.mask.dense(), folded.positions
    tokens, targets = folded.tokens[0], folded.targets[0]
    assert tokens[places].tolist() == row
    assert positions[places].tolist() == list(range(len(row)))
    assert targets[places[:-1]].tolist() == row[1:]
    for place, t in zip(places.tolist(), range(len(row)), strict=True):
        seen = visible[place].nonzero().flatten()
        assert tokens[seen[positions[seen].argsort()]].tolist() == row[: t + 1]


@pytest.mark.parametrize("least", [1, 3])
def test_a_token_of_a_row_sees_what_it_sees_alone(least):
    for seed in range(300):
        rows = random_rows(random.Random(seed), 9)
        folded = fold_prefixes(rows if seed % 2 else [*map(torch.tensor, rows)], least)
        counts = torch.zeros(folded.seq_len, dtype=torch.int64)
        for row, places in zip(rows, folded.places, strict=True):
            check_row(folded, row, places)
            counts[places[:-1]] += 1
        assert counts.equal(folded.counts[0])
        assert ((counts == 0) == (folded.targets[0] == IGNORE_INDEX)).all()
        assert len(torch.cat(folded.places).unique()) == folded.seq_len  # no token is left over
        assert folded.seq_len <= sum(map(len, rows))


def test_completions_of_a_prompt_share_it():
    prompt = list(range(100, 200))
    rows = [[*prompt, i, i + 1, i + 2] for i in range(16)]
    folded = fold_prefixes(rows)
    assert folded.seq_len == 99 + 16 * 4  # the prompt's last token stands in each
    assert len(folded.mask.slices) == 17
    assert fold_prefixes(rows, least=101).seq_len == 16 * 103
    again = fold_prefixes([prompt, prompt])
    assert again.seq_len == 100 and again.counts.tolist() == [[2] * 99 + [0]]


def test_wrong_rows_are_refused():
    for rows, error, message in (
        ([], ValueError, "expected at least one row to fold, got none"),
        ([[1], []], ValueError, r"rows\[1\] must have at least one token, got none"),
        (
            [torch.zeros(2, 3, dtype=torch.int64)],
            TypeError,
            r"integers of one dimension, got shape",
        ),
        ([torch.zeros(2)], TypeError, r"rows\[0\] must be a tensor of integers"),
        ([[1.5]], TypeError, r"rows\[0\] must be"),
        ([torch.zeros(2, dtype=torch.int64, device="meta")], ValueError, "must be on the CPU"),
    ):
        with pytest.raises(error, match=message):
            fold_prefixes(rows)
    with pytest.raises(ValueError, match="least must be at least 1, got 0"):
        fold_prefixes([[1]], 0)
    with pytest.raises(ValueError, match=r"\(1, 3, \.\.\.\), got shape \(1, 2\): gather a shard"):
        fold_prefixes([[1, 2, 3]]).unfold(torch.zeros(1, 2))


CONFIG = dataclasses.replace(SMALL, window=9, window_pattern="wf")


def clipped_loss(logprobs: Tensor, number: int) -> Tensor:
    """Return a loss that is not linear in a row's log-probabilities, and differs by row."""
    ratio = (logprobs - logprobs.detach() + 0.3 * torch.sin(torch.arange(len(logprobs)))).exp()
    return torch.minimum(ratio * (number - 1.5), ratio.clip(0.9, 1.2) * (number - 1.5)).mean()


def logprobs_of(logits: Tensor, targets: Tensor) -> Tensor:
    at = targets.clamp_min(0).unsqueeze(-1)
    return logits.log_softmax(-1).gather(-1, at).squeeze(-1)


def losses_of_rows(model: CPM, rows: list[list[int]]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for number, row in enumerate(rows):
        tokens = torch.tensor([row])
        logits = model(tokens, torch.arange(len(row)))[0, :-1]
        total = total + clipped_loss(logprobs_of(logits, tokens[0, 1:]), number)
    return total


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_losses_and_gradients_are_those_of_separate_rows(ranks, layout):
    """Three levels, windows and grouped heads, in float64."""
    chance = random.Random(5)
    text = [chance.randrange(300) for _ in range(40)]
    ends = [[chance.randrange(300) for _ in range(n)] for n in (5, 9, 1, 12)]
    rows = [text[:30] + ends[0], text + ends[1], text + ends[2], text[:30] + ends[3], ends[3]]
    weights = initialized(CONFIG).double().state_dict()
    alone = CPM(CONFIG).double()
    alone.load_state_dict(weights)
    expected = losses_of_rows(alone, rows)
    expected.backward()
    folded = fold_prefixes(rows)
    mask = folded.mask
    where = (
        Layout.named(layout, mask.seq_len, ranks)
        if layout == "zigzag"
        else Layout.balanced(mask, ranks)
    )

    def work(ring):
        sp = SequenceParallel(ring.rank, ring.size, where, process_group=ring)
        model = CPM(CONFIG, sp).double()
        model.load_state_dict(weights)
        own = sp.shard(folded.tokens), sp.shard(folded.positions, 0), sp.shard(folded.targets)
        logprobs, _ = model(*own, mask=mask, logprobs=True)
        whole = sp.unshard(logprobs, mask.seq_len)
        of_rows = folded.unfold(whole)
        loss = sum(clipped_loss(row[:-1], number) for number, row in enumerate(of_rows))
        (loss / ring.size).backward()  # each rank has the loss of all rows
        return loss.detach(), [p.grad for p in model.parameters()]

    losses, grads = zip(*simulate(ranks, work), strict=True)
    assert all(abs(loss - expected) < 1e-10 for loss in losses)
    for of_ranks, parameter in zip(zip(*grads, strict=True), alone.parameters(), strict=True):
        assert (sum(of_ranks) - parameter.grad).abs().max() < 1e-10
