"""Preparing text and reading it back."""

import json
import os
from pathlib import Path

import pytest
import torch

from bmt_burst import IGNORE_INDEX
from tests.launcher import ROOT
from tests.preparing import EOS, documents, edit_index, jsonl, prepare, texts
from train.data.folder import Sequences, TokenFile
from train.loop.inputs import check_length
from train.settings.config import TrainConfig


def test_text_and_json_lines_become_documents(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes("höhö\nzwei\n".encode() + b"bad \xff line\nlast\n")
    rows = ['{"body": "one"}', "[" * 100_000, '{"body": "half \\ud83d"}', "not json", '{"body": 3}']
    rows += ['{"other": "x"}', "", '{"body": "two"}', '["body"]']
    (tmp_path / "in/b.jsonl").write_text("\n".join(rows))
    out = ("--output", tmp_path / "out", "--field", "body", "--max-bad", 1)
    printed = prepare("--input", tmp_path / "in", *out)
    assert texts(tmp_path / "out/train") == ["höhö\nzwei\nlast\n", "one", "two"]
    assert all(ids[-1] == EOS for ids in documents(tmp_path / "out/train"))
    index = TokenFile(tmp_path / "out/train").index
    assert index["bad_lines"] == 7
    lines = [line.split(": ")[0].split(":")[-1] for line in index["first_bad_lines"]]
    assert lines == ["3", "2", "3", "4", "5", "6", "9"]
    assert "7 bad lines were skipped" in printed
    assert "3 documents" in printed


def _bytes_written(folder: Path) -> dict[str, bytes]:
    """Return the files of prepared data, without the inputs as they were typed."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for path in folder.rglob("index.json"):
        index = json.loads(files[path])
        assert index.pop("sources")
        files[path] = json.dumps(index).encode()
    return {path.relative_to(folder).as_posix(): content for path, content in files.items()}


def test_the_split_does_not_depend_on_where_the_corpus_is(tmp_path, monkeypatch):
    """Neither for a folder nor for a file that is itself an input."""
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "near", tmp_path / "far/away"):
        (folder / "corpus/sub").mkdir(parents=True)
        for i in range(40):
            (folder / f"corpus/sub/{i}.txt").write_text(f"text {i}")
        (folder / "corpus.jsonl").write_bytes(jsonl(*(f"record {i}" for i in range(40))))
    written = []
    for folder in ("near", tmp_path / "near", "far/../near", "far/away"):
        output = tmp_path / f"out{len(written)}"
        inputs = (f"{folder}/corpus", f"{folder}/corpus.jsonl")
        prepare("--input", *inputs, "--val-fraction", 0.3, "--output", output)
        assert 10 < len(documents(output / "val")) < 40  # 24 on average, with a deviation of 4
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
        (["nowhere"], "no such input: nowhere"),
        (["setup.py"], "neither .txt nor .jsonl"),
        (["tests", "--glob", "*.nothing"], "has no file that matches"),
        (["tests", "--glob", "*.py", "--tokenizer", "x.bin"], "tokenizer must be 'bytes'"),
        ([""], '--input must not be ""; the current folder is .'),
        (["setup.py", "--output", ""], "--output must not be empty"),
        (["setup.py", "--val-fraction", "1"], "--val-fraction must be at least 0 and below 1"),
        (["setup.py", "--max-bad", 1.5], "--max-bad must be at least 0 and at most 1, got 1.5"),
        (
            ["setup.py", "--format", "text", "--eos", "</s>"],
            "--eos is for a .json or .model file, got '</s>' for bytes",
        ),
        (
            ["setup.py", "--workers", "many"],
            "argument --workers: invalid int value: 'many'; see prepare_data.py --help\n",
        ),
    ],
)
def test_wrong_preparations_are_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    printed = prepare("--output", tmp_path / "out", "--input", *arguments, code=2)
    assert printed.startswith("prepare_data.py: ") and message in printed
    assert not list(tmp_path.iterdir())


def test_only_its_own_output_is_replaced(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("text")
    arguments = ("--input", tmp_path / "corpus", "--overwrite", "--output")
    printed = prepare(*arguments, tmp_path / "corpus", code=2)
    assert "was not written by prepare_data.py" in printed
    prepare(*arguments, tmp_path / "out")
    without = ("--input", tmp_path / "corpus", "--output", tmp_path / "out")
    assert "exists; give --overwrite" in prepare(*without, code=2)
    (tmp_path / "link").symlink_to("out")
    printed = prepare(*arguments, tmp_path / "link", code=2)
    assert "link is a link, which is not replaced" in printed
    (tmp_path / "out/b.txt").write_text("text")
    printed = prepare(*arguments, tmp_path / "out", "--input", tmp_path / "out/b.txt", code=2)
    assert "which would be replaced" in printed
    printed = prepare(*arguments, tmp_path / "out", code=2)
    assert "holds files that prepare_data.py did not write" in printed
    assert (tmp_path / "corpus/a.txt").is_file() and (tmp_path / "out/b.txt").exists()


def read(data: Sequences, indices) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of sequences: (len(indices), seq_len) each."""
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


def test_a_text_of_less_than_half_a_sequence_is_refused(token_folder):
    data = Sequences(TokenFile(token_folder), 202, 0)
    check_length(TrainConfig(seq_len=202), data)
    with pytest.raises(ValueError, match="has 101 tokens, less than half of a sequence of 203"):
        check_length(TrainConfig(seq_len=203), data)


def test_half_written_folders_and_those_that_name_files_elsewhere_are_refused(token_folder):
    hashes = TokenFile(token_folder).index["sha256"]
    for name in ("../x.txt", "/etc/passwd", "..", ""):
        edit_index(token_folder, sha256={name: "0"})
        with pytest.raises(ValueError, match="expected the name of a file in this folder"):
            TokenFile(token_folder)
    edit_index(token_folder, sha256=hashes)
    os.truncate(token_folder / "tokens.bin", 100)
    with pytest.raises(ValueError, match="has 100 bytes, but its index has 202"):
        TokenFile(token_folder)
    (token_folder / "index.json").unlink()
    with pytest.raises(ValueError, match="it is not a folder that prepare_data"):
        TokenFile(token_folder)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "tokenizer.spec.json"])
def test_changed_files_are_named(name, token_folder):
    content = bytearray((token_folder / name).read_bytes())
    content[-2] ^= 1
    (token_folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} was changed: its sha256 is \w+, expected \w+"):
        TokenFile(token_folder)
    (token_folder / name).unlink()
    with pytest.raises(ValueError, match=f"has no {name}"):
        TokenFile(token_folder)


def test_large_files_are_compared_by_samples(token_folder, monkeypatch):
    monkeypatch.setattr("train.data.token_file._CHEAP", 100)
    file = token_folder / "tokens.bin"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokens.bin was changed: its tokens differ"):
        TokenFile(token_folder)


def test_folders_of_older_versions_are_refused(token_folder):
    index = TokenFile(token_folder).index
    for name in ("digest", "sha256", "eos_id", "documents"):
        edit_index(token_folder, **{**index, name: None})
        with pytest.raises(ValueError, match=f"has no {name}, .*: prepare the data again"):
            TokenFile(token_folder)


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
        (lambda file: os.truncate(file, 100), "truncated or .*: it had 202 bytes, and now has 100"),
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
