"""Lines of JSON, JSON arrays and plain text: which one a file holds, and which field is read."""

import gzip
import hashlib
import io
import json
import random

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.preparing import jsonl, prepare, texts
from tests.test_inputs import compress
from tests.test_stream import opened, take
from train import make_vocabulary
from train.data import forms, text
from train.data.compressed import BrokenFile
from train.data.files import TextFile
from train.data.folder import TokenFile
from train.data.forms import ARRAY, LINES, OBJECT, PLAIN, recognize, split_array
from train.data.records import describe_fields, find_value
from train.data.text import read_pieces

WORDS = [f"{i} [\"{{'é\\" for i in range(6)]
RECORDS = [{"id": i, "data": {"text": word}} for i, word in enumerate(WORDS)]
IN_LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
IN_ARRAY = json.dumps(RECORDS, indent=1, ensure_ascii=False).encode()
ONE_LINE = json.dumps(RECORDS).encode()
PRETTY = json.dumps(RECORDS[0], indent=2).encode()
MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("start", "form"),
    [
        (IN_LINES, LINES),
        (MARK + b"\r\n\n " + IN_LINES.replace(b"\n", b"\r\n\r\n"), LINES),
        (b'{"text": "cut\n' + IN_LINES, LINES),
        (b"# a comment\n" + IN_LINES, LINES),
        (b'[{"<ans>": "a"}, {"<ans>": "b"}]\n[{"<ans>": "c"}]\n', LINES),
        (MARK + b"\n" + IN_ARRAY, ARRAY),
        (ONE_LINE + b"\n\n", ARRAY),
        (b"[\n" + IN_LINES.rstrip().replace(b"\n", b",\n") + b"\n]", ARRAY),
        (b"[]\n", ARRAY),
        (PRETTY + b"\n" + PRETTY, OBJECT),
        (b'{"version": 1, "data": [\n{"text": "a"},\n{"text": "b"}\n]}', OBJECT),
        (b"[1] a footnote\n[2]", PLAIN),
        (b"[1, 2]\n", PLAIN),
        (b"{\n int x;\n}\n", PLAIN),
        (b'{"a": 1}\nprint(3)\n', PLAIN),
        (b'"quoted"\n3\n', PLAIN),
        (b"", PLAIN),
        (IN_ARRAY.decode().encode("utf-16-le"), PLAIN),
    ],
)
def test_the_form_of_a_text_is_recognized(start, form):
    assert recognize(start, whole=True, by_line=False) == form


def test_a_first_line_that_is_longer_than_what_is_read_is_judged_by_its_start():
    long = b'{"text": "' + b"x" * 99
    assert recognize(long, whole=False, by_line=False) == LINES
    assert recognize(b"[" + long, whole=False, by_line=False) == ARRAY
    assert recognize(b"[" + long, whole=False, by_line=True) == LINES
    assert recognize(ONE_LINE, whole=True, by_line=True) == LINES
    assert recognize(IN_ARRAY, whole=True, by_line=True) == ARRAY


def test_an_array_is_split_as_json_reads_it(monkeypatch):
    """Whatever part of it is read at once, also inside strings and escapes."""
    chance = random.Random(0)
    monkeypatch.setattr(forms, "PEEKED", 8)
    for size in (1, 2, 3, 7, 50, 1 << 16):
        monkeypatch.setattr(forms, "_READ", size)
        signs = '[]{},"\\:\n aé\u2028🙂'
        strings = ["".join(chance.choices(signs, k=chance.randrange(40))) for _ in range(40)]
        values = [{x: [{"text": x}, x]} if i % 3 else [x, {}] for i, x in enumerate(strings)]
        for written in (json.dumps(values, ensure_ascii=False), json.dumps(values, indent=1)):
            whole = io.BytesIO(MARK + b"\n" + written.encode() + b"\n ")
            assert [json.loads(part) for part in split_array(whole)] == values
    cut = split_array(io.BytesIO(b'[{"text": "a"}, {"text": "b'))
    assert next(cut) == b'{"text": "a"}'
    with pytest.raises(BrokenFile, match="ends before the end of its JSON array"):
        next(cut)


