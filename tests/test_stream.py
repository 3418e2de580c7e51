"""Streams: rows that are read and tokenized while a run trains, and where they continue."""

import gzip
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow import parquet

from bmt_burst import IGNORE_INDEX
from tests.preparing import jsonl, prepare
from tests.runs import records, train
from tests.test_inputs import save_to_disk, table
from tests.test_model import SMALL
from train.base import ranks
from train.checkpoints.checkpoint import Checkpoint
from train.data import remote, text
from train.data.folder import Row, TokenFile
from train.data.stream import Stream
from train.data.stream_files import StreamFiles, is_stream
from train.data.tokenizer import ByteTokenizer

EOS, BOS, S = ByteTokenizer.eos_id, 65, 60
FILES = 9  # they make two lanes
TEXTS = [[f"<{i}.{j}" + "x" * (i * j % 40) for j in range(20 + i)] for i in range(FILES)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A stream of shards of all kinds that reads a few documents at a time."""
    monkeypatch.setattr(text, "_PIECE", 150)
    inputs = tmp_path / "in"
    inputs.mkdir()
    for i, texts in enumerate(TEXTS[:4]):
        (inputs / f"{i}.jsonl.gz").write_bytes(gzip.compress(jsonl(*texts)))
    for i, texts in enumerate(TEXTS[4:7], 4):
        parquet.write_table(table(*texts), inputs / f"{i}.parquet", row_group_size=7)
    save_to_disk(inputs / "arrow", *TEXTS[7:])
    make_stream(tmp_path)
    return tmp_path / "out/train"


def make_stream(folder, *arguments, code=0) -> str:
    return prepare(
        *("--stream", "--input", folder / "in", "--output", folder / "out"),
        *("--shuffle-tokens", 600, "--overwrite", *arguments),
        code=code,
    )


def opened(folder, batch_size=8, seed=0, documents=True, bos=BOS, seq_len=S) -> Stream:
    sizes = SimpleNamespace(seq_len=seq_len, batch_size=batch_size, seed=seed)
    stream = Stream(folder, StreamFiles.open(folder), sizes, announces=True)
    return stream.keep_documents_apart(documents, bos)


def plain(row: Row) -> tuple:
    return row.tokens.tolist(), row.labels.tolist(), row.documents


def take(stream: Stream, samples) -> list[tuple]:
    return [plain(stream.of_sample(sample)) for sample in samples]


def read_documents(rows, bos=BOS) -> list[str]:
    """Return the whole documents of consecutive rows of a lane."""
    tokens = [token for tokens, _, _ in rows for token in tokens]
    parts = bytes(10 if token == EOS else token for token in tokens).decode().split("\n")
    assert all(part.startswith(chr(bos)) for part in parts)
    return [part[1:] for part in parts[:-1]]


def of_lane(rows: list, lane: int) -> list:
    """Return the rows of one of two lanes."""
    return [row for sample, row in enumerate(rows) if sample % 8 // 4 == lane]


def test_each_document_is_read_once_an_epoch_in_another_order(folder, capsys):
    stream = opened(folder)
    assert stream.num_lanes == 2
    rows = take(stream, range(800))
    for lane in range(2):
        read = read_documents(of_lane(rows, lane))
        names = [file.path.name for file, _ in StreamFiles.open(folder).files][lane::2]
        numbers = [7 + int(x[5:10]) if "arrow" in x else int(x.split(".")[0]) for x in names]
        expected = sorted(x for number in numbers for x in TEXTS[number])
        epochs = [read[i : i + len(expected)] for i in range(0, len(read), len(expected))]
        assert len(epochs) > 3
        assert all(sorted(epoch) == expected for epoch in epochs[:-1])
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
        assert epochs[0] != expected
    printed = capsys.readouterr().err.splitlines()
    assert sorted(printed) == [f"{folder}: lane {i} starts over, in a new order" for i in range(2)]


@pytest.mark.parametrize("documents", [True, False])
def test_targets_are_the_next_tokens_of_a_document(folder, documents):
    rows = take(opened(folder, documents=documents, bos=BOS if documents else None), range(40))
    for lane in range(2):
        mine = of_lane(rows, lane)
        tokens = [token for row in mine for token in row[0]]
        labels = [label for row in mine for label in row[1]]
        ends = [documents and token == EOS for token in tokens[:-1]]
        expected = [IGNORE_INDEX if end else x for end, x in zip(ends, tokens[1:], strict=True)]
        assert labels[:-1] == expected
        for row_tokens, _, bounds in mine:
            starts = [i + 1 for i, x in enumerate(row_tokens[:-1]) if documents and x == EOS]
            assert bounds == (0, *starts, S)


@pytest.mark.parametrize("seq_len", [7, 2000])
def test_rows_do_not_depend_on_who_reads_the_others(folder, seq_len):
    """Any number of groups of ranks takes the same rows, also of a lane that several groups read.
    Samples may be left out.
    """
    whole = take(opened(folder, seq_len=seq_len), range(48))
    for groups in (2, 4, 8):
        share = 8 // groups
        for group in range(groups):
            stream = opened(folder, seq_len=seq_len)
            mine = [n for n in range(48) if n % 8 // share == group]
            assert take(stream, mine) == [whole[n] for n in mine]
            assert len(stream._lanes) == 1
    third = [*range(0, 48, 3)]
    assert take(opened(folder, seq_len=seq_len), third) == [whole[n] for n in third]


def states(monkeypatch, streams: list[Stream], samples: int) -> list[dict]:
    """Return the state that each rank's stream would get from all of them."""
    gathered: list = []
    monkeypatch.setattr(ranks, "gather", lambda value: gathered.append(value) or [value])
    for stream in streams:
        stream.state(samples)
    monkeypatch.setattr(ranks, "gather", lambda value: gathered)
    return [json.loads(json.dumps(stream.state(samples))) for stream in streams]


@pytest.mark.parametrize(
    ("seq_len", "before", "after"), [(7, 1, 1), (7, 2, 8), (2000, 8, 1), (2000, 4, 2)]
)
def test_a_resumed_run_has_the_same_rows(folder, monkeypatch, seq_len, before, after):
    whole = take(opened(folder, seq_len=seq_len), range(48))
    streams = [opened(folder, seq_len=seq_len) for _ in range(before)]
    for first, samples in ((0, 8), (8, 24), (24, 32)):  # it is saved several times
        for group, stream in enumerate(streams):
            take(stream, [n for n in range(first, samples) if n % 8 // (8 // before) == group])
        saved = states(monkeypatch, streams, samples)
        assert all(state == saved[0] for state in saved)
    for group in range(after):
        stream = opened(folder, seq_len=seq_len)
        stream.restore(saved[0])
        mine = [n for n in range(32, 48) if n % 8 // (8 // after) == group]
        assert take(stream, mine) == [whole[n] for n in mine]


def break_file(path) -> None:
    packed = path.read_bytes()
    path.write_bytes(packed[:-20])


def test_a_broken_shard_is_named_and_skipped(folder, monkeypatch, capsys):
    """A run that resumes skips it too, even if it was repaired meanwhile."""
    path = folder.parents[1] / "in/2.jsonl.gz"
    packed = path.read_bytes()
    break_file(path)
    make_stream(folder.parents[1], "--max-bad-shards", 1)
    stream = opened(folder)
    whole = take(stream, range(160))
    [state] = states(monkeypatch, [stream], 160)
    whole += take(stream, range(160, 400))
    printed = capsys.readouterr().err
    assert all(line.startswith(f"{folder}: ") for line in printed.splitlines())
    reason = "Compressed file ended before the end-of-stream marker was reached"
    assert printed.count(f"the rest of a broken shard is skipped: {path}: {reason}") == 1
    read = read_documents(of_lane(whole, 0)) + read_documents(of_lane(whole, 1))
    kept = [x for x in TEXTS[2] if x in read]
    assert kept == TEXTS[2][: len(kept)] and len(kept) < len(TEXTS[2])
    assert all(x in read for i in (0, 1, 3, 4, 5, 6, 7, 8) for x in TEXTS[i])
    assert [damage[1:] for damage in state["broken"]] == [[len(kept), reason]]
    path.write_bytes(packed)
    make_stream(folder.parents[1], "--max-bad-shards", 1)
    stream = opened(folder)
    stream.restore(state)
    assert take(stream, range(160, 400)) == whole[160:]


def test_too_many_broken_shards_end_the_run_with_their_names(folder, monkeypatch):
    paths = [folder.parents[1] / f"in/{i}.jsonl.gz" for i in (1, 2)]
    for path in paths:
        break_file(path)
    make_stream(folder.parents[1])
    with pytest.raises(ValueError, match=r"1 broken shard, more than --max-bad-shards 0: .*gz: Co"):
        take(opened(folder), range(400))
    make_stream(folder.parents[1], "--max-bad-shards", 1)
    with pytest.raises(ValueError, match="2 broken shards, more than --max-bad-shards 1: ") as told:
        take(opened(folder), range(400))
    assert all(str(path) in str(told.value) for path in paths)
    # each of two ranks knows of one
    streams = [opened(folder), opened(folder)]
    for lane, stream in enumerate(streams):
        take(stream, [n for n in range(400) if n % 8 // 4 == lane])
    with pytest.raises(ValueError, match="2 broken shards, more than --max-bad-shards 1: "):
        states(monkeypatch, streams, 400)


def test_bad_lines_are_skipped_up_to_a_share(folder, capsys):
    inputs = folder.parents[1] / "in"
    for path in (inputs / "a.jsonl", inputs / "b.jsonl"):
        path.write_bytes(b"{}\n" + jsonl("good", "too"))
    make_stream(folder.parents[1], "--max-bad", 0.3)
    rows = take(opened(folder), range(400))
    assert "good" in read_documents(of_lane(rows, 0))
    printed = capsys.readouterr().err
    for name in ("a.jsonl", "b.jsonl"):
        place = f"{inputs / name}:1: no text in field 'text'"
        assert f"{folder}: 1 bad line was skipped, the first: {place}" in printed
    make_stream(folder.parents[1], "--max-bad", 0)
    too_many = r"lines? .* bad, more than --max-bad 0 of them.*jsonl:1: "
    with pytest.raises(ValueError, match=too_many):
        take(opened(folder), range(400))


def test_an_epoch_without_text_ends_the_run(folder):
    inputs = folder.parents[1] / "in"
    for path in [path for path in inputs.rglob("*") if path.is_file()]:
        path.unlink()
    for i in range(3):
        (inputs / f"{i}.jsonl").write_bytes(jsonl(""))
    make_stream(folder.parents[1])
    with pytest.raises(ValueError, match=r"there is no text in .*0\.jsonl, .*2\.jsonl"):
        opened(folder).of_sample(0)


def test_files_that_changed_are_named(folder):
    path = folder.parents[1] / "in/1.jsonl.gz"
    for change in (break_file, Path.unlink):
        change(path)
        with pytest.raises(ValueError, match=r"1\.jsonl\.gz is missing or has changed since .*ag"):
            opened(folder)


def test_a_stream_is_only_for_training(folder):
    assert is_stream(str(folder)) and not is_stream(str(folder.parent))
    with pytest.raises(ValueError, match="is a stream, which only --data of pretrain"):
        TokenFile(folder)
    base = folder.parents[1]
    for option, value in (("--val-fraction", 0.1), ("--workers", 2)):
        assert f"{option} does not go with --stream" in make_stream(base, option, value, code=2)
    printed = make_stream(base, "--shuffle-tokens", "0K", code=2)
    assert "--shuffle-tokens must be at least 1, got 0" in printed
    given = ("--input", base / "in", "--output", base / "o", "--shuffle-tokens", 9)
    assert "--shuffle-tokens needs --stream" in prepare(*given, code=2)
    (base / "in/x.txt").write_text("text")
    printed = make_stream(base, code=2)
    assert "x.txt: a stream is read from .jsonl and .parquet files and datasets fol" in printed
    assert (folder / "index.json").exists()  # the earlier one


def test_a_stream_may_be_at_addresses(tmp_path, memory):
    """Any file system of fsspec works, such as this one in memory."""
    for i in range(4):
        memory.pipe(f"/corpus/{i}.jsonl.gz", gzip.compress(jsonl(*TEXTS[i])))
    with memory.open("/corpus/4.parquet", "wb") as file:
        parquet.write_table(table(*TEXTS[4]), file)
    out = ("--output", tmp_path / "out", "--stream", "--overwrite", "--input")
    printed = prepare(*out, "memory://corpus/*")
    assert "a stream of 5 files" in printed
    read = read_documents(take(opened(tmp_path / "out/train"), range(64)))
    assert {x for texts in TEXTS[:5] for x in texts} == {*read}
    assert "no file matches memory://x/*.zst" in prepare(*out, "memory://x/*.zst", code=2)
    assert ": 'memory://x/y.jsonl'\n" in prepare(*out, "memory://x/y.jsonl", code=2)
    assert "ftq://x/y.jsonl: " in prepare(*out, "ftq://x/y.jsonl", code=2)
    memory.rm("/corpus/4.parquet")
    with pytest.raises(ValueError, match=r"memory:///corpus/4\.parquet cannot be read: FileNo"):
        take(opened(tmp_path / "out/train"), range(64))


def test_a_run_on_a_stream_resumes_with_the_same_losses(folder, settings, tmp_path):
    """Alone, and in a mixture with a folder that ends several times. Other files are refused."""
    settings |= {"batch_size": 8, "micro_batch_size": 2, "lr": 1e-3}
    mixture = {"stream": f"{folder}:3", "stored": f"{settings['data']}:1"}
    for name, data in (("alone", str(folder)), ("mixed", mixture)):
        whole, parts = tmp_path / f"{name}-whole", tmp_path / f"{name}-parts"
        train(settings, data=data, output=str(whole), steps=4, save_every=2, keep_last=9)
        shutil.copytree(whole, parts)
        shutil.rmtree(parts / "step_00000004")
        train(settings, data=data, output=str(parts), steps=4, save_every=2, resume="auto")
        assert len(records(whole)) == 4
        assert records(parts) == records(whole)
        state = Checkpoint(parts / "step_00000004").state["reading"]
        if name == "alone":
            assert [lane["rows"] for lane in state["lanes"]] == [16, 16]
        else:
            assert sum(lane["rows"] for lane in state["stream"]["lanes"]) == 24
            assert len(records(whole, "loss/stream")) == 4
    (folder.parents[1] / "in/9.jsonl").write_bytes(jsonl("more"))
    make_stream(folder.parents[1])
    output = str(tmp_path / "alone-whole")
    with pytest.raises(ranks.RankError, match="was reading other data: digest"):
        train(settings, data=str(folder), steps=6, output=output, resume="auto")


def test_a_stream_needs_a_model_of_documents(folder, settings, tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(SMALL.to_dict() | {"vocab_size": 100}))
    data = {"data": str(folder)}
    bee, small = ({"model": x} for x in ("cpm-bee-tiny", str(tmp_path / "small.json")))
    for options, message in (
        ({"val_data": str(folder)}, "is a stream, which only --data of pretrain"),
        (data | bee, "is a stream of documents, but --model cpm-bee-tiny is a cpm-bee"),
        (data | small, "has a vocabulary of 257 tokens, but --model"),
    ):
        with pytest.raises(ranks.RankError, match=message):
            train(settings, **options)


class Flaky(io.BytesIO):
    """A file whose reads fail for a while."""

    failures = 0

    def read(self, size=-1):
        if Flaky.failures:
            Flaky.failures -= 1
            raise RuntimeError("reset by peer")
        return super().read(size)


@pytest.mark.parametrize("failures", [2, 3])
def test_a_read_that_fails_is_tried_again(failures, monkeypatch, capsys):
    """From the place where it failed. An error that remains is not the file's. So is a file that
    cannot be opened, unless it is missing.
    """
    content = bytes(range(256)) * 999
    errors = [FileNotFoundError("x://file"), None, None, None, TimeoutError("slow")]

    def answer(path, mode):
        if error := errors.pop():
            raise error
        return Flaky(content)

    monkeypatch.setattr(remote, "_find", lambda url: (SimpleNamespace(open=answer), url))
    monkeypatch.setattr(remote, "_WAITS", (0, 0))
    with remote.open_remote("x://file") as file:
        start = file.read(1 << 16)
        file.seek(1 << 17)
        monkeypatch.setattr(Flaky, "failures", failures)
        if failures == 3:
            with pytest.raises(OSError, match="RuntimeError: reset by peer") as raised:
                file.read()
            assert raised.value.errno
        else:
            assert (start, file.read()) == (content[: 1 << 16], content[1 << 17 :])
    printed = capsys.readouterr().err
    assert printed.count("x://file: TimeoutError('slow'); trying again") == 1
    again = "x://file: RuntimeError('reset by peer'); trying again"
    assert printed.count(again) == min(failures, 2)
    del errors[1:]
    with pytest.raises(OSError, match="FileNotFoundError"):
        remote.open_remote("x://file")
    assert "trying again" not in capsys.readouterr().err
