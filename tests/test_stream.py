"""Streams: rows that are read and tokenized while a run trains, and where they continue."""

import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from pyarrow import parquet

from bmt_burst import IGNORE_INDEX
from tests.preparing import jsonl, prepare
from tests.test_inputs import save_to_disk, table
from tests.test_model import SMALL
from tests.test_trainer import alone, records, settings, train  # noqa: F401 - two fixtures
from train.base import ranks
from train.checkpoints.checkpoint import Checkpoint
from train.data import remote, text
from train.data.folder import Row, TokenFile
from train.data.skips import Skips
from train.data.stream import Sizes, Stream
from train.data.stream_files import StreamFiles, is_stream
from train.data.tokenizer import ByteTokenizer

EOS, BOS, S = ByteTokenizer.eos_id, 65, 60
FILES = 9  # they make two lanes
TEXTS = [[f"<{i}.{j}" + "x" * (i * j % 40) for j in range(20 + i)] for i in range(FILES)]


def write_files(folder) -> None:
    """Write shards of all kinds, of which two make one lane."""
    folder.mkdir()
    for i, texts in enumerate(TEXTS[:4]):
        (folder / f"{i}.jsonl.gz").write_bytes(gzip.compress(jsonl(*texts)))
    for i, texts in enumerate(TEXTS[4:7], 4):
        parquet.write_table(table(*texts), folder / f"{i}.parquet", row_group_size=7)
    save_to_disk(folder / "arrow", *TEXTS[7:])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A stream that reads a few documents at a time."""
    monkeypatch.setattr(text, "_PIECE", 150)
    write_files(tmp_path / "in")
    make_stream(tmp_path)
    return tmp_path / "out/train"


def make_stream(folder, *arguments, code=0) -> str:
    return prepare(
        *("--stream", "--input", folder / "in", "--output", folder / "out"),
        *("--shuffle-tokens", 600, "--overwrite", *arguments),
        code=code,
    )


def opened(folder, batch_size=8, seed=0, documents=True, bos=BOS, seq_len=S) -> Stream:
    sizes = Sizes(seq_len, batch_size, seed)
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


def test_each_document_is_read_once_an_epoch_in_another_order(folder, capsys):
    stream = opened(folder)
    assert stream.num_lanes == 2
    rows = take(stream, range(800))
    for lane in range(2):
        mine = [row for sample, row in enumerate(rows) if sample % 8 // 4 == lane]
        read = read_documents(mine)
        listed = sorted(folder.parents[1].glob("in/**/*.*"))
        assert len(listed) == FILES + 2  # with two descriptions of the dataset
        names = [Path(str(file)).name for file, _ in StreamFiles.open(folder).files][lane::2]
        numbers = [
            7 + int(name[5:10]) if "arrow" in name else int(name.split(".")[0]) for name in names
        ]
        expected = sorted(x for number in numbers for x in TEXTS[number])
        epochs = [read[i : i + len(expected)] for i in range(0, len(read), len(expected))]
        assert len(epochs) > 3
        assert all(sorted(epoch) == expected for epoch in epochs[:-1])
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
        assert epochs[0] != expected
    said = capsys.readouterr().err.splitlines()
    assert sorted(said) == [f"{folder}: lane {i} starts over, in a new order" for i in range(2)]


@pytest.mark.parametrize("documents", [True, False])
def test_targets_are_the_next_tokens_of_a_document(folder, documents):
    rows = take(opened(folder, documents=documents, bos=BOS if documents else None), range(40))
    for lane in range(2):
        mine = [row for sample, row in enumerate(rows) if sample % 8 // 4 == lane]
        tokens = [token for row in mine for token in row[0]]
        labels = [label for row in mine for label in row[1]]
        after = [*tokens[1:], None]
        ends = [documents and token == EOS for token in tokens]
        expected = [IGNORE_INDEX if end else x for end, x in zip(ends, after, strict=True)]
        assert labels[:-1] == expected[:-1]
        for row_tokens, _, bounds in mine:
            starts = [i + 1 for i, x in enumerate(row_tokens[:-1]) if documents and x == EOS]
            assert bounds == (0, *starts, S)
    assert opened(folder, documents=False, bos=None).of_sample(0).documents == (0, S)


@pytest.mark.parametrize("seq_len", [7, 60, 2000])
def test_rows_do_not_depend_on_who_reads_the_others(folder, seq_len):
    """Any number of groups of ranks takes the same rows, also of a lane that several groups read,
    and if samples are left out.
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
    said: list = []
    monkeypatch.setattr(ranks, "gather", lambda value: said.append(value) or [value])
    for stream in streams:
        stream.state(samples)
    monkeypatch.setattr(ranks, "gather", lambda value: said)
    return [json.loads(json.dumps(stream.state(samples))) for stream in streams]


