"""Examples: the ladder and MoBA run, and the pages of own models and trainers show what runs."""

import inspect
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from bmt_burst import Mask, SequenceParallel, shift_labels, simulate
from bmt_burst.extensions import read_extension
from examples import dense, overlapped_ring, own_model, plain_ring
from examples.moba import MoBA, main
from examples.own_model import Model, generate, train, train_in_chunks
from models.config import CPMConfig
from tests.launcher import ROOT, run_script
from tests.refusals import refusal
from tests.test_readme import blocks

LADDER = {"exchange": 1, "plain_ring": 4, "overlapped_ring": 1}  # and what each one checks


@pytest.mark.parametrize("name", LADDER)
def test_a_step_runs_and_is_small(name):
    code, printed = run_script(None, f"examples/{name}.py")
    assert code == 0, printed
    assert len(printed.splitlines()) == LADDER[name], printed
    assert len((ROOT / f"examples/{name}.py").read_text().splitlines()) < 60


def test_the_algorithm_has_25_lines():
    parts = (plain_ring.scores, plain_ring.forward, plain_ring.backward)
    assert sum(len(inspect.getsource(part).splitlines()) for part in parts) <= 25


@pytest.mark.parametrize("module", [plain_ring, overlapped_ring])
def test_any_number_of_ranks_equals_dense_attention(module, monkeypatch):
    for ranks in (2, 4, 6):
        monkeypatch.setattr(dense, "RANKS", ranks)
        dense.compare_with_dense(module.work)


def test_a_wrong_result_is_refused():
    def work(ring, q, k, v, mask, dout):
        out, *grads = plain_ring.work(ring, q, k, v, mask, dout)
        return out, grads[0], grads[1] + 1e-9, grads[2]

    with pytest.raises(AssertionError, match="dk differs from dense attention"):
        dense.compare_with_dense(work)


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


SCRIPT = ROOT / "examples/own_trainer.py"


def test_the_page_shows_the_beginning_and_the_loop_of_the_example():
    beginning, loop = blocks(ROOT / "docs/own-trainer.md", "python")
    assert beginning.startswith("sp = ") and loop.startswith("for step in ")
    assert all(f"\n{code}" in SCRIPT.read_text() for code in (beginning, loop))


@pytest.mark.slow
@pytest.mark.ranks
def test_it_resumes_and_ranks_change_only_rounding(tmp_path):
    text, checkpoint = ROOT / "README.md", tmp_path / "own.pt"

    def train(ranks, steps):
        code, printed = run_script(ranks, SCRIPT, text, checkpoint, steps)
        assert code == 0, printed
        return [float(loss) for loss in re.findall(r"loss (\S+)", printed)]

    resumed = train(2, 3) + train(2, 6)
    checkpoint.unlink()
    whole = train(None, 6)
    assert len(whole) == 6 and whole[-1] < whole[0] - 1
    # losses of a few units with four digits, after updates that rounding changes
    assert resumed == pytest.approx(whole, abs=2e-3)


SMALL = MoBA(block_size=4, topk=2)


def test_a_configuration_names_it():
    values = {"kind": "moba", "block_size": 4, "topk": 2}
    config = CPMConfig(64, 32, 64, 2, 4, 2, 8, sparse=values)
    assert CPMConfig.from_dict(config.to_dict()) == config
    assert config.sparse == SMALL
    with refusal(r"ValueError: unknown kind 'mob': expected one of \['infllm-v2', 'moba'"):
        read_extension({"kind": "mob"})


def test_the_example_trains_and_generates(capsys):
    main(6)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("loss of a token: ")
    before, after = (float(x) for x in (first.split()[4], first.split()[6]))
    assert after < before
    assert len(second.split()) == 9
