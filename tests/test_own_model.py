"""The model of docs/own-model.md equals what it was before, and the page's test finds faults."""

import inspect
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from bmt_burst import Mask, SequenceParallel, shift_labels, simulate
from examples import own_model
from examples.own_model import Model, generate, train, train_in_chunks
from tests.launcher import ROOT
from tests.test_readme import blocks


class Old:
    """One document on one device, with the attention that the model had before."""

    def check_positions(self, positions):
        pass

    def select(self, x):
        return x

    def mix(self, layer, kind, q, k, v):
        at = torch.arange(q.shape[1])
        distance = at.unsqueeze(1) - at
        seen = (distance >= 0) & (distance < (1000, 40)[layer])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)


def old_loss(model, document):
    labels = shift_labels(document)
    loss, _ = model(document, torch.arange(document.shape[1]), Old(), labels)
    return loss


def compare_with_the_old_model(step):
    torch.manual_seed(0)
    model, tokens = Model().double(), torch.randint(256, (1, 300))
    documents = tokens[:, :110], tokens[:, 110:]  # both are longer than the window
    loss = sum(old_loss(model, document) for document in documents) / 298
    expected = torch.autograd.grad(loss, list(model.parameters()))

    def work(ring):
        sp = SequenceParallel(ring.rank, ring.size, process_group=ring)
        step(model, sp, tokens, Mask.documents((0, 110, 300)))

    simulate(3, work)
    for weight, grad in zip(model.parameters(), expected, strict=True):
        assert (weight.grad - grad).abs().max() < 1e-10 * grad.abs().max()


def train_wrongly(fault, model, sp, tokens, mask):
    batch = sp.sequence(mask)
    mine, positions = batch.shard(tokens), batch.positions()
    labels = batch.shard(batch.shift_labels(tokens))
    if fault == "positions":
        positions = torch.arange(mine.shape[1])
    if fault == "labels":
        labels = shift_labels(mine)
    loss, count = model(mine, positions, batch, labels)
    targets = sp.sum(count)
    if fault == "mean":
        targets = count * sp.size
    (loss / targets).backward()


@pytest.mark.parametrize("step", [train, train_in_chunks, partial(train_wrongly, None)])
def test_whole_and_in_chunks(step):
    compare_with_the_old_model(step)


@pytest.mark.parametrize("fault", ["positions", "labels", "mean"])
def test_silent_faults_are_found(fault):
    with pytest.raises(AssertionError):
        compare_with_the_old_model(partial(train_wrongly, fault))


@pytest.mark.parametrize("step", [train, train_in_chunks])
def test_a_window_that_is_left_out_is_found(step, monkeypatch):
    monkeypatch.setattr(own_model, "WINDOWS", (None, None))
    with pytest.raises(AssertionError):
        compare_with_the_old_model(step)


def test_new_tokens_are_those_of_the_old_model():
    torch.manual_seed(0)
    model, prompt = Model().double(), torch.randint(256, (1, 300))

    def work(ring):
        sp = SequenceParallel(ring.rank, ring.size, process_group=ring)
        return generate(model, sp, prompt, 6)

    found, *others = simulate(3, work)
    assert all(tokens.equal(found) for tokens in others)
    text = torch.cat((prompt, found), 1)
    logits = model(text, torch.arange(306), Old())
    assert found.unique().numel() > 1 and found.equal(logits[:, 299:-1].argmax(-1))


def test_the_page_shows_the_example_and_the_test():
    *shown, test = blocks(ROOT / "docs/own-model.md", "python")
    assert len(shown) == 2
    assert all(code in inspect.getsource(own_model) for code in shown)
    assert test == inspect.getsource(compare_with_the_old_model)


def test_the_example_prints_new_tokens(capsys):
    own_model.main()
    assert capsys.readouterr().out.startswith("tensor([[")
