"""Preparing data: inputs, both parts, several processes, runs that are stopped."""

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.launcher import ROOT, children, wait_until_ended
from tests.preparing import EOS, documents, jsonl, prepare, texts
from tests.test_tokenizer import byte_level, words_file  # noqa: F401 - a fixture
from train import prepare_data
from train.data.folder import TokenFile
from train.data.tokenizer import load_tokenizer

PACKED = gzip.compress(b"a", mtime=0)  # tests of all workers must have the same names


def test_the_number_of_processes_does_not_change_a_byte(byte_level, tmp_path):  # noqa: F811
    (tmp_path / "in").mkdir()
    lines = "".join(
        f"line {i} of a document that is longer than a piece </s>\n" for i in range(10_000)
    )
    (tmp_path / "in/a.txt").write_bytes(lines.encode() + b"bad \xff\n" + lines.encode())
    (tmp_path / "in/b.jsonl").write_bytes(jsonl(*(f"text {i}" for i in range(500))) + b"bad\n")
    (tmp_path / "in/c.jsonl.gz").write_bytes(gzip.compress(jsonl("packed", "", "twice")))
    (tmp_path / "in/d.txt").write_text("short")
    written = []
    for workers in (1, 3):
        output = tmp_path / str(workers)
        arguments = ("--tokenizer", byte_level, "--val-fraction", 0.3, "--workers", workers)
        printed = prepare("--input", tmp_path / "in", "--output", output, *arguments)
        assert "2 bad lines were skipped" in printed
        files = sorted(path for path in output.rglob("*") if path.is_file())
        written.append({path.relative_to(output): path.read_bytes() for path in files})
    assert written[0] == written[1]
    tokenizer = load_tokenizer(tmp_path / "1/val")
    both = documents(tmp_path / "1/train") + documents(tmp_path / "1/val")
    expected = [lines + lines, *(f"text {i}" for i in range(500)), "packed", "twice", "short"]
    assert sorted(map(tokenizer.decode, both)) == sorted(expected)


def test_a_process_that_cannot_work_ends_the_run_with_the_files_name(tmp_path):
    """A special token of one character has no other spelling."""
    words = words_file(tmp_path, ["</s>", "a", "§", "[UNK]"], ["</s>", "§"])
    (tmp_path / "x.txt").write_text("a\n§ a\n")
    arguments = ("--input", tmp_path / "x.txt", "--output", tmp_path / "out", "--tokenizer")
    for workers in (1, 2):
        printed = prepare(*arguments, words, "--workers", workers, code=2)
        assert f"prepare_data.py: {tmp_path}/x.txt, lines 1 to 2: " in printed
        assert "only as special token §" in printed
        assert {path.name for path in tmp_path.iterdir()} == {"words.json", "x.txt"}


