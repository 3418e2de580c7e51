"""CPM-Live's data: text to segments, and instances on disk."""

# ruff: noqa: F811 - folders and words are fixtures

import itertools
import json
import os
import shutil
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from models.cpm_live.config import PRESETS
from models.cpm_live.scores import ant_scores
from tests.live import ANT_FIELDS, BEE_FIELDS, golden
from tests.live_folders import LINES, ant_folder, bee_folder, golden_words, prepare_lines, written  # noqa: F401
from tests.preparing import edit_index, prepare
from train.cpm_live.data import InstanceFile
from train.cpm_live.instances import COLUMNS, Instance, bee_instance, shuffle_answers
from train.cpm_live.rows import AntRows, ant_row, bee_row, hide
from train.cpm_live.stored import AntWriter
from train.cpm_live.tokenizers import AntGreedyTokenizer
from train.data.folder import TokenFile
from train.data.tokenizer import load_tokenizer

BEE, ANT = golden("bee").config, golden("ant").config
EOS = 7


def golden_instances() -> list[list]:
    """Return the golden batch as lines of data, read off its trees and tokens."""
    nested = {written(13): written("<mask_0>", 5, 59, 5, "<mask_1>")}
    main = {written(11): {written(12): nested, written(14): written(60)}}
    main["<ans>"] = {"<mask_0>": written(75, 5, "<mask_1>", 5, 70), "<mask_1>": written(73)}
    samples = [{written(11): {written(12): written(66)}, "<ans>": written(76)}]
    samples += [{written(11): written(78), "<ans>": written(79)}]
    second = {written(27): written(94, 50, 5, 93, 5, 91, 5, 86), "<ans>": written(41, 39, 44)}
    tokens, subs = (golden("bee").input[name][1].tolist() for name in ("input", "input_sub"))
    texts = [
        written("XY"[sub] if token == 1 else token) for token, sub in zip(tokens, subs, strict=True)
    ]
    return [
        [[main, *samples], second],
        [{written(27): "".join(texts[7:74]), "<ans>": "".join(texts[79:86])}],
    ]


def test_rows_are_those_of_cpm_lives_packer(golden_words):
    """The golden batch has nested keys, sub-ids, in-context samples and padding."""
    expected = golden("bee").input
    tables = (expected[f"ext_table_{name}"].tolist() for name in ("ids", "sub"))
    extended = list(zip(*tables, strict=True))
    for i, lines in enumerate(golden_instances()):
        row = bee_row(BEE, [bee_instance(golden_words, line)[0] for line in lines], 96, EOS)
        assert row.fields.keys() == set(BEE_FIELDS) | {"input", "input_sub"}
        for name, found in row.fields.items():
            whole = expected[name][i]
            if name == "segment_rel":
                assert not whole[len(found) :].any()
                whole = whole[: len(found)]
            assert found.equal(whole), name
            assert found.dtype == whole.dtype, name
        pairs = zip(row.targets.tolist(), row.target_subs.tolist(), strict=True)
        targets = [120 + extended.index(p) if p[1] else p[0] for p in pairs]
        assert targets == expected["target"][i].tolist()
        assert row.instances == len(lines)
        scores = golden("bee").scores()[i]
        assert row.scores.mask == scores.mask
        assert row.scores.dense().equal(scores.dense())


def test_an_ants_row_by_hand():
    texts = [np.array([6, 50, 51, 52, 7]), np.array([6, 60, 61, 7])]
    hidden = [np.array([0, 1, 0, 1, 1], dtype=bool), np.array([0, 0, 1, 1], dtype=bool)]
    row = ant_row(ANT, texts, [1, 2], hidden, 30)
    f = row.fields
    assert f.keys() == {*ANT_FIELDS, "input"}
    assert f["input"].tolist() == [*range(8, 16), *texts[0], *range(16, 24), *texts[1], *[0] * 5]
    assert f["segment"].tolist() == [0] * 8 + [1] * 5 + [0] * 8 + [2] * 4 + [0] * 5
    assert f["span"].tolist() == [0] * 13 + [1] * 12 + [2] * 5
    assert np.flatnonzero(~f["context"][:25]).tolist() == [9, 11, 12, 23, 24]
    assert int(f["length"]) == 25
    expected = {8: 50, 10: 52, 11: 7, 22: 61, 23: 7}
    assert {p: t for p, t in enumerate(row.targets.tolist()) if t != -100} == expected
    assert row.scores == ant_scores(ANT, *(f[name] for name in ANT_FIELDS))


