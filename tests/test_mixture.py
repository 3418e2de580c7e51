"""Mixtures of data: which source gives a row, losses by source, and what is refused."""

import json
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest

from tests.launcher import run_script
from tests.live import write_vocabulary
from tests.preparing import edit_index, write_instances, write_tokens
from tests.refusals import refused_line
from tests.runs import forget, read_records, records, train
from tests.test_batches import Tokens, batches
from train.base import ranks
from train.cpm_live.tokenizers import AntGreedyTokenizer
from train.data.folder import Sequences
from train.data.mixture import Interleaving, Mixture
from train.data.shares import evaluated_folders, parse_shares, parse_sources
from train.data.tokenizer import ByteTokenizer
from train.loop.stages import parse_run

NAMES = ("loss", "loss/code", "loss/books", "grad_norm", "samples", "epoch/code", "epoch/books")


@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_shares_are_held_at_every_prefix_and_each_source_is_read_in_order(count):
    chance = random.Random(count)
    for _ in range(10):
        weights = (Fraction(str(round(10 ** chance.uniform(-4, 2), 5))) for _ in range(count))
        order = Interleaving({f"s{i}": weight for i, weight in enumerate(weights)})
        read = dict.fromkeys(order.shares, 0)
        for sample in range(600):
            name, place = order.locate(sample)
            assert place == read[name]
            read[name] += 1
            off = max(abs(read[x] - (sample + 1) * share) for x, share in order.shares.items())
            assert off <= Fraction(1, 2) if count < 3 else off < 2
            assert order.count(sample + 1) == read


def mixture(*lengths: int, weights: dict[str, int]) -> Mixture:
    """Sources of so many rows of 16 tokens."""
    sources = {
        name: Sequences(Tokens(16 * length + 1), 16, seed=3)
        for name, length in zip(weights, lengths, strict=True)
    }
    return Mixture(sources, {name: Fraction(x) for name, x in weights.items()})


