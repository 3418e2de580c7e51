"""Inputs of prepare_data.py: zstd, tables, datasets folders, Megatron-LM's files, broken shards."""

import gzip
import json
import shutil
import struct
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.preparing import EOS, documents, jsonl, prepare, texts
from tests.refusals import refused_line
from tests.test_tokenizer import byte_level  # noqa: F401 - a fixture
from train import make_vocabulary, prepare_data
from train.data import megatron
from train.data.files import TextFile
from train.data.folder import TokenFile

zstandard = pytest.importorskip("zstandard")

LONG = [f"{i} " + "word " * (i % 50) for i in range(3000)]


def table(*values: str | None, **columns) -> pa.Table:
    return pa.table({"id": [*range(len(values))], "text": [*values], **columns})


def write_shard(path, values) -> None:
    """Write a shard of a datasets folder: a stream of Arrow in batches."""
    with pa.OSFile(str(path), "wb") as file:
        written = table(*values)
        with pa.ipc.new_stream(file, written.schema) as stream:
            stream.write_table(written, max_chunksize=200)


def save_to_disk(folder, *shards) -> None:
    """Write a folder as Dataset.save_to_disk does."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, values in zip(names, shards, strict=True):
        write_shard(folder / name, values)
    listed = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(listed))
    (folder / "dataset_info.json").write_text("{}")


def compress(*frames: bytes) -> bytes:
    return b"".join(zstandard.ZstdCompressor().compress(frame) for frame in frames)


def test_all_kinds_of_files_hold_the_same_documents(tmp_path):
    """Columns have other types of text, files several row groups and frames of zstd."""
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [*LONG, "ü"]
    (folder / "a.jsonl").write_bytes(jsonl(*rows))
    (folder / "b.jsonl.zst").write_bytes(compress(jsonl(*rows[:100]), jsonl(*rows[100:])))
    parquet.write_table(table(*rows), folder / "c.parquet", row_group_size=700)
    for i, kind in enumerate(
        (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()))
    ):
        column = pa.chunked_array([pa.array(rows, kind)])
        with_kind = table(*rows).set_column(1, "text", column)
        parquet.write_table(with_kind, folder / f"d{i}.PARQUET")
    save_to_disk(folder / "e", rows[:1500], rows[1500:])
    printed = prepare("--input", folder, "--output", tmp_path / "out")
    assert texts(tmp_path / "out/train") == rows * 7
    assert "not read" not in printed
    (tmp_path / "x.txt.zst").write_bytes(b"\x50\x2a\x4d\x18\x02\0\0\0ab" + compress(b"one\n", b"2"))
    prepare("--input", tmp_path / "x.txt.zst", "--output", tmp_path / "text")
    assert texts(tmp_path / "text/train") == ["one\n2"]


def test_a_row_has_a_name_that_does_not_change_when_its_folder_moves(tmp_path):
    save_to_disk(tmp_path / "a", LONG[:40], LONG[40:90])
    parquet.write_table(table(*LONG[:50]), tmp_path / "a/x.parquet")
    prepare("--input", tmp_path / "a", "--output", tmp_path / "1", "--val-fraction", 0.3)
    shutil.move(tmp_path / "a", tmp_path / "b")
    prepare("--input", tmp_path / "b", "--output", tmp_path / "2", "--val-fraction", 0.3)
    for part in ("train", "val"):
        assert texts(tmp_path / "1" / part) == texts(tmp_path / "2" / part)
    names = ["data-00000-of-00002.arrow:1", "data-00001-of-00002.arrow:50", "x.parquet:50"]
    for name, text in zip(names, (LONG[0], LONG[89], LONG[49]), strict=True):
        part = "val" if prepare_data._is_validation(name, 0.3) else "train"
        assert text in texts(tmp_path / "2" / part)


def test_rows_without_text_are_bad_lines(tmp_path):
    bad = pa.array([b"good", b"\xff", b"a\0\0\0"]).view(pa.binary()).cast(pa.string(), safe=False)
    values = pa.concat_arrays([bad, pa.array([None, ""], pa.string())])
    parquet.write_table(pa.table({"text": values}), tmp_path / "x.parquet")
    printed = prepare("--input", tmp_path, "--output", tmp_path / "out", "--max-bad", 0.6)
    assert texts(tmp_path / "out/train") == ["good"]
    listed = TokenFile(tmp_path / "out/train").index["first_bad_lines"]
    where = tmp_path / "x.parquet"
    assert [line.partition(": ")[0] for line in listed] == [f"{where}:{i}" for i in (2, 3, 4)]
    assert "not UTF-8: invalid start byte" in printed and "no text in field 'text'" in printed
    assert "3 of 5 lines are bad" in prepare("--input", where, "--output", tmp_path / "o2", code=2)


def write_broken_shards(folder) -> None:
    """Fill a folder with shards that end early or are damaged, and one that is whole."""
    folder.mkdir()
    whole = jsonl(*LONG)
    for name, packed in (("a.jsonl.gz", gzip.compress(whole)), ("b.jsonl.zst", compress(whole))):
        (folder / name).write_bytes(packed[: len(packed) // 2])
    parquet.write_table(table(*LONG), folder / "c.parquet")
    cut = (folder / "c.parquet").read_bytes()
    (folder / "c.parquet").write_bytes(cut[: len(cut) // 2])
    parquet.write_table(table(*LONG), folder / "d.parquet", row_group_size=1000)
    changed = bytearray((folder / "d.parquet").read_bytes())
    middle = parquet.read_metadata(folder / "d.parquet").row_group(1).column(1)
    start = middle.dictionary_page_offset or middle.data_page_offset
    changed[start : start + 40] = b"\xff" * 40
    (folder / "d.parquet").write_bytes(changed)
    save_to_disk(folder / "e", LONG, LONG)
    for number, lost in ((0, 5000), (1, 8)):
        shard = folder / f"e/data-0000{number}-of-00002.arrow"
        shard.write_bytes(shard.read_bytes()[:-lost])
    (folder / "f.jsonl").write_bytes(jsonl("whole"))


def test_broken_shards_are_named_and_their_rest_is_skipped(tmp_path):
    write_broken_shards(tmp_path / "in")
    arguments = ("--input", tmp_path / "in", "--workers", 2, "--output", tmp_path / "out")
    printed = prepare(*arguments, "--max-bad-shards", 6)
    index = TokenFile(tmp_path / "out/train").index
    listed = [line.removeprefix(f"{tmp_path}/in/") for line in index["broken_shards"]]
    starts = [
        *("c.parquet: Parquet magic bytes not found in footer", "e/data-00000-of-00002.arrow: "),
        *("e/data-00001-of-00002.arrow: the file ends before", "a.jsonl.gz: Compressed file ended"),
        *("b.jsonl.zst: compressed file ended before the end of a zstd frame", "d.parquet: "),
    ]
    assert all(line.startswith(start) for line, start in zip(listed, starts, strict=True)), listed
    refused = prepare(*arguments, "--max-bad-shards", 5, "--overwrite", code=2)
    assert "6 broken shards, more than --max-bad-shards 5: " in refused
    assert all(line.split(": ")[0] in refused for line in index["broken_shards"])
    assert "6 broken shards were skipped from the damage on:\n" in printed
    assert all(line in printed for line in index["broken_shards"])
    read = texts(tmp_path / "out/train")
    assert read[-1] == "whole" and read[-1001:-1] == LONG[:1000]  # d's first row group
    by_gzip = read[1:].index(LONG[0]) + 1
    assert read[:by_gzip] == LONG[:by_gzip] and 500 < by_gzip < 3000
    assert index["bad_lines"] == 0


def test_a_table_without_the_column_is_refused(tmp_path):
    arguments = ("--input", tmp_path, "--output", tmp_path / "out", "--max-bad-shards", 9)
    for columns, message in (
        ({"text": [1]}, "expected text in column 'text', see --field; it has int64"),
        ({"body": ["a"]}, "expected a column 'text', see --field; the columns are body"),
    ):
        parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
        assert f"{tmp_path}/x.parquet: {message}" in prepare(*arguments, code=2)
    prepare(*arguments, "--field", "body")
    assert texts(tmp_path / "out/train") == ["a"]


@pytest.mark.parametrize(
    ("name", "package"), [("x.parquet", "pyarrow"), ("d", "pyarrow"), ("x.txt.zst", "zstandard")]
)
def test_a_missing_package_is_named_with_the_command(name, package, tmp_path, monkeypatch):
    (tmp_path / "x.txt.zst").write_bytes(compress(b"text"))
    parquet.write_table(table("a"), tmp_path / "x.parquet")
    save_to_disk(tmp_path / "d", ["a"])
    monkeypatch.setitem(sys.modules, package, None)
    printed = prepare("--input", tmp_path / name, "--output", tmp_path / "out", code=2)
    assert f"needs {package}, which cannot be imported" in printed
    assert f"pip install {package}, or pip install '.[data]' in the repository" in printed


def test_of_a_datasets_folder_only_listed_shards_are_read(tmp_path):
    """Its caches repeat rows, and its splits are not mixed."""
    save_to_disk(tmp_path / "d/train", ["a"], ["b"])
    save_to_disk(tmp_path / "d/test", ["c"])
    (tmp_path / "d/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    write_shard(tmp_path / "d/train/cache-1.arrow", ["again"])
    out = ("--output", tmp_path / "out", "--overwrite")
    printed = prepare("--input", tmp_path / "d", *out, code=2)
    assert f"{tmp_path}/d has the splits train, test: give the folders of those to read" in printed
    printed = prepare("--input", tmp_path / "d", "--exclude", "test", *out)
    cache = tmp_path / "d/train/cache-1.arrow"
    assert f"not read: {cache} (an arrow file that no state.json lists)\n" in printed
    assert texts(tmp_path / "out/train") == ["a", "b"]
    prepare("--input", tmp_path / "d/train", tmp_path / "d/test", *out)
    assert texts(tmp_path / "out/train") == ["a", "b", "c"]
    assert f"{cache} is one shard: give its folder" in prepare("--input", cache, *out, code=2)
    (tmp_path / "d/train/data-00001-of-00002.arrow").unlink()
    printed = prepare("--input", tmp_path / "d/train", *out, code=2)
    assert "state.json lists data-00001-of-00002.arrow, which is missing" in printed


def test_instances_and_vocabularies_are_not_made_of_tables(tmp_path, capsys):
    parquet.write_table(table("a"), tmp_path / "x.parquet")
    (tmp_path / "x.jsonl.zst").write_bytes(compress(jsonl("some words")))
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text" * 99)[:-9])
    arguments = ["--model", "cpm-ant", "--output", str(tmp_path / "v.txt"), "--input"]
    make_vocabulary.main([*arguments, str(tmp_path / "x.jsonl.zst")])
    vocabulary = tmp_path / "v.txt"
    printed = prepare(
        *("--input", tmp_path / "x.parquet", "--output", tmp_path / "out"),
        *("--tokenizer", f"cpm-ant-greedy:{vocabulary}"),
        code=2,
    )
    assert "x.parquet: data for cpm-ant is made from .txt and .jsonl files only" in printed
    vocabulary.unlink()
    for name, message in (
        ("x.parquet", "x.parquet: a vocabulary is made from .txt and .jsonl files only"),
        ("cut.txt.gz", "cut.txt.gz is broken: Compressed file ended"),
    ):
        assert message in refused_line(capsys, make_vocabulary.main, *arguments, tmp_path / name)


TEXTS = [b"first", b"second\x80", b"", b"third document"]


def write(prefix, texts=TEXTS, code=4, kind="i", cut=None, **changes) -> None:
    """Write PREFIX.bin and PREFIX.idx of texts as bytes. `cut` has the sequences of each document,
    by default one.
    """
    size = struct.calcsize("<" + kind)
    lengths = [len(text) for text in texts]
    header = {
        "magic": b"MMIDIDX\x00\x00",
        "version": 1,
        "code": code,
        "sequences": len(texts),
        "lengths": lengths,
        "places": [sum(lengths[:i]) * size for i in range(len(texts))],
        "documents": [0, *np.cumsum(cut or [1] * len(texts)).tolist()],
    } | changes
    numbers = (header[name] for name in ("version", "code", "sequences"))
    index = header["magic"] + struct.pack("<QBQ", *numbers)
    index += struct.pack("<Q", len(header["documents"]))
    for kind_of_entry, name in (("i", "lengths"), ("q", "places"), ("q", "documents")):
        index += struct.pack(f"<{len(header[name])}{kind_of_entry}", *header[name])
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)
    data = b"".join(struct.pack("<" + kind, token) for text in texts for token in text)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(data)


@pytest.mark.parametrize(
    ("code", "kind", "ending"),
    [(1, "B", ""), (3, "h", ".idx"), (4, "i", ".bin"), (5, "q", ""), (8, "H", "")],
)
def test_tokens_of_any_dtype_are_kept(code, kind, ending, tmp_path):
    write(tmp_path / "corpus_text_document", code=code, kind=kind)
    given = tmp_path / f"corpus_text_document{ending}"
    prepare("--input", given, "--output", tmp_path / "out", "--tokenizer", "bytes")
    expected = [[*text, EOS] for text in TEXTS if text]
    assert documents(tmp_path / "out/train") == expected
    assert TokenFile(tmp_path / "out/train").index["sources"] == [str(given)]


def test_documents_of_several_sequences_in_small_parts(tmp_path, monkeypatch):
    """A part ends after a document."""
    write(tmp_path / "x", cut=[2, 0, 1, 1])
    monkeypatch.setattr(megatron, "_PIECE", 6)
    pieces = [*megatron.IndexedTokens(TextFile(tmp_path / "x.bin", "x.bin")).pieces()]
    read = [[bytes(ids.tolist()) for ids in piece.lines] for piece in pieces]
    assert read == [[b"firstsecond\x80"], [b"", b"", b"third document"]]
    assert [piece.first_line for piece in pieces] == [1, 2]
    assert sum(piece.size for piece in pieces) == (tmp_path / "x.bin").stat().st_size


def test_an_eos_at_the_end_is_not_doubled_and_names_choose_validation(byte_level, tmp_path):  # noqa: F811
    from train.data.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(str(byte_level))
    texts = [tokenizer.encode(f"document {i}") for i in range(30)]
    ended = [[*ids, tokenizer.eos_id] if i % 2 else ids for i, ids in enumerate(texts)]
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/x", ended, 8, "H")
    arguments = ("--input", tmp_path / "in", "--tokenizer", byte_level, "--val-fraction", 0.3)
    printed = prepare(*arguments, "--output", tmp_path / "out", "--workers", 1)
    assert "not read" not in printed
    for part in ("train", "val"):
        chosen = [
            [*ids, tokenizer.eos_id]
            for i, ids in enumerate(texts, 1)
            if prepare_data._is_validation(f"x.bin:{i}", 0.3) == (part == "val")
        ]
        assert documents(tmp_path / "out" / part) == chosen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"TNTIDX\0\0\0"}, "x.idx is no index of Megatron-LM"),
        ({"version": 2}, "x.idx: expected version 1, got 2"),
        ({"code": 7, "kind": "f"}, "x.idx: expected a dtype of whole numbers, got code 7"),
        ({"sequences": 5}, "x.idx has 122 bytes, expected 134 for 5 sequences and 5 entries"),
        ({"lengths": [5, 7, 0, 9]}, "x.bin has 104 bytes, but x.idx lists 84"),
        ({"lengths": [5, -7, 0, 14]}, "x.idx: sequences do not follow one another in the .bin"),
        ({"places": [0, 20, 48, 52]}, "x.idx: sequences do not follow one another in the .bin"),
        ({"documents": [1, 2, 3, 4]}, "x.idx: documents must start at rising sequences, from 0"),
        ({"documents": [0, 3, 2, 4]}, "x.idx: documents must start at rising sequences, from 0"),
        ({"documents": []}, "x.idx: documents end at sequence 0, but there are 4 sequences"),
        ({"texts": [b"good", [65, 300]]}, "x.bin, lines 1 to 2: document 2 has token 300, but"),
        ({"texts": [b"good", [-1]]}, "x.bin, lines 1 to 2: document 2 has token -1, but"),
    ],
)
def test_other_files_are_refused_by_name(changes, message, tmp_path):
    write(tmp_path / "x", **changes)
    printed = prepare(
        *("--input", tmp_path / "x.bin", "--output", tmp_path / "out", "--tokenizer", "bytes"),
        *("--max-bad-shards", 9),
        code=2,
    )
    assert message in printed
    assert not list(tmp_path.glob("out*"))


def test_truncated_and_missing_files_are_refused_by_name(tmp_path):
    write(tmp_path / "x")
    arguments = ("--output", tmp_path / "out", "--tokenizer", "bytes", "--input")
    index = (tmp_path / "x.idx").read_bytes()
    (tmp_path / "x.idx").write_bytes(index + bytes(4))
    assert "x.idx has modes" in prepare(*arguments, tmp_path / "x", code=2)
    for size, message in (
        (3, "x.idx is no index of Megatron-LM"),
        (20, "x.idx is truncated: it has 20 bytes"),
        (100, "x.idx has 100 bytes, expected 122 for 4 sequences and 5 entries of documents"),
    ):
        (tmp_path / "x.idx").write_bytes(index[:size])
        assert message in prepare(*arguments, tmp_path / "x", code=2)
    (tmp_path / "x.idx").unlink()
    assert "x.bin has no x.idx next to it" in prepare(*arguments, tmp_path / "x.bin", code=2)
    write(tmp_path / "x")
    printed = prepare("--input", tmp_path / "x", "--output", tmp_path / "out", code=2)
    assert "x.bin holds tokens: --tokenizer must name the one that made them" in printed