@pytest.mark.parametrize("tokens", [2, 20, 100_000])
def test_what_is_hidden(tokens):
    chance = np.random.default_rng(0)
    tails = [hide(tokens, 2, chance) for _ in range(20)]
    assert all(not t[0] and t[-1] and (np.diff(t.astype(int)) >= 0).all() for t in tails)
    subsets = [hide(tokens, 1, chance) for _ in range(20)]
    assert not any(s[0] for s in subsets)
    assert all(1 <= s.sum() <= max(0.16 * tokens + 1, 1) for s in subsets)
    # slices of a mask grow with the square
    assert all((np.diff(s.astype(int)) == 1).sum() <= 16 for s in subsets)
    assert tokens < 20 or len({s.tobytes() for s in subsets}) > 1


def test_answers_are_shuffled_with_their_trees(golden_words):
    """All levels under <ans> get other orders. Paths and texts stay, and nothing else moves."""
    answers = {
        written(20 + i): {written(30 + i): written(40 + i), written(50): written(60 + i)}
        for i in range(3)
    }
    line = [{"<ans>": answers, written(12): {written(13): written(14), written(15): written(16)}}]
    alone = {written(11): written(78), "<ans>": written(79)}
    instance, _ = bee_instance(golden_words, [*line, alone])
    orders, chance = set(), np.random.default_rng(0)
    for _ in range(60):
        found = shuffle_answers(instance, chance)
        assert paths(found) == paths(instance)
        answer = int(instance.segments[:-5, COLUMNS.tokens][:2].sum())
        end = answer + 3 * (3 + 2 * (3 + 2))  # three keys, below each two keys with a text
        for part in (slice(answer), slice(end, None)):
            assert found.tokens[part].tolist() == instance.tokens[part].tolist()
        assert found.segments[-5:].tolist() == instance.segments[-5:].tolist()
        orders.add(tuple(found.tokens.tolist()))
    assert len(orders) > 20  # of 48
    instance, _ = bee_instance(golden_words, alone)
    assert shuffle_answers(instance, chance) is instance


def paths(instance) -> dict:
    """Return the texts of all samples by the keys that lead to them."""
    texts = np.split(instance.tokens, np.cumsum(instance.segments[:, COLUMNS.tokens])[:-1])
    found, first = {}, {}
    for i, (_, parent, sample, _) in enumerate(instance.segments.tolist()):
        first.setdefault(sample, i)
        found[i] = (
            *(found[first[sample] + parent] if parent >= 0 else ()),
            sample,
            tuple(texts[i].tolist()),
        )
    return {path: instance.segments[i, COLUMNS.kind] for i, path in found.items()}


def test_instances_come_back_from_disk(bee_folder):
    tokenizer, found = load_tokenizer(bee_folder / "train"), []
    for part in ("train", "val"):
        file = InstanceFile(bee_folder / part, "cpm-bee")
        assert file.index["instances"] == "cpm-bee"
        found += [file.instance(i) for i in range(file.index["documents"])]
    expected = [bee_instance(tokenizer, line)[0] for line in LINES]
    assert len(found) == len(expected)
    key = [
        [tuple(x.flatten().tolist()) for x in vars(instance).values()]
        for instance in (*found, *expected)
    ]
    assert sorted(key[: len(found)]) == sorted(key[len(found) :])


def test_an_ants_instances_begin_and_end(ant_folder):
    file = InstanceFile(ant_folder / "train", "cpm-ant")
    instances = [file.instance(i) for i in range(31)]
    assert all(x.tokens[0] == 6 and x.tokens[-1] == 7 and 6 not in x.tokens[1:] for x in instances)
    assert [x.segments[0, COLUMNS.kind] for x in instances] == [2, 1] * 15 + [2]
    text = load_tokenizer(ant_folder / "train").decode(instances[-1].tokens)
    assert text == "def y(x)\n" * 40


class Spelled(AntGreedyTokenizer):
    """Ids stand for themselves."""

    def __init__(self):
        self.vocab_size, self.bos_id, self.eos_id, self.file = 100, 6, 7, None
        self.vocabulary = SimpleNamespace(pieces=[])


def ant_pieces(count, tokens):
    for _ in range(count):
        yield Instance(
            np.full(tokens, 50),
            np.zeros(tokens, dtype=int),
            np.array([[tokens, -1, 0, 2]], dtype=np.int32),
        )


