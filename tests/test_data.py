"""Preparing text, reading it back, configuration and learning rates."""

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from bmt_burst import IGNORE_INDEX
from models.rope import Linear
from tests.helpers import ROOT
from tests.preparing import EOS, documents, prepare
from train.data.folder import Sequences, TokenFile
from train.data.tokenizer import load_tokenizer, open_tokenizer
from train.run.config import TrainConfig
from train.run.schedule import learning_rate
from train.run.stages import parse_run


def test_text_and_json_lines_become_documents(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes("höhö\nzwei\n".encode() + b"bad \xff line\nlast\n")
    rows = [
        '{"body": "one"}',
        "[" * 100_000,
        '{"body": "half \\ud83d"}',
        "not json",
        '{"body": 3}',
        '{"other": "x"}',
        "",
        '{"body": "two"}',
        '["body"]',
    ]
    (tmp_path / "in/b.jsonl").write_text("\n".join(rows))
    said = prepare(
        "--input", tmp_path / "in", "--output", tmp_path / "out", "--field", "body", "--max-bad", 1
    )
    expected = ["höhö\nzwei\nlast\n", "one", "two"]
    assert documents(tmp_path / "out/train") == [[*text.encode(), EOS] for text in expected]
    index = TokenFile(tmp_path / "out/train").index
    assert index["bad_lines"] == 7
    assert [line.split(": ")[0].split(":")[-1] for line in index["first_bad_lines"]] == [
        *("3", "2", "3", "4", "5", "6", "9")
    ]
    assert "7 bad lines were skipped" in said
    assert "3 documents" in said


def test_files_stream_in_pieces_and_keep_every_token(tmp_path):
    text = "".join(f"line {i} of a file that is longer than one piece\n" for i in range(60_000))
    (tmp_path / "long.txt").write_text(text)
    prepare("--input", tmp_path / "long.txt", "--output", tmp_path / "out")
    assert bytes(TokenFile(tmp_path / "out/train").tokens[:-1].astype(np.uint8)).decode() == text


def test_validation_documents_are_chosen_by_name(tmp_path):
    (tmp_path / "in").mkdir()
    for i in range(200):
        (tmp_path / f"in/{i}.py").write_text(f"text {i}")
    arguments = ("--input", tmp_path / "in", "--glob", "*.py", "--val-fraction", 0.2)
    prepare(*arguments, "--output", tmp_path / "out")
    train, val = (documents(tmp_path / "out" / part) for part in ("train", "val"))
    assert len(train) + len(val) == 200
    assert 10 < len(val) < 80  # 40 on average, with a standard deviation of 6
    said = prepare(*arguments, "--output", tmp_path / "out", code=2)
    assert "exists; give --overwrite" in said
    prepare(*arguments, "--output", tmp_path / "out", "--overwrite")
    assert documents(tmp_path / "out/val") == val


def _write_corpus(folder: Path) -> None:
    """Write a folder of texts, and a file of records beside it."""
    (folder / "sub").mkdir(parents=True)
    for i in range(40):
        (folder / f"sub/{i}.txt").write_text(f"text {i}")
    lines = "".join(f'{{"text": "record {i}"}}\n' for i in range(40))
    (folder.parent / f"{folder.name}.jsonl").write_text(lines)


def _bytes_written(folder: Path) -> dict[str, bytes]:
    """Return the files of prepared data. "sources" in an index names the inputs as they were
    typed, and is left out.
    """
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for path in files:
        if path.name == "index.json":
            index = json.loads(files[path])
            assert index.pop("sources")
            files[path] = json.dumps(index).encode()
    return {path.relative_to(folder).as_posix(): content for path, content in files.items()}


def test_the_split_does_not_depend_on_where_the_corpus_is(tmp_path, monkeypatch):
    """Neither for a folder nor for a file that is itself an input."""
    monkeypatch.chdir(tmp_path)
    for folder in ("near", "far/away"):
        _write_corpus(tmp_path / folder / "corpus")
    written = []
    for folder in ("near", "./near", tmp_path / "near", "far/../near", "far/away"):
        output = tmp_path / f"out{len(written)}"
        inputs = (f"{folder}/corpus", f"{folder}/corpus.jsonl")
        prepare("--input", *inputs, "--val-fraction", 0.3, "--output", output)
        assert len(documents(output / "val")) > 10
        written.append(_bytes_written(output))
    assert all(each == written[0] for each in written)


def test_files_of_one_name_in_two_inputs_are_two_documents(tmp_path):
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(folder)
    inputs = [tmp_path / "a", tmp_path / "b", tmp_path / "c/x.txt"]
    prepare("--input", *inputs, "--output", tmp_path / "out")
    assert documents(tmp_path / "out/train") == [[97, EOS], [98, EOS], [99, EOS]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere"], "no such input: nowhere"),
        (["--input", "setup.py"], "neither .txt nor .jsonl"),
        (["--input", "tests", "--glob", "*.nothing"], "has no file that matches"),
        (
            ["--input", "tests", "--glob", "*.py", "--tokenizer", "x.bin"],
            "tokenizer must be 'bytes'",
        ),
        (["--input", "tests", "--glob", "*.py", "--val-fraction", "1"], "below 1"),
    ],
)
def test_wrong_preparations_are_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert message in prepare(*arguments, "--output", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


def test_only_its_own_output_is_replaced(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("text")
    arguments = ("--input", tmp_path / "corpus", "--output", tmp_path / "corpus", "--overwrite")
    assert "was not written by prepare_data.py" in prepare(*arguments, code=2)
    prepare("--input", tmp_path / "corpus", "--output", tmp_path / "out")
    (tmp_path / "out/b.txt").write_text("text")
    arguments = ("--input", tmp_path / "out/b.txt", "--output", tmp_path / "out", "--overwrite")
    assert "which would be replaced" in prepare(*arguments, code=2)
    assert (tmp_path / "corpus/a.txt").is_file()


def test_nothing_but_bad_lines_is_an_error(tmp_path):
    (tmp_path / "x.jsonl").write_text("no\nno\n")
    arguments = ("--input", tmp_path / "x.jsonl", "--output", tmp_path / "out")
    assert "2 of 2 lines are bad" in prepare(*arguments, code=2)
    said = prepare(*arguments, "--max-bad", 1, code=2)
    assert "got no tokens from 1 file: 2 of 2 lines are bad. The first: " in said
    assert "x.jsonl:1: not JSON" in said and "['" not in said
    assert not (tmp_path / "out").exists()


def test_tokenizers_from_local_files(tmp_path):
    from sentencepiece import SentencePieceTrainer
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    lines = ["the quick brown fox jumps over the lazy dog"] * 50
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"]))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "bpe.json"))
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    SentencePieceTrainer.train(
        input=str(tmp_path / "lines.txt"),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=31,
        minloglevel=2,
    )
    for name, text in (
        ("bpe.json", "the lazy fox"),
        ("sp.model", "the lazy fox"),
        ("bytes", "the lazy fox ü"),
    ):
        tokenizer = open_tokenizer(name if name == "bytes" else str(tmp_path / name))
        tokenizer.save(tmp_path / "saved" / name)
        again = load_tokenizer(tmp_path / "saved" / name)
        ids = list(again.encode(text))
        assert ids == list(tokenizer.encode(text))
        assert max(*ids, again.eos_id) < again.vocab_size
        assert "".join(again.decode([*ids, again.eos_id]).split("Ġ")).replace(
            " ", ""
        ) == text.replace(" ", "")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot read tokenizer"):
        open_tokenizer(str(tmp_path / "broken.json"))
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


def read(data: Sequences, indices) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of sequences: (len(indices), seq_len) each."""
    rows = [data.read(index) for index in indices]
    return torch.stack([row.tokens for row in rows]), torch.stack([row.labels for row in rows])


@pytest.fixture
def token_folder(tmp_path):
    """101 tokens 0, 1, 2, ..."""
    (tmp_path / "x.txt").write_bytes(bytes(range(100)))
    prepare("--input", tmp_path / "x.txt", "--output", tmp_path / "out")
    return tmp_path / "out/train"


def test_every_token_is_a_target_once_an_epoch(token_folder):
    data = Sequences(TokenFile(token_folder), seq_len=16, seed=3)
    assert len(data) == 7
    tokens, labels = read(data, [data.order(sample) for sample in range(len(data))])
    valid = labels != IGNORE_INDEX
    assert sorted(labels[valid].tolist()) == [*range(1, 100), EOS]
    assert tokens[valid].sort().values.tolist() == list(range(100))
    epochs = [[data.order(s) for s in range(e * 7, e * 7 + 7)] for e in range(3)]
    assert [sorted(e) for e in epochs] == [list(range(7))] * 3
    assert epochs[0] != epochs[1]
    assert (data.read(None).labels == IGNORE_INDEX).all()


def test_half_written_folders_are_refused(token_folder):
    with open(token_folder / "tokens.bin", "r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match="has 100 bytes, but its index says 202"):
        TokenFile(token_folder)
    (token_folder / "index.json").unlink()
    with pytest.raises(ValueError, match="it is not a folder that prepare_data"):
        TokenFile(token_folder)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "tokenizer.spec.json"])
def test_changed_files_are_named(name, token_folder):
    content = bytearray((token_folder / name).read_bytes())
    content[-2] ^= 1
    (token_folder / name).write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"{name} was changed: its sha256 is \w+, index.json says \w+"
    ):
        TokenFile(token_folder)
    (token_folder / name).unlink()
    with pytest.raises(ValueError, match=f"has no {name}"):
        TokenFile(token_folder)


def test_large_files_are_compared_by_samples_when_opened_and_whole_when_asked(
    tmp_path, monkeypatch
):
    (tmp_path / "x.txt").write_text("0123456789" * 200_000)
    prepare("--input", tmp_path / "x.txt", "--output", tmp_path / "out")
    monkeypatch.setattr("train.data.token_file._CHEAP", 1000)
    file = tmp_path / "out/train/tokens.bin"
    content = bytearray(file.read_bytes())
    content[100_000] ^= 1  # between the first sample and the second
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokens.bin was changed: its sha256"):
        TokenFile(tmp_path / "out/train").verify()
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokens.bin was changed: its tokens differ"):
        TokenFile(tmp_path / "out/train")


def test_folders_of_older_versions_open_and_say_what_is_not_checked(token_folder, capsys):
    index = json.loads((token_folder / "index.json").read_text())
    digest = TokenFile(token_folder).digest
    assert index.pop("digest") == digest
    del index["sha256"]
    (token_folder / "index.json").write_text(json.dumps(index))
    assert TokenFile(token_folder).digest == digest
    assert (
        "older index.json without sha256, so file contents are not checked"
        in capsys.readouterr().err
    )


def truncated(file):
    with open(file, "r+b") as opened:
        opened.truncate(100)


def rewritten(file):
    content = file.read_bytes()
    file.write_bytes(content[::-1])
    os.utime(file, (0, 0))  # another time, however coarse the file system's clock is


def replaced(file):
    content = file.read_bytes()
    file.rename(file.with_name("old"))
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (truncated, "changed, truncated or .*: it had 202 bytes, and now has 100"),
        (rewritten, "changed, truncated or replaced since it was opened"),
        (replaced, "changed, truncated or replaced since it was opened"),
        (os.unlink, "cannot be read at byte .*No such file"),
    ],
)
def test_files_that_change_under_a_run_are_named(change, message, token_folder):
    data = Sequences(TokenFile(token_folder), seq_len=16, seed=3)
    read(data, [0, 6])
    change(token_folder / "tokens.bin")
    for index in (0, 6):
        with pytest.raises(ValueError, match=f"tokens.bin .*{message}"):
            data.read(index)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "index.json"])
def test_a_folder_may_be_a_link_but_its_files_may_not_lead_out(name, token_folder, tmp_path):
    (tmp_path / "link").symlink_to(token_folder)
    assert len(TokenFile(tmp_path / "link").tokens) == 101
    (token_folder / name).rename(token_folder / "real")
    (token_folder / name).symlink_to("real")
    assert len(TokenFile(token_folder).tokens) == 101
    (token_folder / "real").rename(tmp_path / "real")
    (token_folder / name).unlink()
    (token_folder / name).symlink_to(tmp_path / "real")
    with pytest.raises(ValueError, match=rf"{name} leads out of its folder, to .*/real"):
        TokenFile(token_folder)


def test_an_index_that_names_files_elsewhere_is_refused(token_folder):
    index = json.loads((token_folder / "index.json").read_text())
    for name in ("../x.txt", "/etc/passwd", "..", ""):
        index["sha256"] = {name: "0"}
        (token_folder / "index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="expected the name of a file in this folder"):
            TokenFile(token_folder)


@pytest.mark.parametrize(
    ("seq_len", "padding"), [(100, 0), (99, 98 / 198), (512, 412 / 512), (1, 0), (16, 12 / 112)]
)
def test_the_share_of_positions_without_target_is_known(seq_len, padding, token_folder):
    data = Sequences(TokenFile(token_folder), seq_len=seq_len, seed=3)
    assert data.padding == pytest.approx(padding)
    labels = read(data, range(len(data)))[1]
    assert float((labels == IGNORE_INDEX).float().mean()) == pytest.approx(padding)


def test_configuration_comes_from_defaults_file_and_command_line(tmp_path):
    (tmp_path / "run.toml").write_text(
        'seq_len = 64\nlr = 1\nval_data = "v"\ndeterministic = true\n[rope_scaling]\nkind = '
        '"linear"\nfactor = 2\n'
    )
    config, _ = parse_run(
        ["--config", str(tmp_path / "run.toml"), "--seq-len", "128", "--no-deterministic"]
    )
    assert (config.seq_len, config.lr, config.val_data, config.deterministic) == (
        128,
        1.0,
        "v",
        False,
    )
    assert config.model_config().rope_scaling == Linear(2)
    again, _ = parse_run(["--rope-scaling", '{"kind": "linear", "factor": 2}'])
    assert again.model_config() == config.model_config()
    (tmp_path / "run.json").write_text(json.dumps(config.to_dict()))
    assert parse_run(["--config", str(tmp_path / "run.json")]) == (config, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq-len", "0"], "--seq-len must be at least 1, got 0"),
        (["--schedule", "sgd"], "invalid choice: 'sgd'"),
        (["--lr", "-1"], "--lr must be positive"),
        (["--lr", "inf"], "--lr must be finite, got inf"),
        (["--weight-decay", "nan"], "--weight-decay must be finite, got nan"),
        (["--beta1", "1.5"], "--beta1 must be at least 0 and below 1, got 1.5"),
        (["--timeout", "1e10"], "--timeout must be at most 1e+08 seconds"),
        (["--config", "CUT"], "cut.json: Expecting"),
        (
            ["--steps", "10", "--warmup-steps", "6", "--decay-steps", "6"],
            "--warmup-steps 6 and --decay-steps 6 are",
        ),
        (["--config", "missing.toml"], "No such file"),
        (["--config", "BAD"], "unknown option 'sequence'"),
        (["--min-lr-ratio", "0"], "--min-lr-ratio must be above 0 for --schedule wsd"),
        (["--min-lr-ratio", "-0.1", "--schedule", "cosine"], "--min-lr-ratio must be at least 0"),
        (["--min-lr-ratio", "nan"], "--min-lr-ratio must be finite, got nan"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--stepz", "1"], "unrecognized arguments: --stepz 1"),
        (["--seed", "9" * 20], "--seed must be below 2^63"),
        (["--data", ""], "--data must not be empty"),
        (
            ["--checkpointing-blocks", "3"],
            "--checkpointing-blocks needs --checkpointing selective or full",
        ),
        (["--seed", "-1"], "--seed must not be negative"),
        (["--eval-sequences", "0"], "--eval-sequences must be at least 1"),
        (
            ["--rope-scaling", "yarn"],
            "argument --rope-scaling: 'yarn' is not JSON: Expecting value",
        ),
        (
            ["--rope-scaling", "[1]"],
            "argument --rope-scaling: expected names and values in braces, got '[1]'",
        ),
        (["--warmup-steps", "-1"], "--warmup-steps must not be negative, got -1"),
        (["--log-every", "0"], "--log-every must be at least 1, got 0"),
        (
            ["--checkpointing", "full", "--checkpointing-blocks", "-1"],
            "--checkpointing-blocks must not be negative",
        ),
        (["--offload"], "--offload needs --checkpointing selective or full"),
        (
            ["--sp-size", "2", "--seq-len", "1"],
            "--seq-len 1 is too short for 2 ranks; the smallest is 2",
        ),
        (["--strategy", "rings"], "argument --strategy: invalid choice: 'rings'"),
        (["--sp-size", "4", "--inner-size", "3"], "--inner-size 3 does not divide --sp-size 4"),
        (["--sp-size", "4", "--ulysses-size", "0"], "--ulysses-size must be at least 1, got 0"),
        (["--sp-size", "4", "--ulysses-size", "3"], "--ulysses-size 3 does not divide --sp-size 4"),
        (
            ["--ulysses-size", "1", "--inner-size", "1"],
            "--inner-size and --ulysses-size both say which ranks",
        ),
        (
            ["--strategy", "ring", "--ulysses-size", "1"],
            "--ulysses-size is for --strategy usp, got --strategy ring",
        ),
        (
            ["--strategy", "ulysses", "--sp-size", "4", "--inner-size", "2"],
            "--strategy ulysses takes all ranks as one",
        ),
        (
            [
                "--strategy",
                "usp",
                "--ulysses-size",
                "2",
                "--sp-size",
                "4",
                "--layout",
                "striped",
                "--seq-len",
                "32768",
            ],
            "--strategy usp with --layout striped, --seq-len 32768 and --sp-size 4: expected at",
        ),
        (
            ["--strategy", "plain-ring", "--sp-size", "4", "--inner-size", "2"],
            "--strategy plain-ring, --seq-len 512 and --sp-size 4: expected a single group",
        ),
        (
            ["--rope-scaling", '{"kind": "linear"}'],
            "--rope-scaling: linear takes factor: missing ['factor']",
        ),
    ],
)
def test_wrong_configurations_are_refused(arguments, message, tmp_path, capsys):
    files = {"BAD": "bad.toml", "CUT": "cut.json"}
    (tmp_path / "bad.toml").write_text("sequence = 3\n")
    (tmp_path / "cut.json").write_text('{"lr": ')
    with pytest.raises(SystemExit) as stopped:
        parse_run([str(tmp_path / files.get(a, a)) if a in files else a for a in arguments])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("pretrain.py: ")
    assert message in said
    assert said.count("\n") == 1


def test_options_that_spoil_a_model_are_named():
    config = TrainConfig(
        rope_theta=0.5, rope_scaling={"kind": "yarn", "factor": 4.0, "original_length": 64}
    )
    with pytest.raises(
        ValueError,
        match=r"--rope-theta, --rope-scaling with the default model, cpm-tiny: .* 1, got 0\.5",
    ):
        config.model_config()


def test_a_model_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"deep\.json: .*recursion"):
        TrainConfig(model=str(tmp_path / "deep.json")).model_config()


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        parse_run(["--help"])
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in TrainConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("schedule", "middle"), [("wsd", 1.0), ("cosine", 0.01 + 0.99 * 0.5), ("linear", 1 - 0.99 / 2)]
)
def test_learning_rates(schedule, middle):
    config = TrainConfig(
        steps=110, warmup_steps=10, decay_steps=20, lr=2.0, schedule=schedule, min_lr_ratio=0.01
    )
    rates = [learning_rate(step, config) / 2.0 for step in range(1, 111)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[59] == pytest.approx(middle)
    assert rates[109] == pytest.approx(0.01)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    if schedule == "wsd":
        assert rates[89] == 1.0
        assert rates[99] == pytest.approx(0.1)  # half way down an exponential


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_learning_rates_may_end_at_nothing(schedule):
    config = TrainConfig(steps=20, lr=2.0, schedule=schedule, min_lr_ratio=0.0)
    rates = [learning_rate(step, config) for step in range(1, 21)]
    assert rates[-1] == 0
    assert all(rate > 0 for rate in rates[:-1])


def test_model_from_a_file(tmp_path):
    from models.config import PRESETS

    (tmp_path / "m.json").write_text(json.dumps(PRESETS["cpm-tiny"].to_dict()))
    assert TrainConfig(model=str(tmp_path / "m.json")).model_config() == PRESETS["cpm-tiny"]
    (tmp_path / "m.json").write_text('{"vocab_size": 3, "depth": 4}')
    with pytest.raises(ValueError, match=r"missing \['hidden_size', .* unknown \['depth'\]"):
        TrainConfig(model=str(tmp_path / "m.json")).model_config()
    with pytest.raises(ValueError, match="neither a preset"):
        TrainConfig(model="cpm-huge").model_config()


@pytest.mark.parametrize(
    ("tokens", "seq_len", "padding"), [(11, 512, 1 - 10 / 512), (1025, 512, 0), (601, 400, 0.25)]
)
def test_padding_is_what_has_no_target(tmp_path, tokens, seq_len, padding):
    (tmp_path / "a.txt").write_text("x" * (tokens - 1))
    prepare("--input", tmp_path / "a.txt", "--output", tmp_path / "out")
    sequences = Sequences(TokenFile(tmp_path / "out/train"), seq_len, 0)
    assert sequences.padding == pytest.approx(padding)
    labels = read(sequences, range(len(sequences)))[1]
    assert float((labels == IGNORE_INDEX).double().mean()) == pytest.approx(padding)