@pytest.mark.parametrize("seq_len", [7, 60, 2000])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 8), (8, 1), (4, 2)])
def test_a_resumed_run_has_the_same_rows_on_any_number_of_ranks(
    folder, monkeypatch, seq_len, before, after
):
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


def test_a_new_run_has_no_state_to_continue_from(folder, monkeypatch):
    [state] = states(monkeypatch, [opened(folder)], 0)
    stream = opened(folder)
    stream.restore(state)
    assert take(stream, range(9)) == take(opened(folder), range(9))
    assert take(opened(folder, seed=1), range(9)) != take(opened(folder), range(9))


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
    whole = take(stream, range(400))
    said = capsys.readouterr().err
    assert all(line.startswith(f"{folder}: ") for line in said.splitlines())
    reason = "Compressed file ended before the end-of-stream marker was reached"
    assert said.count(f"the rest of a broken shard is skipped: {path}: {reason}") == 1
    read = read_documents([row for sample, row in enumerate(whole) if sample % 8 < 4])
    read += read_documents([row for sample, row in enumerate(whole) if sample % 8 >= 4])
    kept = [x for x in TEXTS[2] if x in read]
    assert kept == TEXTS[2][: len(kept)] and len(kept) < len(TEXTS[2])
    assert all(x in read for i in (0, 1, 3, 4, 5, 6, 7, 8) for x in TEXTS[i])
    stream = opened(folder)
    take(stream, range(160))
    [state] = states(monkeypatch, [stream], 160)
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


def test_tables_that_are_broken_are_left_out_before(folder):
    break_file(folder.parents[1] / "in/5.parquet")
    assert "1 broken shard, more than" in make_stream(folder.parents[1], code=2)
    said = make_stream(folder.parents[1], "--max-bad-shards", 1)
    assert f"a stream of {FILES - 1} files" in said and "in/5.parquet: Parquet magic" in said


def test_bad_lines_are_skipped_up_to_a_share(folder, capsys):
    inputs = folder.parents[1] / "in"
    for path in (inputs / "a.jsonl", inputs / "b.jsonl"):
        path.write_bytes(b"{}\n" + jsonl("good", "too"))
    make_stream(folder.parents[1], "--max-bad", 1)
    rows = take(opened(folder), range(400))
    read = read_documents([row for sample, row in enumerate(rows) if sample % 8 < 4])
    assert "good" in read
    said = capsys.readouterr().err
    for name in ("a.jsonl", "b.jsonl"):
        place = f"{inputs / name}:1: no text in field 'text'"
        assert f"{folder}: 1 bad line was skipped, the first: {place}" in said
    make_stream(folder.parents[1], "--max-bad", 0.3)
    take(opened(folder), range(400))
    make_stream(folder.parents[1], "--max-bad", 0)
    with pytest.raises(
        ValueError, match=r"lines? .* bad, more than --max-bad 0 of them.*jsonl:1: "
    ):
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
    break_file(path)
    with pytest.raises(ValueError, match=r"1\.jsonl\.gz is missing or has changed since .*again"):
        opened(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"1\.jsonl\.gz is missing or has changed since "):
        opened(folder)


