"""Evaluations of trained models: rows with something hidden, scores in one pass, and evaluate.py
on any number of ranks.
"""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from bmt_burst.sequence.layout import IGNORE_INDEX
from models.config import CPMConfig
from models.cpm import CPM
from models.huggingface import save_weights
from tests.launcher import run_script
from tests.preparing import write_tokens
from tests.refusals import refused_line
from tests.runs import read_records
from tests.test_model import initialized
from train import evaluate as script
from train.data.tokenizer import ByteTokenizer, JsonTokenizer
from train.evaluation.retrieval import KEYS, SENTENCES, Haystack, Needle, RetrievalRows, Variables
from train.evaluation.tasks import Bin, Grid, parse_tasks
from train.settings.config import TrainConfig
from train.trained.model import open_trained

TEXT = "The grass is green. The sky is blue. Here we go."
LENGTH = 30
TINY = CPMConfig(64, 64, 128, 2, 2, 2, 32, rope_theta=1000.0, tie_embeddings=False)


def decoded(rows: RetrievalRows, index: int) -> list[str]:
    """Return the inputs of a row, and its targets, as text."""
    row = rows.read(index)
    parts = row.tokens, row.labels[row.labels != IGNORE_INDEX]
    return [ByteTokenizer().decode(part.tolist()) for part in parts]


def byte_rows(task, length=600, samples=2, seed=0) -> RetrievalRows:
    return RetrievalRows(task, Haystack(ByteTokenizer()), length, samples, seed, bos=256)


def test_the_needle_is_at_its_depth_and_the_question_at_the_end():
    rows = byte_rows(Needle((0.0, 0.5, 1.0), 1))
    for index, depth in ((0, 0.0), (2, 0.5), (4, 1.0)):
        text, answer = decoded(rows, index)
        [(key, value)] = re.findall(r"The code of the (\w+ \w+) is (\d{5})\.", text)
        assert answer == f" {value}"
        assert text.endswith(f" The code of the {key} is {value[:-1]}")
        at = text.index(" The code") / (len(text) - 66)
        assert at == pytest.approx(depth, abs=0.06)  # half of a sentence
        assert rows.read(index).tokens[0] == 256


class _MergingTokenizer(ByteTokenizer):
    """Encodes a code and the part of its sentence before it as one token."""

    def encode(self, text: str) -> np.ndarray:
        words = re.split(r"( The code of.*\d)", text)
        parts = ([300] if word[-1:].isdigit() else word.encode() for word in words)
        return np.array([token for part in parts for token in part])


class _LetterTokenizer(ByteTokenizer):
    def encode(self, text: str) -> np.ndarray:
        return super().encode(re.sub(r" ?\d", "", text))


def test_answers_may_merge_with_the_question_but_need_tokens():
    rows = RetrievalRows(Needle((0.5,)), Haystack(_MergingTokenizer()), 200, 1, 0)
    row = rows.read(0)
    assert row.labels[-1] == 300 and (row.labels[:-1] == IGNORE_INDEX).all()
    with pytest.raises(ValueError, match=r"no tokens for the answer ' \d{5}'"):
        RetrievalRows(Needle((0.5,)), Haystack(_LetterTokenizer()), 200, 1, 0)


def test_each_of_several_needles_has_its_key_and_one_is_asked_for():
    text, answer = decoded(byte_rows(Needle((0.5,), 5)), 1)
    hidden = dict(re.findall(r"code of the (\w+ \w+) is (\d{5})\.", text))
    asked = re.findall(r"code of the (\w+ \w+) is \d{4}$", text)[0]
    assert len(hidden) == 5 and hidden.keys() <= set(KEYS) and answer == f" {hidden[asked]}"