def test_rows_do_not_depend_on_ranks_or_micro_batches(monkeypatch):
    data = mixture(7, 1, 40, weights={"a": 2, "b": 1, "c": 5})
    read = []
    for world, sp_size, size in ((1, 1, 8), (2, 2, 4), (4, 2, 1)):
        rows = []
        for group in range(world // sp_size):
            dealer = batches(monkeypatch, group * sp_size, world, sp_size, micro_batch_size=size)
            for batch in dealer.of_step(data, first=16):
                first = batch.tokens[:, 0] // 16  # on the first rank of a zigzag
                rows += zip(batch.sources, first.tolist(), strict=True)
        read.append(rows)
    assert all(rows == read[0] for rows in read[1:])
    assert [source for source, _ in read[0]].count(2) == 5


def test_wrong_mixtures_are_refused(capsys):
    wrong = *(f"code=a{x}" for x in ("", ":0", ":-1", ":many", ":nan", ":inf")), "code=:1"
    for data, message in (
        ("code=a:1 b", "--data: expected one path, or NAME= in front of each, got 'b'"),
        ("code=a:1 code=b:1", "--data: expected different names, got code twice"),
        *(
            (x, f"expected code=PATH:WEIGHT with a positive number as weight, got {x}")
            for x in wrong
        ),
        ("co/de=a:1", "expected a name of letters, digits, '_', '-' and '.', got 'co/de'"),
    ):
        assert message in refused_line(capsys, parse_run, "--data", *data.split())


def test_a_configuration_has_a_table(tmp_path, capsys):
    named = ["--data", "code=data/code:0.3", "b=C:/x:7e-1", "--val-data", "code=v"]
    line, _ = parse_run(named)
    (tmp_path / "run.toml").write_text(
        '[data]\ncode = "data/code:0.3"\nb = "C:/x:7e-1"\n[val_data]\ncode = "v"\n'
    )
    assert parse_run(["--config", str(tmp_path / "run.toml")]) == (line, None)
    shares = parse_shares(line.data)
    assert shares == {"code": ("data/code", Fraction(3, 10)), "b": ("C:/x", Fraction(7, 10))}
    for text, message in (
        ('{"data": {"a": "x:1", "a": "y:1"}}', "expected different names, got 'a' twice"),
        ('{"data": {"a": 1}}', "--data: expected a path for a, got 1"),
        ('{"data": {}}', "--data must name at least one source"),
        ('{"data": 1}', "data must be a path or a table, got 1"),
    ):
        (tmp_path / "run.json").write_text(text)
        assert message in refused_line(capsys, parse_run, "--config", tmp_path / "run.json")


def test_evaluated_sources_need_no_weights_and_a_path_stays_a_path(tmp_path, monkeypatch):
    data = parse_sources(["code=data/code:0.3", "books=C:/x", "c=a:b"])
    assert evaluated_folders(data) == {"code": "data/code", "books": "C:/x", "c": "a:b"}
    assert evaluated_folders("data/code:0.3") == {"": "data/code:0.3"}
    with pytest.raises(ValueError, match="--data: expected a path for code, got ''"):
        evaluated_folders(parse_sources(["code="]))
    monkeypatch.chdir(tmp_path)
    Path("lang=en").mkdir()
    assert parse_sources(["lang=en"]) == "lang=en"
    assert parse_sources(["data/x:1"]) == "data/x:1"
    assert parse_sources(["lang=de:1"]) == {"lang": "de:1"}


@pytest.fixture
def mixed(settings, tmp_path) -> dict:
    """Settings with two sources, a long one and a short one, and validation data of both."""
    write_tokens(tmp_path / "short", ByteTokenizer(), "a book " * 25)
    data = {"code": f"{tmp_path}/text:3", "books": f"{tmp_path}/short:1"}
    val_data = {"code": f"{tmp_path}/other", "books": f"{tmp_path}/short"}
    changed = {"data": data, "val_data": val_data, "batch_size": 4, "micro_batch_size": 2}
    return settings | changed | {"steps": 6, "eval_every": 3, "warmup_steps": 0, "decay_steps": 0}


def test_a_resumed_run_is_bitwise_equal_and_losses_are_named(mixed, tmp_path, capsys):
    assert train(mixed)
    printed = capsys.readouterr().out
    assert "a mixture of 75.000% code (" in printed
    assert printed.count("books starts over, in a new order") == 1
    assert "step 5: code starts over" not in printed
    whole = {name: records(tmp_path / "run", name) for name in NAMES}
    assert whole["epoch/books"][6] == 6 / 3
    # the mean of both, weighted by targets, is the loss
    for step, loss in whole["loss"].items():
        low, high = sorted((whole["loss/code"][step], whole["loss/books"][step]))
        assert low < loss < high
    forget(tmp_path / "run", 4, 6)
    assert train(mixed, resume="auto", micro_batch_size=1)
    for name in NAMES[4:]:
        assert records(tmp_path / "run", name) == whole[name]
    for name in NAMES[:4]:
        assert records(tmp_path / "run", name) == pytest.approx(whole[name], rel=1e-5)
    forget(tmp_path / "run", 4, 6)
    assert train(mixed, resume="auto")
    assert {name: records(tmp_path / "run", name) for name in NAMES} == whole


def test_losses_by_name_are_those_of_each_source_alone(mixed, tmp_path):
    """Validation has the same numbers. Training has them while weights do not change."""
    options = {"lr": 1e-30, "steps": 1, "eval_every": 0}
    train(mixed, **options, eval_tasks="positions")
    _, record, found = read_records(tmp_path / "run")
    for name in ("code", "books"):
        apart = {"output": str(tmp_path / name), "val_data": mixed["val_data"][name]}
        train(mixed, **options | apart, eval_tasks="positions")
        assert records(tmp_path / name, "val_loss")[1] == record[f"val_loss/{name}"]
        assert records(tmp_path / name, "far_loss")[1] == found[f"far_loss/{name}"]
    low, high = sorted((record["val_loss/code"], record["val_loss/books"]))
    assert low < record["val_loss"] < high
    # three of the step's four rows are the first ones of code
    only = {"output": str(tmp_path / "only"), "data": str(tmp_path / "text"), "batch_size": 3}
    train(mixed | options | only, micro_batch_size=3, val_data=None)
    first = records(tmp_path / "run", "loss/code")[1]
    assert first == pytest.approx(records(tmp_path / "only")[1], rel=1e-6)
    assert "loss/code" not in (tmp_path / "only/metrics.jsonl").read_text()
    # a step without a row of books has no loss of them
    rare = mixed["data"] | {"books": f"{tmp_path}/short:1e-9"}
    train(mixed | options, data=rare, val_data=None, output=str(tmp_path / "rare"))
    assert records(tmp_path / "rare", "loss/code") == records(tmp_path / "rare")
    assert not records(tmp_path / "rare", "loss/books")


def test_another_mixture_is_a_new_stage(mixed, tmp_path):
    train(mixed, steps=2, val_data=None)
    text, other = str(tmp_path / "text"), f"{tmp_path}/other"
    for data, message in (
        (mixed["data"] | {"code": f"{text}:2"}, "share of code 3/4 -> 2/3, share of books 1/4 -> "),
        (mixed["data"] | {"code": f"{other}:3"}, "digest of code "),
        (mixed["data"] | {"wiki": f"{other}:1"}, "sources books, code -> books, code, wiki"),
        (text, "sources books, code -> a single folder"),
    ):
        expected = re.escape(message) + ".*give --new-stage to start another stage"
        with pytest.raises(ranks.RankError, match=expected):
            train(mixed, resume="auto", data=data)
    step = str(tmp_path / "run/step_00000002")
    stage = {"resume": step, "new_stage": True, "output": str(tmp_path / "stage")}
    assert train(mixed, **stage, data=data, steps=1, val_data=None)
    assert records(tmp_path / "stage", "samples") == {1: 4}
    # equal shares are the same mixture
    same = {"books": f"{tmp_path}/short:0.25", "code": f"{text}:0.75"}
    assert train(mixed, resume="auto", data=same, steps=3, val_data=None)


def test_sources_that_do_not_fit_together_are_refused_by_name(mixed, tmp_path):
    def check(message, **options):
        with pytest.raises(ranks.RankError, match=message):
            train(mixed, **options)

    same = mixed["data"] | {"again": f"{tmp_path}/text/../text:1"}
    check(r"sources code \(.*\) and again .* the same text", data=same)
    edit_index(tmp_path / "short", bos_id=3)
    check("begin token 256 in source code, but begin token 3 in source books: give --bos")
    assert train(mixed, documents="ignore", steps=1)
    tokenizer = tmp_path / "short/tokenizer.spec.json"
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "identity": "0" * 64}))
    edit_index(tmp_path / "short", sha256={})
    check(
        rf"source books \({tmp_path}/short\) has another tokenizer than source code "
        rf"\({tmp_path}/text\): expected .*, got 000000000000",
        output=str(tmp_path / "another"),
    )


