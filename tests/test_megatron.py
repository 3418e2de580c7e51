"""Megatron-LM's indexed datasets as inputs of prepare_data.py. Files are written byte by byte."""

import struct

import numpy as np
import pytest

from tests.preparing import EOS, documents, prepare
from tests.test_tokenizer import byte_level  # noqa: F401 - a fixture
from train import prepare_data
from train.data import megatron
from train.data.files import TextFile
from train.data.folder import TokenFile

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