def test_records_are_read_whatever_their_ending_and_descriptions_are_not(tmp_path):
    """In all forms and tables, and next to what is no data."""
    folder = tmp_path / "in"
    (folder / ".git").mkdir(parents=True)
    (folder / "a.json").write_bytes(IN_LINES)
    (folder / "b.json.gz").write_bytes(gzip.compress(IN_LINES))
    (folder / "c.json.zst").write_bytes(compress(IN_ARRAY))
    (folder / "d.jsonl.zstd").write_bytes(compress(MARK + IN_LINES))
    (folder / "e.JSON").write_bytes(ONE_LINE)
    (folder / "f.ndjson").write_bytes(IN_LINES)
    (folder / "g.jsonl").write_bytes(IN_ARRAY)
    table = pa.Table.from_pylist(RECORDS)
    parquet.write_table(table, folder / "h.parquet")
    (folder / "i").mkdir()
    with pa.ipc.new_stream(folder / "i/data.arrow", table.schema) as stream:
        stream.write_table(table)
    (folder / "i/state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (folder / "i/dataset_info.json").write_bytes(PRETTY)
    named = ("state.json", "dataset_infos.json", "config.json", "sha256sums.txt", ".a.jsonl")
    for name in (*named, ".git/x.json"):
        (folder / name).write_bytes(IN_LINES)
    (folder / "stats.json").write_bytes(PRETTY)
    arguments = ("--input", tmp_path / "in", "--output", tmp_path / "out", "--field", "data.text")
    prepare(*arguments)
    assert texts(tmp_path / "out/train") == WORDS * 9
    not_read = TokenFile(tmp_path / "out/train").index["not_read"]
    assert [line.partition(" (")[2] for line in not_read] == [
        "a hidden folder)",
        "hidden, or metadata) and 4 more",
        "one JSON object over several lines, which jq -c . writes on one)",
    ]
    prepare(*arguments, "--glob", "state.json", "--overwrite")
    assert texts(tmp_path / "out/train") == WORDS
    (tmp_path / "part-0.gz").write_bytes(gzip.compress(IN_LINES))
    prepare("--input", tmp_path / "part-0.gz", *arguments[2:], "--overwrite")
    assert texts(tmp_path / "out/train") == WORDS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", IN_LINES, "plain text in a .txt, got lines of JSON: --format lines reads"),
        ("x.txt.gz", gzip.compress(IN_ARRAY, mtime=0), "got a JSON array: --format array reads"),
        ("x.txt", PRETTY, "got a JSON object: --format text reads"),
        ("x.ipynb", PRETTY, "array of records, got an object over several lines: `jq -c . "),
        ("x.json", IN_ARRAY + b"\n" + IN_ARRAY, "and nothing after it, got '[\\n {\\n"),
        ("x.json", IN_ARRAY[:-9], "x.json: the file ends before the end of its JSON array"),
        ("x.jsonl", ONE_LINE, "is of type list, and no object; --format array reads"),
        ("x.md", b"# text", "and holds no JSON: --format text reads it as plain text"),
        ("x.json", IN_ARRAY.decode().encode("utf-16-le"), "x.json:1: not UTF-8: "),
        ("x.json", jsonl("a"), "the first record has the fields text. In a folder"),
    ],
)
def test_files_that_contradict_their_names_or_hold_no_records_are_refused(
    name, content, message, tmp_path
):
    (tmp_path / name).write_bytes(content)
    out = ("--output", tmp_path / "out", "--field", "data.text")
    printed = prepare("--input", tmp_path / name, *out, code=2)
    assert f"{tmp_path / name}" in printed and message in printed
    if name in ("x.txt", "x.ipynb"):  # also of a folder
        assert message in prepare("--input", tmp_path, "--glob", name, *out, code=2)
    assert not list(tmp_path.glob("out*"))


def test_a_form_may_be_named(tmp_path):
    """Code that begins like JSON is refused otherwise."""
    (tmp_path / "x.txt").write_bytes(IN_LINES)
    (tmp_path / "y.jsonl").write_bytes(ONE_LINE)
    out = ("--output", tmp_path / "out", "--overwrite", "--field", "data.text", "--format")
    for name, form, expected in (
        ("x.txt", LINES, WORDS),
        ("y.jsonl", ARRAY, WORDS),
        ("x.txt", PLAIN, [IN_LINES.decode()]),
        ("y.jsonl", PLAIN, [ONE_LINE.decode()]),
    ):
        prepare("--input", tmp_path / name, *out, form)
        assert texts(tmp_path / "out/train") == expected
    printed = prepare("--input", tmp_path / "x.txt", *out, ARRAY, code=2)
    assert "x.txt: expected one JSON array, which begins with [, got '{" in printed
    for code, message in (
        ('{"a": f(),\n "b": 2}\n', "object over"),
        ('[{"a": 1}]\n.f()', "JSON ar"),
    ):
        (tmp_path / "x.js").write_text(code)
        named = ("--input", tmp_path, "--glob", "*.js")
        assert message in prepare(*named, *out[:-1], code=2)
        prepare(*named, *out, "text")
        assert texts(tmp_path / "out/train") == [code]
    vocabulary = ["--model", "cpm-ant", "--output", str(tmp_path / "v"), "--format", ARRAY]
    make_vocabulary.main([*vocabulary, "--input", str(tmp_path / "y.jsonl")])
    assert "data" in (tmp_path / "v").read_text().split("\n")