def test_a_stream_is_only_for_training(folder):
    assert is_stream(str(folder)) and not is_stream(str(folder.parent))
    with pytest.raises(ValueError, match="is a stream, which only --data of pretrain"):
        TokenFile(folder)
    base = folder.parents[1]
    for option, value in (("--val-fraction", 0.1), ("--workers", 2)):
        assert f"{option} does not go with --stream" in make_stream(base, option, value, code=2)
    for value in ((), ("--stream",)):
        given = ("--input", base / "in", "--output", base / "o", "--shuffle-tokens", 0, *value)
        said = prepare(*given, code=2)
        assert ("--shuffle-tokens must be at least 1, got 0" in said) == bool(value)
        assert ("--shuffle-tokens needs --stream" in said) == (not value)
    (base / "in/x.txt").write_text("text")
    said = make_stream(base, code=2)
    assert "x.txt: a stream is read from .jsonl and .parquet files and datasets folders" in said
    assert (folder / "index.json").exists()  # the one before


def test_a_stream_may_be_at_addresses(tmp_path):
    """Of any file system of fsspec; here one in memory."""
    memory = fsspec.filesystem("memory")
    try:
        for i in range(4):
            memory.pipe(f"/corpus/{i}.jsonl.gz", gzip.compress(jsonl(*TEXTS[i])))
        with memory.open("/corpus/4.parquet", "wb") as file:
            parquet.write_table(table(*TEXTS[4]), file)
        out = ("--output", tmp_path / "out", "--stream", "--overwrite", "--input")
        said = prepare(*out, "memory://corpus/*")
        assert "a stream of 5 files" in said
        read = read_documents(take(opened(tmp_path / "out/train"), range(64)))
        assert {x for texts in TEXTS[:5] for x in texts} == {*read}
        assert "no file matches memory://corpus/*.zst" in prepare(
            *out, "memory://corpus/*.zst", code=2
        )
        assert "ftq://x/y.jsonl: " in prepare(*out, "ftq://x/y.jsonl", code=2)
        memory.rm("/corpus/4.parquet")
        with pytest.raises(ValueError, match=r"memory:///corpus/4\.parquet cannot be read: FileNo"):
            take(opened(tmp_path / "out/train"), range(64))
    finally:
        memory.store.clear()


def test_a_run_on_a_stream_resumes_with_the_same_losses(folder, settings, tmp_path):  # noqa: F811
    """A whole run, one that is resumed at the second of four steps, and one with other files."""
    settings |= {"data": str(folder), "batch_size": 8, "micro_batch_size": 2}
    train(settings, output=str(tmp_path / "whole"), steps=4)
    whole = records(tmp_path / "whole")
    train(settings, steps=2, output=str(tmp_path / "parts"), warmup_steps=1, decay_steps=0)
    train(settings, steps=4, output=str(tmp_path / "parts"), resume="auto")
    assert len(whole) == 4
    assert records(tmp_path / "parts") == whole
    state = Checkpoint(tmp_path / "whole/step_00000004").state["reading"]
    assert [lane["rows"] for lane in state["lanes"]] == [16, 16]
    (folder.parents[1] / "in/9.jsonl").write_bytes(jsonl("more"))
    make_stream(folder.parents[1])
    with pytest.raises(ranks.RankError, match="was reading other data: digest"):
        train(settings, steps=6, output=str(tmp_path / "whole"), resume="auto")


def test_a_stream_needs_a_model_of_documents(folder, settings, tmp_path):  # noqa: F811
    with pytest.raises(ranks.RankError, match="is a stream, which only --data of pretrain"):
        train(settings, val_data=str(folder))
    with pytest.raises(
        ranks.RankError, match="is a stream of documents, but --model cpm-bee-tiny is a cpm-bee"
    ):
        train(settings, data=str(folder), model="cpm-bee-tiny")
    (tmp_path / "model.json").write_text(json.dumps(SMALL.to_dict() | {"vocab_size": 100}))
    with pytest.raises(ranks.RankError, match="has a vocabulary of 257 tokens, but --model"):
        train(settings, data=str(folder))