@pytest.mark.parametrize("hops", [0, 1, 4])
def test_a_chain_of_variables_is_assigned_in_order_and_all_of_it_is_asked_for(hops):
    text, answer = decoded(byte_rows(Variables((hops,), 2), 900), 0)
    assigned = re.findall(r"VAR (\w{3}) = (?:VAR )?(\w+)\.", text)
    asked = re.findall(r"with the value (\d{5}) are:", text)
    assert len(assigned) == 3 * (hops + 1) and len(asked) == 2
    for value, expected in zip(asked, (text.split("are:")[1].split(".")[0], answer), strict=True):
        chain = []
        for name, source in assigned:
            if source in (value, *chain):
                chain.append(name)
        assert expected == "".join(f" {name}" for name in chain)


def test_rows_depend_on_seed_length_and_number_only():
    task = Needle((0.1, 0.9), 2)
    rows, again = byte_rows(task), byte_rows(task)
    assert all(torch.equal(rows.read(i).tokens, again.read(i).tokens) for i in range(len(rows)))
    assert not torch.equal(rows.read(0).tokens, byte_rows(task, seed=1).read(0).tokens)
    assert not torch.equal(rows.read(0).tokens, rows.read(1).tokens)
    assert (rows.read(None).labels == IGNORE_INDEX).all()


def test_every_length_is_filled_exactly_or_refused():
    task = Needle((0.5,), 1)
    too_short = r"a text of 40 tokens is too short for the task needle.*needs (\d+)"
    with pytest.raises(ValueError, match=too_short) as e:
        byte_rows(task, 40)
    shortest = int(re.search(too_short, str(e.value))[1])
    for length in range(shortest + 10, shortest + 60):
        row = byte_rows(task, length, samples=1).read(0)
        assert row.tokens.shape == row.labels.shape == (length,)


def test_a_text_of_the_user_keeps_its_order():
    haystack = Haystack(ByteTokenizer(), "One is here. Two\nThree goes! Four")
    tokens, starts = haystack.cut(80, np.random.default_rng(0))
    text = ByteTokenizer().decode(tokens.tolist())
    assert len(text) == 80 and text in " One is here. Two Three goes! Four" * 4
    assert all(text[start] == " " for start in starts)
    with pytest.raises(ValueError, match="has no words"):
        Haystack(ByteTokenizer(), " \n ")
    assert len(Haystack(ByteTokenizer(), SENTENCES).cut(1, np.random.default_rng(0))[0]) == 1