def test_ants_read_mixtures(tmp_path, alone):
    file = write_vocabulary(tmp_path / "vocabulary.txt", *"abcdefgh", model="cpm-ant")
    tokenizer = AntGreedyTokenizer(file)
    for name, text in (("one", "abc cab "), ("two", "fgh ")):
        lines = ({"text": text * (i + 2)} for i in range(9))
        write_instances(tmp_path / name, tokenizer, *lines)
    data = {name: f"{tmp_path}/{name}:1" for name in ("one", "two")}
    val_data = {name: f"{tmp_path}/{name}" for name in ("one", "two")}
    sizes = {"seq_len": 96, "batch_size": 2, "steps": 2, "output": str(tmp_path / "run")}
    assert train({"model": "cpm-ant-tiny", "data": data, "val_data": val_data, **sizes})
    step, *_, evaluation = read_records(tmp_path / "run")
    for record, name in ((step, "loss"), (evaluation, "val_loss")):
        low, high = sorted((record[f"{name}/one"], record[f"{name}/two"]))
        assert low < record[name] < high


@pytest.mark.slow
def test_mixtures_resume_on_other_ranks(mixed, tmp_path):
    """Go from one rank to two data parallel ranks. One has no row of a source. Losses are those of
    one rank up to rounding in fp32.
    """
    mixed |= {"val_data": None, "save_every": 3}
    assert train(mixed)
    expected = {name: records(tmp_path / "run", name) for name in NAMES}
    forget(tmp_path / "run", 6)
    (tmp_path / "run.json").write_text(json.dumps(mixed | {"resume": "auto"}))
    run = ["train/pretrain.py", "--config", tmp_path / "run.json", "--processes", 2]
    code, printed = run_script(2, *run)
    assert code == 0, printed
    assert "resumed after step 3" in printed
    for name in NAMES:
        assert records(tmp_path / "run", name) == pytest.approx(expected[name], rel=1e-5)