@pytest.fixture
def peak():
    """Return the most memory that Python and numpy had since the test began, in MiB."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()


def test_a_long_text_streams_to_disk_and_its_parts_are_read_alone(tmp_path, peak, monkeypatch):
    """6M tokens arrive as 96 MiB. Writing, dividing and reading hold a few pieces each."""
    writer = AntWriter(tmp_path / "whole", Spelled())
    writer.write(ant_pieces(0, 1))
    writer.write(ant_pieces(3, 0))
    for _ in range(2):
        writer.write(itertools.chain(ant_pieces(1, 0), ant_pieces(60, 100_000)))
    writer.finish()
    copied = AntWriter(tmp_path / "copied", Spelled())
    copied.copy(writer, 1, 2)
    copied.finish()
    assert peak() < 48
    for folder, count in (("whole", 2), ("copied", 1)):
        file = InstanceFile(tmp_path / folder, "cpm-ant")
        assert file.all.lengths.tolist() == [6_000_002] * count
        tokens = file.instance(count - 1).tokens
        assert tokens[0] == 6 and tokens[-1] == 7 and (tokens[1:-1] == 50).all()
    rows, read = AntRows(file, PRESETS["cpm-ant-tiny"], 1024, 0), []
    pread = os.pread
    monkeypatch.setattr(
        os, "pread", lambda at, size, place: read.append(size) or pread(at, size, place)
    )
    rows.read(0)
    assert 1000 * 4 < sum(read) < 1024 * 4 + 100  # tokens and sub-ids of 2 bytes, and a segment


def test_a_text_of_too_many_tokens_is_refused(tmp_path):
    writer = AntWriter(tmp_path / "out", Spelled())

    def endless():
        yield from ant_pieces(1, 9)
        writer.tokens += 2**31  # which would take long to write
        yield from ant_pieces(1, 9)

    with pytest.raises(ValueError, match=r"fewer than 2\^31 tokens in a text, got 2,147,483,668"):
        writer.write(endless())


def test_lines_that_are_no_instances_are_counted_and_reported(tmp_path):
    wrong = [
        ({"head": "x"}, "there is no text under the key <ans>"),
        ({"head": 3, "<ans>": "x"}, "the value of 'head' must be a text or an object, got int"),
        ("[]", "in-context samples, got an empty list"),
        ([{"<ans>": "x"}, "text"], "expected an object of texts and objects, got str"),
        ({"a < b": "x", "<ans>": "x"}, "begins with < but is not a special token"),
        ({"a": "\ud800", "<ans>": "x"}, "not Unicode: surrogates not allowed"),
        ("{", "not JSON"),
        ({"<ans>": {str(i): "x" for i in range(1100)}}, "at most 2048 keys and texts, got 2202"),
    ]
    lines = [line for line, _ in wrong] + [{"<ans>": "x"}]
    printed = prepare_lines(tmp_path / "bee", lines, code=2)
    assert "8 of 9 lines are bad, more than --max-bad 0.01" in printed
    assert "8 bad lines were skipped" in prepare_lines(tmp_path / "bee", lines, "--max-bad", 0.9)
    index = json.loads((tmp_path / "bee/train/index.json").read_text())
    for (_, reason), line in zip(wrong, index["first_bad_lines"], strict=True):
        assert reason in line
    assert index["documents"] == 1
    (tmp_path / "x.txt").write_text("text")
    tokenizer = ("--tokenizer", f"cpm-bee:{tmp_path}/bee.txt", "--output", tmp_path / "out")
    printed = prepare("--input", tmp_path / "x.txt", *tokenizer, code=2)
    assert "CPM-Bee reads .jsonl: put a text into an object" in printed
    ants = [{"text": "a", "task": "other"}, {"text": "a", "task": []}, {"text": 3}]
    printed = prepare_lines(tmp_path / "ant", ants, model="cpm-ant", code=2)
    assert "task must be one of mlm, lm, got 'other'" in printed


def test_characters_that_an_ant_leaves_out_are_counted_and_reported(tmp_path):
    """By several processes."""
    lines = [{"text": "déf f(é)é"}] * 700 + [{"text": "é", "task": "none"}, {"text": "é"}]
    printed = prepare_lines(tmp_path / "x", lines, "--workers", 2, model="cpm-ant")
    assert "\n2,101 characters that the vocabulary lacks were left out\n" in printed
    assert InstanceFile(tmp_path / "x/train", "cpm-ant").index["left_out_characters"] == 2101
    printed = prepare_lines(tmp_path / "y", [{"text": "def"}], model="cpm-ant")
    assert "left out" not in printed


def test_folders_of_other_data_and_damaged_ones_are_refused(bee_folder, ant_folder, tmp_path):
    folder = shutil.copytree(bee_folder / "train", tmp_path / "bee")

    def check(message, open_file):
        with pytest.raises(ValueError, match=message):
            open_file()

    def bees():
        return InstanceFile(folder, "cpm-bee")

    other = "holds instances of cpm-ant, but this model reads instances of cpm-bee"
    check("of cpm-bee, but this model reads plain text", lambda: TokenFile(folder))
    check(other, lambda: InstanceFile(ant_folder / "train", "cpm-bee"))
    segments = folder / "segments.bin"
    data = bytearray(segments.read_bytes())
    data[0] += 1
    segments.write_bytes(bytes(data))
    check("segments.bin was changed", bees)
    edit_index(folder, "segments.bin")
    check("the segments of instance 0 do not match its tokens", lambda: bees().instance(0))
    (folder / "subs.bin").unlink()
    check("has no subs.bin", bees)