def test_other_files_of_a_folder_are_counted_and_reported(tmp_path):
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "sub/B.TXT").write_text("b")
    (folder / "c.JsonL").write_bytes(jsonl("c"))
    (folder / "d.txt.gz").write_bytes(gzip.compress(b"d1\n") + gzip.compress(b"d2\n"))
    (folder / "e.JSONL.GZ").write_bytes(gzip.compress(jsonl("e")))
    for name in ("f.md", "g", "h.gz", "i.xml"):
        (folder / name).write_text("other")
    (folder / "gone.txt").symlink_to("nothing")
    (folder / "myself.txt").symlink_to("myself.txt")
    (folder / "sub/loop").symlink_to("..")
    (folder / "empty.txt").touch()
    (folder / "again.txt").symlink_to("a.txt")
    os.link(folder / "c.JsonL", folder / "hard.jsonl")
    os.mkfifo(folder / "pipe.txt")
    (tmp_path / os.fsdecode(b"in/\xff.txt")).write_text("name")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "s.txt"))
    inputs = (folder, folder / "a.txt", folder / "sub/../a.txt", folder / "sub")
    printed = prepare("--input", *inputs, "--output", tmp_path / "out")
    assert texts(tmp_path / "out/train") == ["a", "c", "d1\nd2\n", "e", "b", "name"]
    expected = {
        "f.md": "(a file of another kind) and 3 more",
        "gone.txt": "(a link to nothing)",
        "sub/loop": "(a link to a folder) and 1 more",
        "myself.txt": "(a file that cannot be read: Too many levels of symbolic links)",
        "empty.txt": "(empty)",
        "again.txt": "(another name of a file that is read once) and 4 more",
        "pipe.txt": "(a pipe, socket or device) and 1 more",
    }
    lines = [f"{folder / name} {reason}" for name, reason in expected.items()]
    assert sorted(TokenFile(tmp_path / "out/train").index["not_read"]) == sorted(lines)
    assert all(f"not read: {line}\n" in printed for line in lines)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.gz", PACKED, "x.gz is neither .txt nor .jsonl or .json, compressed"),
        ("x.txt.gz", b"text", "1 broken shard, .*x.txt.gz: Not a gzipped file"),
        ("x.txt", b"", r"there is no text to read: .* \(empty\)"),
        ("x.txt", None, "no such input: .*x.txt, a link to nothing"),
        ("sub/x.md", b"text", r"has no file that matches .* \(a file of another kind\)"),
    ],
)
def test_inputs_without_text_are_refused(name, content, message, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("nowhere") if content is None else path.write_bytes(content)
    given = path if path.parent == tmp_path else path.parent
    printed = prepare("--input", given, "--output", tmp_path / "out", code=2)
    assert re.search(f"prepare_data.py: .*{message}.*\n", printed)
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("fraction", "names"), [(0.01, "a.txt"), (0.3, "a.txt b.txt"), (0.999, "a.jsonl")]
)
def test_both_parts_get_tokens_from_few_documents(fraction, names, tmp_path):
    given = {name: "".join(f"{name} line {i}\n" for i in range(100)) for name in names.split()}
    for name, text in given.items():
        content = jsonl(text) if name.endswith("jsonl") else text.encode()
        (tmp_path / name).write_bytes(content)
    inputs = [tmp_path / name for name in given]
    prepare("--input", *inputs, "--output", tmp_path / "out", "--val-fraction", fraction)
    train, val = (texts(tmp_path / "out" / part) for part in ("train", "val"))
    assert train and val
    for part in ("train", "val"):  # documents end with eos, whole or not
        read = documents(tmp_path / "out" / part)
        assert all(ids[-1] == EOS and len(ids) > 1 for ids in read)
    both, whole = "".join(train + val), "".join(given.values())
    if len(given) == 1:  # a document that was cut
        assert both == whole
        assert len("".join(val)) == pytest.approx(fraction * len(whole), abs=5)
    else:
        assert sorted(both) == sorted(whole)


def running(tmp_path, *arguments) -> subprocess.Popen:
    """Start a preparation. Its input does not end before the test does."""
    command = [sys.executable, ROOT / "train/prepare_data.py", "--output", tmp_path / "out"]
    command += map(str, arguments)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 600
    while not (tmp_path / ".out.partial/train/tokens.bin").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    return process


@pytest.fixture
def much(byte_level, tmp_path):  # noqa: F811
    """Arguments of a run that takes half a minute."""
    (tmp_path / "much.txt").write_text("some text, and more of it\n" * 2_000_000)
    return ("--input", tmp_path / "much.txt", "--tokenizer", byte_level)


def test_one_run_at_a_time_and_a_killed_one_is_replaced(much, tmp_path):
    (tmp_path / "x.txt").write_text("text")
    arguments = ("--input", tmp_path / "x.txt", "--output", tmp_path / "out")
    process = running(tmp_path, *much)
    in_use = f".out.partial is in use by process {process.pid} on "
    assert in_use in prepare(*arguments, code=2)
    assert (tmp_path / ".out.partial/train/tokens.bin").exists()
    process.kill()
    process.communicate()
    assert (tmp_path / ".out.partial").is_dir()
    prepare(*arguments)
    assert texts(tmp_path / "out/train") == ["text"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"train"}
    assert not (tmp_path / ".out.partial").exists()


def test_an_interrupted_run_leaves_one_line_and_nothing_else(much, tmp_path):
    process = running(tmp_path, *much, "--workers", 2)
    deadline = time.monotonic() + 600
    while len(started := children(process.pid)) < 3:  # two workers, and multiprocessing's own
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for one in (process.pid, *started):  # as a terminal does: all processes get it
        os.kill(one, signal.SIGINT)
    printed = process.communicate(timeout=600)[1]
    assert process.returncode == 130
    assert printed.splitlines()[-1] == "prepare_data.py: interrupted, nothing was written"
    assert "Traceback" not in printed
    assert {path.name for path in tmp_path.iterdir()} == {"much.txt"}
    wait_until_ended(started)


DROPPED = """
import os, signal
from train import prepare_data

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            pass

def read(path, field, pieces=prepare_data.read_pieces):
    for piece in pieces(path, field):
        Dropped()
        yield piece

prepare_data.read_pieces = read
prepare_data.main()
"""


def test_an_interrupt_that_python_ignores_in_a_callback_ends_the_run(tmp_path):
    (tmp_path / "x.txt").write_text("text")
    command = [sys.executable, "-c", DROPPED, "--input", "x.txt", "--output", "out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 130
    assert "interrupted, nothing was written" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"x.txt"}