def test_options_out_of_range_are_refused():
    for change, message in (
        ({"lengths": ()}, "--lengths must be at least 1, got"),
        ({"depths": (0.5, 1.5)}, "--depths must be at least 0 and at most 1, got"),
        ({"hops": (-1,)}, "--hops must be at least 0"),
        ({"hidden": 129}, "--needles must be at least 1 and at most 128, got 129"),
        ({"samples": 0}, "--samples must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Grid(**{"lengths": (10,)} | change)
    assert parse_tasks("needle, positions", "--tasks") == ("needle", "positions")
    for wrong in ("needle,needle", "", "haystack"):
        with pytest.raises(ValueError, match="--tasks must be different names of needle, var"):
            parse_tasks(wrong, "--tasks")
    assert Bin(0, 1, 1, 1000.0).perplexity == math.inf


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a tokenizer of few words, a text of them, a model that was trained on needles, and one
    that was not.
    """
    folder = tmp_path_factory.mktemp("evaluate")
    words = dict.fromkeys(["[UNK]", "</s>", ".", *"0123456789", "The", "code", "of", "the"])
    words |= dict.fromkeys([*TEXT.replace(".", "").split(), *" ".join(KEYS).split()])
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    backend.add_special_tokens(["</s>"])
    backend.post_processor = processors.TemplateProcessing("</s> $A", None, [("</s>", 1)])
    assert len(words) <= TINY.vocab_size
    (folder / "haystack.txt").write_text(TEXT)
    backend.save(str(folder / "tokenizer.json"))
    untrained, trained = initialized(TINY), initialized(TINY)
    train_on_needles(trained, JsonTokenizer(folder / "tokenizer.json"))
    for name, model in (("untrained", untrained), ("trained", trained)):
        (folder / name).mkdir()
        backend.save(str(folder / name / "tokenizer.json"))
        weights = {n: p.detach() for n, p in model.named_parameters()}
        save_weights(folder / name, TINY, weights, torch.float32, max_position_embeddings=LENGTH)
    return folder


def train_on_needles(model: CPM, tokenizer: JsonTokenizer) -> None:
    """Train until nearly all answers of new texts are found."""
    haystack = Haystack(tokenizer, TEXT)
    rows = RetrievalRows(
        Needle(tuple(np.linspace(0, 1, 9)), digits=2), haystack, LENGTH, 2000, 1, 1
    )
    order = np.random.default_rng(0).permutation(len(rows))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, (0.9, 0.95), weight_decay=0.01)
    positions, recent = torch.arange(LENGTH), []
    for step in range(300):
        batch = [rows.read(int(i)) for i in order[step * 32 : step * 32 + 32]]
        tokens, labels = (torch.stack([getattr(r, x) for r in batch]) for x in ("tokens", "labels"))
        loss, count = model(tokens, positions, labels)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        recent = [*recent[-9:], loss.item() / int(count)]
        if max(recent) < 0.02 and len(recent) == 10:
            return


@pytest.fixture(scope="module")
def data(folder) -> Path:
    """Documents of 3 to 41 tokens, with the tokenizer of the models."""
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    words = TEXT.split() * 4
    texts = (" ".join(words[i % 5 : i % 5 + 3 + i % 7 * 5]) for i in range(24))
    return write_tokens(folder / "data", tokenizer, *texts)


def test_documents_begin_as_the_folder_of_the_weights_says(folder, data, tmp_path):
    """Not as the data was prepared: its begin token is the end of a text, for want of another."""
    silent = shutil.copytree(folder / "trained", tmp_path / "silent")
    values = json.loads((silent / "tokenizer.json").read_text())
    (silent / "tokenizer.json").write_text(json.dumps(values | {"post_processor": None}))
    for name, more, expected in (
        (folder / "trained", {}, 1),
        (folder / "trained", {"bos": "none"}, None),
        (folder / "trained", {"documents": "ignore"}, None),
        (silent, {}, None),
        (silent, {"bos": "."}, 2),
    ):
        given = {"init_from": str(name), "seq_len": LENGTH, **more}
        trained = open_trained(given, None, None, torch.device("cpu"))
        assert trained.bos == expected
        assert trained.open_data(str(data), LENGTH).identity["bos"] == expected


def evaluate(folder: Path, model: str, output: str, *more, ranks: int | None = None, code: int = 0):
    """Run evaluate.py to its end. Return its output."""
    sizes = ("--lengths", f"{LENGTH - 5},{LENGTH}", "--digits", 2)
    line = ["--init-from", folder / model, "--output", folder / output, *sizes]
    line += ["--text", folder / "haystack.txt", *more]
    ended, printed = run_script(ranks, "train/evaluate.py", *line)
    assert ended == code, printed
    return printed


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())["tasks"]


NEEDLE = ("--tasks", "needle", "--samples", 8)


def refused(capsys, *line) -> str:
    """Return why a command line is refused before anything is started."""
    return refused_line(capsys, script.main, *line)


def test_a_trained_model_finds_needles_and_an_untrained_one_does_not(folder, capsys):
    evaluate(folder, "untrained", "not-found", *NEEDLE)
    before = "--before", folder / "not-found"
    printed = evaluate(folder, "trained", "found", *before)
    assert "needle: needle_found" in printed and f"wrote {folder / 'found'}" in printed
    table = (folder / "found/before_after.md").read_text()
    assert table in printed
    assert f"before: {folder / 'untrained'}\nafter: {folder / 'trained'}\n" in table
    values = [
        results(folder / name)["needle"]["cells"][1]["found"] for name in ("not-found", "found")
    ]
    row = " | ".join(f"{value:.0%}" for value in values)
    assert f"| needle, found | {LENGTH - 5} | depth 0.25 | {row} |" in table
    assert results(folder / "found")["needle"]["found"] >= 0.95
    assert results(folder / "not-found")["needle"]["found"] <= 0.1
    cells = results(folder / "found")["needle"]["cells"]
    expected = [(n, d) for n in (LENGTH - 5, LENGTH) for d in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert [(cell["length"], cell["depth"]) for cell in cells] == expected
    written = {path.name for path in (folder / "found").iterdir()}
    assert written == {"results.json", "needle.png", "before_after.md"}
    for more, message in (
        (("--samples", 9), r"expected --samples 8, as in --before .*/found, got 9: leave it out"),
        (("--before", folder), r"--before .*: expected a folder of evaluate.py, got no results"),
    ):
        line = ("--init-from", folder / "trained", "--before", folder / "found", *more)
        assert re.search(message, refused(capsys, *line))
    for name, change, message in (
        ("grid", 1, r"got results.json without grid, options, texts, tasks"),
        ("options", {"later": 1}, r"has options of another version: \['later'\]"),
    ):
        (folder / "changed").mkdir(exist_ok=True)
        values = json.loads((folder / "found/results.json").read_text()) | {name: change}
        (folder / "changed/results.json").write_text(json.dumps(values))
        line = ("--init-from", folder / "trained", "--before", folder / "changed")
        assert re.search(message, refused(capsys, *line))
    assert (folder / "found/needle.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_results_do_not_depend_on_the_ranks(folder, data):
    """Losses are differences of logits of about 20, which fp32 rounds at 2e-6. 35 and 71 tokens are
    no multiples of 2 ranks.
    """
    more = ("--data", data, "--bins", 6, "--samples", 3, "--lengths", "35,71")
    more = (*more, "--tasks", "needle,positions")
    printed = evaluate(folder, "trained", "one", *more)
    warned = f"--lengths 71 is beyond the {LENGTH} tokens that the model was made for\n"
    assert warned in printed
    expected = results(folder / "one")
    assert 0 < expected["needle"]["found"] < 1, "it was trained on 30 tokens"
    bins = expected["positions"]["bins"]
    assert [b["start"] for b in bins] == [0, 6, 12, 18, 24, 30, 0, 12, 24, 36, 48, 60]
    assert [b["length"] for b in bins] == [35] * 6 + [71] * 6
    last = next(b for b in reversed(bins) if b["targets"])
    assert expected["positions"]["far_loss"] == last["loss"] and bins[5]["targets"]
    far = f"far_loss {last['loss']:.4f} (of only {last['targets']} targets)"
    assert f"positions: {far} in sequences of 71 tokens\n" in printed
    assert "positions: sequences of 35, 71 tokens of" in printed
    assert " in texts of 35, 71 tokens\n" in printed
    for ranks, options in (
        (2, ("--sp-size", 2, "--layout", "contiguous", "--data", f"all={data}")),
        (4, ("--sp-size", 2, "--strategy", "all-gather", "--micro-batch-size", 2)),
    ):
        evaluate(folder, "trained", f"ranks-{ranks}", *more, *options, ranks=ranks)
        found = results(folder / f"ranks-{ranks}")
        for mine, cell in zip(found["needle"]["cells"], expected["needle"]["cells"], strict=True):
            assert mine["found"] == cell["found"]
            assert mine["loss"] == pytest.approx(cell["loss"], rel=1e-5, abs=1e-5)
        for mine, b in zip(found["positions"]["bins"], bins, strict=True):
            assert mine["targets"] == b["targets"]
            if b["targets"]:
                assert mine["perplexity"] == pytest.approx(b["perplexity"], rel=1e-5)


@pytest.mark.slow
def test_a_run_is_evaluated_in_training_and_afterwards(folder, data, tmp_path):
    """With --eval-tasks and with evaluate.py numbers are equal. The mean of the bins is the
    validation loss.
    """
    (tmp_path / "model.json").write_text(json.dumps(TINY.to_dict()))
    options = {"model": tmp_path / "model.json", "data": data, "val_data": data, "seq_len": 64}
    options |= {"steps": 2, "batch_size": 2, "eval_every": 1, "eval_sequences": 5}
    options |= {"output": tmp_path / "run", "eval_tasks": "needle,variables,positions"}
    flags = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", value)]
    ended, printed = run_script(None, "train/pretrain.py", *flags)
    assert ended == 2 and "is too short for the task variables, which needs" in printed
    flags[-1] = "positions,needle"
    ended, printed = run_script(None, "train/pretrain.py", *flags)
    assert ended == 0 and "step 2: needle_found" in printed, printed
    recorded = {k: v for record in read_records(tmp_path / "run") for k, v in record.items()}
    line = ("--run", tmp_path / "run", "--tasks", "needle,positions", "--lengths", 64)
    more = ("--eval-sequences", 5, "--sp-size", 2, "--mlp-tile", 9)
    ended, printed = run_script(2, "train/evaluate.py", *line, *more)
    output = tmp_path / "run/evaluation_step_00000002"
    assert ended == 0 and f"wrote {output}" in printed, printed
    found = results(output)
    assert found["needle"]["found"] == recorded["needle_found"]
    assert found["positions"]["far_loss"] == pytest.approx(recorded["far_loss"], rel=1e-5)
    bins = [b for b in found["positions"]["bins"] if b["targets"]]
    mean = sum(b["loss"] * b["targets"] for b in bins) / sum(b["targets"] for b in bins)
    assert mean == pytest.approx(recorded["val_loss"], rel=1e-5)
    ended, printed = run_script(None, "train/evaluate.py", *line, "--before", output)
    assert ended == 0 and f"wrote {output}_2\n" in printed, printed
    assert f"| positions, perplexity | 64 | from {bins[1]['start']} | " in printed
    others = ("--bos", "none", "--before", output)
    ended, printed = run_script(None, "train/evaluate.py", *line, *others)
    refused = f"--before {output} read other texts: expected begin token 1, got None; --bos sets it"
    assert ended == 2 and refused in printed


def test_what_cannot_be_evaluated_is_refused(folder, data, capsys, monkeypatch):
    assert "either --run or --init-from" in refused(capsys)
    assert "either --run or --init-from" in refused(capsys, "--run", "a", "--init-from", "b")
    assert "--model is for --init-from, got --run" in refused(capsys, "--run", "a", "--model", "b")
    assert "--tasks positions needs text" in refused(capsys, "--init-from", folder / "trained")
    without = "--init-from", folder / "trained", "--tasks", "needle"
    assert "--init-from needs a length: give --lengths" in refused(capsys, *without)
    both = "--lengths are those of all tasks: leave out --seq-len"
    assert both in refused(capsys, "--run", "a", "--lengths", 8, "--seq-len", 8)
    assert "--lengths: expected numbers with commas" in refused(
        capsys, "--run", "a", "--lengths", "1,b"
    )
    assert "--seed must be at least 0" in refused(capsys, "--run", "a", "--seed", -1)
    with pytest.raises(ValueError, match="--eval-tasks positions needs --val-data"):
        TrainConfig(eval_tasks="positions")
    with pytest.raises(ValueError, match="--eval-tasks must be different names"):
        TrainConfig(eval_tasks="needles")
    short = ("--sp-size", 2, "--lengths", 1)
    printed = evaluate(folder, "trained", "short", *NEEDLE, *short, ranks=2, code=2)
    assert "--lengths must be at least --sp-size 2, got 1" in printed
    printed = evaluate(folder, "trained", "short", *NEEDLE, "--lengths", "40,9", code=2)
    assert "evaluate.py: a text of 9 tokens is too short for the task needle" in printed
    printed = evaluate(folder, "trained", "trained", *NEEDLE, ranks=2, code=2)
    assert printed.count(f"--output {folder / 'trained'} exists: give another one") == 1
    monkeypatch.setattr(script.os, "access", lambda *_: False)
    sealed = SimpleNamespace(_choose_output=lambda: folder / "sealed/short")
    with pytest.raises(ValueError, match="/sealed is not writable: give another --output"):
        script.Evaluation._check_output(sealed)
    assert not list(folder.glob("*short*"))