def test_a_stream_may_be_a_part_of_a_mixture(folder, settings, tmp_path):  # noqa: F811
    """It is resumed too, together with rows of a folder that ends several times."""
    data = {"stream": f"{folder}:3", "stored": f"{settings['data']}:1"}
    settings |= {"data": data, "batch_size": 8, "micro_batch_size": 2}
    train(settings, output=str(tmp_path / "whole"), steps=4)
    train(settings, steps=3, output=str(tmp_path / "parts"), warmup_steps=1, decay_steps=0)
    train(settings, steps=4, output=str(tmp_path / "parts"), resume="auto", warmup_steps=1)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert len(records(tmp_path / "whole", "loss/stream")) == 4
    state = Checkpoint(tmp_path / "whole/step_00000004").state["reading"]
    assert sum(lane["rows"] for lane in state["stream"]["lanes"]) == 24


class Flaky(io.BytesIO):
    """A file whose reads fail for a while."""

    failures = 0

    def read(self, size=-1):
        if Flaky.failures:
            Flaky.failures -= 1
            raise RuntimeError("reset by peer")
        return super().read(size)


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_read_that_fails_is_tried_again(failures, monkeypatch, capsys):
    """From the place where it failed. An error that remains is none of the file."""
    content = bytes(range(256)) * 999
    system = SimpleNamespace(open=lambda path, mode: Flaky(content))
    monkeypatch.setattr(remote, "_find", lambda url: (system, url))
    monkeypatch.setattr(remote, "_WAITS", (0, 0))
    with remote.open_remote("x://file") as file:
        start = file.read(1 << 16)
        file.seek(1 << 17)
        monkeypatch.setattr(Flaky, "failures", failures)
        if failures == 3:
            with pytest.raises(OSError, match="RuntimeError: reset by peer") as told:
                file.read()
            assert told.value.errno
        else:
            assert (start, file.read()) == (content[: 1 << 16], content[1 << 17 :])
    said = "x://file: RuntimeError('reset by peer'); trying again"
    assert capsys.readouterr().err.count(said) == min(failures, 2)


def test_a_file_that_cannot_be_opened_is_tried_again_unless_it_is_missing(monkeypatch, capsys):
    answers = [TimeoutError("slow"), Flaky(b"text"), FileNotFoundError("x://file")]

    def answer(path, mode):
        if isinstance(found := answers.pop(0), Exception):
            raise found
        return found

    monkeypatch.setattr(remote, "_find", lambda url: (SimpleNamespace(open=answer), url))
    monkeypatch.setattr(remote, "_WAITS", (0, 0))
    with remote.open_remote("x://file") as file:
        assert file.read() == b"text"
    assert capsys.readouterr().err.count("trying again") == 1
    with pytest.raises(OSError, match="FileNotFoundError"):
        remote.open_remote("x://file")
    assert "trying again" not in capsys.readouterr().err and not answers


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_skipped_samples_change_no_row_for_any_number_of_groups(folder, monkeypatch, groups):
    """A group then reads rows of several lanes. The stream is saved and restored in between."""
    skips, share, saved = Skips(((13, 24), (24, 90))), 8 // groups, []
    whole = take(opened(folder), range(130))
    places = [place for place in range(130) if not 13 <= place < 90]
    for samples in (range(24), range(24, 48)):
        streams = [opened(folder) for _ in range(groups)]
        for group, stream in enumerate(streams):
            stream.restore(saved[0] if saved else {})
            mine = [n for n in samples if n % 8 // share == group]
            read = take(stream, [skips.place(n) for n in mine])
            assert read == [whole[places[n]] for n in mine]
        saved = states(monkeypatch, streams, skips.end(samples.stop))