def test_an_interrupt_when_all_is_written_ends_nothing(tmp_path, monkeypatch):
    remove = prepare_data._remove_old

    def removed(output, interrupts):
        remove(output, interrupts)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(prepare_data, "_remove_old", removed)
    (tmp_path / "x.txt").write_text("text")
    prepare("--input", tmp_path / "x.txt", "--output", tmp_path / "out")
    assert texts(tmp_path / "out/train") == ["text"]


@pytest.mark.parametrize(
    ("codec", "ending"), [("utf-16", ".jsonl"), ("utf-16-be", ".txt"), ("gbk", ".jsonl")]
)
def test_text_of_another_encoding_is_refused(codec, ending, tmp_path):
    """Zeros are valid UTF-8, so lines of UTF-16 may be. json.loads reads UTF-16, a byte late."""
    word = {"gbk": "环注意力"}.get(codec, "ring")
    lines = [f"{word} number {i}" for i in range(51)]
    if ending == ".jsonl":
        lines = [json.dumps({"text": line}, ensure_ascii=False) for line in lines]
    (tmp_path / f"x{ending}").write_bytes("".join(f"{line}\n" for line in lines).encode(codec))
    printed = prepare("--input", tmp_path, "--output", tmp_path / "out", code=2)
    bad = r"5[12] of 5[12] lines are bad, more than --max-bad 0\.01 of them.*: not UTF-8: "
    assert re.search(bad, printed)
    assert not (tmp_path / "out").exists()


def test_more_bad_lines_than_allowed_write_nothing(tmp_path):
    """Empty lines do not count. Records without the field do."""
    (tmp_path / "x.jsonl").write_bytes(jsonl(*map(str, range(98))) + b"{}\n" * 2 + b"\n" * 300)
    arguments = ("--input", tmp_path / "x.jsonl", "--output", tmp_path / "out")
    printed = prepare(*arguments, code=2)
    reason = "no text in field 'text'"
    assert "2 of 100 lines are bad, more than --max-bad 0.01 of them. The first: " in printed
    assert f"x.jsonl:99: {reason}; " in printed
    assert not (tmp_path / "out").exists()
    assert "2 bad lines were skipped" in prepare(*arguments, "--max-bad", 0.02)
    (tmp_path / "x.jsonl").write_bytes(jsonl("good") + b"{}\n")
    printed = prepare(*arguments, "--max-bad", 0, "--overwrite", code=2)
    assert "1 of 2 lines is bad, more than --max-bad 0 of" in printed
    (tmp_path / "x.jsonl").write_bytes(b"no\nno\n")
    printed = prepare(*arguments, "--max-bad", 1, "--overwrite", code=2)
    assert "got no tokens from 1 file: 2 of 2 lines are bad. The first: " in printed
    (tmp_path / "x.jsonl").write_bytes(jsonl(""))
    (tmp_path / "a.txt").write_text("a")
    arguments = ("--input", tmp_path / "a.txt", "--output", tmp_path / "two", "--val-fraction", 0.5)
    assert "2 tokens cannot be divided" in prepare(*arguments, code=2)


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Also where files were joined to one with a record a line."""
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + b"one\n" + mark + b"two\n")
    (tmp_path / "b.jsonl").write_bytes(mark + jsonl("three") + mark + jsonl("four"))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(mark + b"five"))
    (tmp_path / "d.txt").write_bytes(mark)
    prepare("--input", tmp_path, "--output", tmp_path / "out")
    assert texts(tmp_path / "out/train") == ["one\n\ufefftwo\n", "three", "four", "five"]


def test_the_end_of_text_may_be_any_token(byte_level, tmp_path):  # noqa: F811
    """One that is in no list, and one that is not special; text that spells it stays text."""
    (tmp_path / "x.txt").write_text("a <tool> b")
    arguments = ("--input", tmp_path / "x.txt", "--tokenizer", byte_level, "--workers", 2)
    printed = prepare(*arguments, "--eos", "<tool>", "--output", tmp_path / "out")
    assert "documents end with '<tool>'\n" in printed
    [ids] = documents(tmp_path / "out/train")
    tokenizer = load_tokenizer(tmp_path / "out/train")
    assert ids.index(tokenizer.eos_id) == len(ids) - 1
    assert tokenizer.decode(ids) == "a <tool> b"
    assert tokenizer.eos_id == TokenFile(tmp_path / "out/train").index["eos_id"] != 0
    printed = prepare(*arguments, "--eos", "<end>", "--output", tmp_path / "other", code=2)
    assert f"cannot read tokenizer {byte_level}: it has no end-of-text token '<end>'" in printed