def test_a_field_may_be_inside_others_and_a_field_of_this_very_name_wins(tmp_path):
    record = {"a": {"b": {"c": "inner"}, "b.c": "between"}, "n": 1}
    assert find_value(record, "a.b.c") == "between"
    assert find_value(record | {"a.b.c": None}, "a.b.c") is None
    for field in ("a.c", "n.c", "a.b.c.d", ""):
        with pytest.raises(KeyError):
            find_value(record, field)
    assert describe_fields(record) == "has the fields a.b.c, a.b.c, n"
    assert describe_fields({str(i): 0 for i in range(99)}).endswith("18, 19, ...")
    rows = [{"a": {"b": "in"}, "a.b": "very"}, {"a": None, "a.b": None}]
    for kept, expected in ((["a"], ["in", None]), (["a", "a.b"], ["very", None])):
        table = pa.Table.from_pylist([{name: row[name] for name in kept} for row in rows])
        parquet.write_table(table, tmp_path / "x.parquet")
        with pa.ipc.new_stream(tmp_path / "x.arrow", table.schema) as stream:
            stream.write_table(table)
        for name in ("x.parquet", "x.arrow"):
            [piece] = read_pieces(TextFile(tmp_path / name, name), "a.b")
            assert [line and line.decode() for line in piece.lines] == expected
    with pytest.raises(ValueError, match=r"expected a column 'a\.c', .* columns are a\.b, a\.b$"):
        next(read_pieces(TextFile(tmp_path / "x.parquet", "x"), "a.c"))


def test_a_stream_with_a_wrong_field_is_refused_when_it_is_prepared(tmp_path, memory):
    """At an address too. Bad lines in front of good ones do not matter."""
    out = ("--stream", "--output", tmp_path / "out", "--overwrite", "--input")
    (tmp_path / "good.jsonl").write_bytes(b"bad\n{}\n" + jsonl("text"))
    (tmp_path / "wrong.json").write_bytes(b"bad\n" + IN_LINES)
    prepare(*out, tmp_path / "good.jsonl")
    before = (tmp_path / "out/train/index.json").read_bytes()
    message = (
        "expected text in field 'text', see --field; the first record has the fields id, data.text"
    )
    printed = prepare(*out, tmp_path / "good.jsonl", tmp_path / "wrong.json", code=2)
    assert f"{tmp_path}/wrong.json: {message}" in printed
    printed = prepare(*out, tmp_path / "wrong.json", "--field", "id", code=2)
    assert "expected text in field 'id', see --field; the first record has int there." in printed
    memory.pipe("/wrong/a.json.gz", gzip.compress(IN_ARRAY))
    memory.pipe("/wrong/dataset_infos.json", PRETTY)
    printed = prepare(*out, tmp_path / "good.jsonl", "memory://wrong/*", code=2)
    assert f"memory:///wrong/a.json.gz: {message}" in printed
    assert (tmp_path / "out/train/index.json").read_bytes() == before
    printed = prepare(*out, "memory://wrong/*", "--field", "data.text")
    assert "a stream of 1 file," in printed and "wrong/dataset_infos.json" in printed
    assert take(opened(tmp_path / "out/train"), range(1))


def test_a_stream_of_arrays_has_the_rows_of_lines_and_resumes(tmp_path, monkeypatch):
    """Its identity has the form only if --format names it, so that older streams resume."""
    monkeypatch.setattr(text, "_PIECE", 60)
    records = [{"text": f"{i} " + "x" * (i % 9)} for i in range(90)]
    lines, array = jsonl(*(record["text"] for record in records)), json.dumps(records).encode()
    (tmp_path / "x.json").write_bytes(lines)
    out = ("--stream", "--shuffle-tokens", 100, "--input", tmp_path / "x.json", "--output")
    prepare(*out, tmp_path / "lines")
    rows = take(opened(tmp_path / "lines/train"), range(32))
    (tmp_path / "x.json").write_bytes(array)
    digests = []
    for form in ((), ("--format", ARRAY)):
        prepare(*out, tmp_path / "array", *form, "--overwrite")
        stream, resumed = (opened(tmp_path / "array/train") for _ in range(2))
        digests.append(stream.identity["digest"])
        assert take(stream, range(16)) == rows[:16]
        state = json.loads(json.dumps(stream.state(16)))
        assert state["lanes"][0]["line"] > 1
        resumed.restore(state)
        assert take(resumed, range(16, 32)) == rows[16:]
    facts = json.dumps([[[str(tmp_path / "x.json"), len(array)]], "text"])
    assert digests[0] == hashlib.sha256(facts.encode()).hexdigest() != digests[1]
