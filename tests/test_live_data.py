"""CPM-Live's data: text to tokens, instances on disk, rows packed with them, and what ranks have of
these.
"""

import errno
import functools
import itertools
import json
import os
import shutil
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bmt_burst import SequenceParallel
from bmt_burst.calls.masking import stack_scores
from models.cpm_live import scores as live_scores
from models.cpm_live.config import PRESETS
from models.cpm_live.scores import bee_scores
from tests.live import ANT_FIELDS, BEE_FIELDS, changed, golden
from tests.preparing import prepare
from train import make_vocabulary
from train.cpm_live import rows as live_rows
from train.cpm_live.batches import AntBatches, BeeBatches
from train.cpm_live.data import InstanceFile
from train.cpm_live.instances import COLUMNS, BadRecord, Instance, bee_instance, shuffle_answers
from train.cpm_live.packing import pack_rows
from train.cpm_live.rows import AntRows, BeeRows, ant_row, bee_row, hide, relation
from train.cpm_live.stored import AntWriter
from train.cpm_live.tokenizers import AntGreedyTokenizer, BeeTokenizer, SubIds
from train.data.folder import TokenFile
from train.data.tokenizer import load_tokenizer, open_tokenizer
from train.run import resume
from train.run.config import TrainConfig
from train.run.kinds import config_of, kind_of

BEE, ANT = golden("bee").config, golden("ant").config
EOS = 7


def write_vocabulary(file, *pieces, model="cpm-bee"):
    file.write_text("".join(f"{piece}\n" for piece in (*make_vocabulary.SPECIAL[model], *pieces)))
    return file


@pytest.fixture
def golden_words(tmp_path) -> BeeTokenizer:
    """Token i of the golden batch's vocabulary as a character of its own."""
    return BeeTokenizer(
        write_vocabulary(tmp_path / "words.txt", *(chr(0x4E00 + i) for i in range(11, 120)))
    )


def written(*tokens) -> str:
    return "".join(t if isinstance(t, str) else " " if t == 5 else chr(0x4E00 + t) for t in tokens)


def golden_instances() -> list[list]:
    """What the golden batch was made of, as lines of data: read off its trees and tokens."""
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
    """Every field and target of the golden batch, from text: nested keys, sub-ids, in-context
    samples, padding.
    """
    expected = golden("bee").input
    extended = list(
        zip(expected["ext_table_ids"].tolist(), expected["ext_table_sub"].tolist(), strict=True)
    )
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
        assert [120 + extended.index(p) if p[1] else p[0] for p in pairs] == expected["target"][
            i
        ].tolist()
        assert row.instances == len(lines)
        scores = golden("bee").scores()[i]
        assert row.scores.mask == scores.mask
        assert row.scores.dense().equal(scores.dense())


def test_a_tree_by_hand(golden_words):
    """Keys and texts are segments, each from <s> to </s>, texts under <ans> without that."""
    instance, _ = bee_instance(
        golden_words, {written(20): written(30, 31), "<ans>": {written(21): written(32)}}
    )
    assert instance.tokens.tolist() == [6, 8, 7, 6, 20, 7, 6, 30, 31, 7, 6, 9, 7, 6, 21, 7, 6, 32]
    assert instance.segments.tolist() == [
        [3, -1, 0, 0], [3, 0, 0, 0], [4, 1, 0, 0], [3, 0, 0, 0], [3, 3, 0, 0], [2, 4, 0, 1],
    ]  # fmt: skip
    row = bee_row(BEE, [instance], 20, EOS)
    assert row.targets.tolist() == [-100] * 16 + [32, 7] + [-100] * 2
    # 3 up and 0, 1, 2 down; 2, 1 up
    assert row.fields["segment_rel"].view(6, 6)[5].tolist() == [16, 17, 18, 11, 6, 0]


def dense(row, sample_rule: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask, and for which pairs all of what groups tokens is alike, written out."""
    f, at = row.fields, torch.arange(len(row.targets))
    q, k = at.unsqueeze(1), at
    sample = f.get("sample_ids", torch.zeros_like(at))
    both = (q < f["length"]) & (k < f["length"]) & (f["span"][q] == f["span"][k])
    order = f["context"][k] | (~f["context"][q] & (k <= q))
    samples = (sample[q] == 0) | (sample[q] == sample[k])
    return both & order & (samples if sample_rule else True), both & (sample[q] == sample[k])


def by_distance(config, size) -> torch.Tensor:
    """(size, size) rows of pairs of one segment, in Python's own numbers."""
    half = config.position_bias_num_buckets // 2
    exact, distances = half // 2, range(-size + 1, size)
    rows = {}
    for d in distances:
        a = abs(d)
        if a >= exact:
            ratio = np.float32(np.log(np.float32(a / exact))) / np.float32(
                np.log(config.position_bias_max_distance / exact)
            )
            a = min(half - 1, exact + int(ratio * (half - exact)))
        rows[d] = a + half * (d > 0)
    return torch.tensor([[rows[k - q] for k in range(size)] for q in range(size)])


def test_scores_of_a_packed_bees_row_are_the_dense_formulas(golden_words):
    lines = golden_instances()[0]
    row = bee_row(
        BEE,
        [bee_instance(golden_words, line)[0] for line in (lines[1], lines[0], lines[1])],
        130,
        EOS,
    )
    visible, together = dense(row, sample_rule=True)
    assert row.scores.mask.dense().equal(visible)
    f, at = row.fields, torch.arange(130)
    q, k, buckets = at.unsqueeze(1), at, BEE.position_bias_num_buckets
    entry = (f["segment"] * f["num_segments"] + f["segment_rel_offset"])[q] + f["segment"][k]
    related = f["segment_rel"][entry.where(together, 0)].where(together, 1).long()
    expected = torch.where(related == 0, by_distance(BEE, 130), buckets - 1 + related)
    assert row.scores.dense()[visible].equal(expected[visible])
    assert {0, 1} < set(related[visible].tolist())


def test_an_ants_row_by_hand_and_by_dense_formulas():
    texts = [np.array([6, 50, 51, 52, 7]), np.array([6, 60, 61, 7])]
    hidden = [np.array([0, 1, 0, 1, 1], dtype=bool), np.array([0, 0, 1, 1], dtype=bool)]
    row = ant_row(ANT, texts, [1, 2], hidden, 30)
    f = row.fields
    assert f["input"].tolist() == [*range(8, 16), *texts[0], *range(16, 24), *texts[1], *[0] * 5]
    assert f["segment"].tolist() == [0] * 8 + [1] * 5 + [0] * 8 + [2] * 4 + [0] * 5
    assert f["span"].tolist() == [0] * 13 + [1] * 12 + [2] * 5
    assert (
        f["context"].tolist()
        == [True] * 9 + [False, True, False, False] + [True] * 10 + [False] * 7
    )
    assert int(f["length"]) == 25
    expected = {8: 50, 10: 52, 11: 7, 22: 61, 23: 7}
    assert {p: t for p, t in enumerate(row.targets.tolist()) if t != -100} == expected
    assert row.fields.keys() == {*ANT_FIELDS, "input"}
    visible, _ = dense(row, sample_rule=False)
    assert row.scores.mask.dense().equal(visible)
    types = f["segment"].long()
    other = ANT.position_bias_num_buckets + ANT.segment_types * types.unsqueeze(1) + types
    rows = torch.where(types.unsqueeze(1) == types, by_distance(ANT, 30), other)
    assert row.scores.dense()[visible].equal(rows[visible])


def test_the_golden_ants_targets_follow_from_what_is_hidden():
    """Every hidden token is the target of the one before it, in a segment that begins with one that
    is not hidden.
    """
    fields = golden("ant").input
    for row in range(2):
        hidden = ~fields["context"][row] & (torch.arange(96) < fields["length"][row])
        expected = torch.full((96,), -100)
        expected[:-1][hidden[1:]] = fields["input"][row].long()[1:][hidden[1:]]
        assert expected.equal(fields["target"][row])


@pytest.mark.parametrize("tokens", [2, 3, 20, 500, 100_000])
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


def test_steps_to_the_common_ancestor_are_capped():
    parents = np.array([-1, 0, 1, 2, 3, 0], dtype=np.int32)
    assert relation(parents, 3).tolist()[4] == [7, 7, 7, 4, 0, 8]
    assert relation(parents, 8)[4, 5] == 1 + 4 * 8 + 1
    line = np.arange(-1, 99, dtype=np.int32)
    assert relation(line, 8).max() == 1 + 7 * 8
    assert (relation(line, 8) == 1).sum() == 0


def test_answers_are_shuffled_with_their_trees(golden_words):
    """The same paths and texts, in other orders, of all levels under <ans>, and nothing else
    moves.
    """
    answers = {
        written(20 + i): {written(30 + i): written(40 + i), written(50): written(60 + i)}
        for i in range(3)
    }
    line = [{"<ans>": answers, written(12): {written(13): written(14), written(15): written(16)}}]
    instance, _ = bee_instance(
        golden_words, [*line, {written(11): written(78), "<ans>": written(79)}]
    )
    orders, chance = set(), np.random.default_rng(0)
    for _ in range(60):
        found = shuffle_answers(instance, chance)
        assert paths(found) == paths(instance)
        answer = int(instance.segments[:-5, COLUMNS.tokens][:2].sum())
        end = answer + 3 * (3 + 2 * (3 + 2))  # three keys, below each two keys with a text
        assert found.tokens[:answer].tolist() == instance.tokens[:answer].tolist()
        assert found.tokens[end:].tolist() == instance.tokens[end:].tolist()
        assert found.segments[-5:].tolist() == instance.segments[-5:].tolist()
        orders.add(tuple(found.tokens.tolist()))
    assert len(orders) > 20  # of 48
    alone, _ = bee_instance(golden_words, {written(11): written(78), "<ans>": written(79)})
    assert shuffle_answers(alone, chance) is alone


def paths(instance) -> dict:
    """Texts by what leads to them, of all samples."""
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


# Tokenizers


@pytest.fixture
def words(tmp_path):
    pieces = [
        "a",
        "ab",
        "abc",
        "b",
        "c",
        "<",
        ">",
        "ans",
        "ring ring",
        "x" * 33,
        "x",
        "\t",
        "<mark>",
    ]
    return BeeTokenizer(write_vocabulary(tmp_path / "bee.txt", *pieces))


@pytest.mark.parametrize(
    "text",
    [
        "abcab\n b",
        "a<<ans>b",
        "<<<ans>>",
        "<mark_2>a<mark_3><mark_2>",
        "éèa<<é",
        "x" * 70,
        "ring ring ring",
        "",
        "\ta",
    ],
)
def test_a_bees_text_comes_back(words, text):
    sub_ids = SubIds()
    pieces = words.pieces(text)
    assert (
        words.text([(token, sub_ids.of(token, named)) for token, named in pieces], sub_ids) == text
    )


def test_a_bees_pieces(words):
    ids = {piece: i for i, piece in enumerate(words.vocabulary.pieces)}
    assert words.encode("abcabb").tolist() == [ids["abc"], ids["ab"], ids["b"]]
    assert words.encode("\n ").tolist() == [4, 5]
    assert words.encode("<ans>").tolist() == [9]
    # text never spells a special token
    assert words.encode("<<ans>").tolist() == [ids["<"], ids["ans"], ids[">"]]
    assert words.encode("x" * 33).tolist() == [ids["x"]] * 33  # pieces have 32 characters at most
    assert words.pieces("éèaé") == [(1, "éè"), (ids["a"], None), (1, "é")]
    assert words.pieces("<mark_2>") == [(ids["<mark>"], "<mark_2>")]
    sub_ids = SubIds()
    assert [sub_ids.of(3, t) for t in ("u", None, "v", "u", "w")] == [0, 0, 1, 0, 2]
    assert sub_ids.of(4, "v") == 0
    assert words.decode([ids["a"], ids["<mark>"], ids["<"]]) == "a<mark><<"
    assert words.text([(ids["<mark>"], 5)]) == "<mark_5>"
    # as CPM-Live has it: one token
    assert {sub_ids.of(*piece) for piece in words.pieces("<mark><mark_1>")} == {0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a < b", "'< b' begins with < but is not a special token"),
        ("<gone>", "<gone> is not a special token of .*bee.txt"),
        ("<gone_1>", "<gone_1> is not a special token"),
        ("<>", "'<>' is not a special token: it has no name"),
    ],
)
def test_a_bees_text_that_names_what_is_not_there_is_refused(words, text, message):
    with pytest.raises(BadRecord, match=message):
        words.encode(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<pad>\n<unk>\n<s>\n</s>\n", "has no line <root>"),
        (b"<pad>\n<unk>\n\n", "expected a piece of text that no other line has, got '' in line 3"),
        (b"<pad>\na\na\n", "a piece of text that no other line has, got 'a' in line 2"),
        (b"<pad>\n\xff\n", "is not UTF-8: invalid start byte at byte 6"),
    ],
)
def test_wrong_vocabularies_are_refused(tmp_path, content, message):
    (tmp_path / "v.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"cannot read tokenizer .*v.txt: .*{message}"):
        open_tokenizer(f"cpm-bee:{tmp_path / 'v.txt'}")
    with pytest.raises(ValueError, match="no tokenizer file"):
        open_tokenizer(f"cpm-ant-greedy:{tmp_path / 'none.txt'}")


def test_tokenizers_are_saved_and_loaded(words, tmp_path):
    words.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert type(loaded) is BeeTokenizer
    assert loaded.encode("abc ring").tolist() == words.encode("abc ring").tolist()
    assert (loaded.instances, loaded.vocab_size) == ("cpm-bee", len(words.vocabulary))


def ant_words(tmp_path, *pieces):
    return write_vocabulary(tmp_path / "ant.txt", *pieces, model="cpm-ant")


def test_an_ants_text_without_words(tmp_path):
    tokenizer = AntGreedyTokenizer(ant_words(tmp_path, "a", "ab", "b", "<", ">", "s"))
    assert tokenizer.decode(tokenizer.encode("abba\n <s>")) == "abba\n <s>"
    # the unknown left out, no special token made
    assert tokenizer.encode("abéb<s>").tolist() == [11, 12, 13, 15, 14]
    assert tokenizer.decode([6, 10, 8, 7]) == "a"


def test_an_ants_text_is_cut_into_jiebas_words_first(tmp_path, monkeypatch):
    file = ant_words(tmp_path, "a", "ab", "b")
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ValueError, match=r"needs the package jieba .* cpm-ant-greedy:FILE"):
        open_tokenizer(f"cpm-ant:{file}")
    module = type(
        "Jieba",
        (),
        {"cut": staticmethod(lambda text: list(text)), "setLogLevel": staticmethod(str)},
    )
    monkeypatch.setitem(sys.modules, "jieba", module)
    # no piece spans two words
    assert open_tokenizer(f"cpm-ant:{file}").encode("ab").tolist() == [10, 12]
    assert open_tokenizer(f"cpm-ant-greedy:{file}").encode("ab").tolist() == [11]


def test_vocabularies_are_made_of_characters_and_frequent_words(tmp_path):
    lines = [{"ring <<": "def def return", "<ans>": {"<mask_1>": "é"}}] * 3 + ["a < b"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [
        "--model",
        "cpm-bee",
        "--input",
        str(tmp_path / "in.jsonl"),
        "--output",
        str(tmp_path / "v.txt"),
    ]
    make_vocabulary.main([*flags, "--size", "24", "--special", "<mark>"])
    pieces = (tmp_path / "v.txt").read_text().split("\n")[:-1]
    assert pieces[:12] == [*make_vocabulary.SPECIAL["cpm-bee"], "<mark>"]
    assert pieces[12:] == ["e", "r", "d", "f", "n", "<", "return", "def", "ring"]
    tokenizer = BeeTokenizer(tmp_path / "v.txt")
    assert tokenizer.encode("return ring").tolist() == [18, 5, 20]
    for flag, message in (
        (["--size", "11"], "must leave room"),
        (["--special", "x"], "--special expects different names"),
    ):
        with pytest.raises(SystemExit):
            make_vocabulary.main([*flags[:4], "--output", str(tmp_path / "w.txt"), *flag])
        assert not (tmp_path / "w.txt").exists(), message


def test_vocabularies_are_written_whole_or_not_at_all(tmp_path, capsys, monkeypatch):
    """Half characters, of which no file can be made, are bad lines, as they are to
    prepare_data.py.
    """
    file = as_jsonl(
        tmp_path / "in.jsonl", [{"a": "\ud800\ud800 x"}, {"\udfff": "x"}, {"a": "ab ab"}]
    )
    flags = ["--model", "cpm-ant", "--input", str(file), "--output", str(tmp_path / "v.txt")]
    make_vocabulary.main(flags)
    assert (tmp_path / "v.txt").read_text().split("\n")[10:-1] == ["a", "b", "ab"]
    assert "2 bad lines were skipped" in capsys.readouterr().err

    def fails(*flags):
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(SystemExit):
            make_vocabulary.main([*flags])
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        return capsys.readouterr().err

    assert "v.txt exists and is not replaced" in fails(*flags)
    flags[-1] = str(tmp_path / "w.txt")
    assert "not Unicode: surrogates not allowed at character 1" in fails(
        *flags, "--special", "<\udcff>"
    )

    def full(path, text, **_):
        path.write_bytes(text.encode()[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left on device: '" in fails(*flags)


# On disk


LINES = [
    {
        "head": f"def f{i}(x)",
        "file": {"name": "a.py", "of <mask_1>": "x <mask_0>"},
        "<ans>": {"body": "y" * (i % 7 + 1)},
    }
    for i in range(40)
]
LINES = [[line, LINES[i - 1]] if i % 5 == 0 else line for i, line in enumerate(LINES)]
LETTERS = sorted({c for c in json.dumps(LINES) if c not in ' <"'} | {"def"})


def as_jsonl(file, lines):
    file.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return file


@pytest.fixture(scope="module")
def bee_folder(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("bee")
    vocabulary = write_vocabulary(tmp_path / "bee.txt", *LETTERS)
    as_jsonl(tmp_path / "bee.jsonl", LINES)
    arguments = ("--input", tmp_path / "bee.jsonl", "--tokenizer", f"cpm-bee:{vocabulary}")
    prepare(*arguments, "--output", tmp_path / "bee", "--val-fraction", 0.2)
    return tmp_path / "bee"


@pytest.fixture(scope="module")
def ant_folder(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("ant")
    vocabulary = ant_words(tmp_path, *LETTERS)
    texts = [{"text": "def f(x)" * (i % 9 + 1), "task": ("lm", "mlm")[i % 2]} for i in range(30)]
    as_jsonl(tmp_path / "ant.jsonl", texts)
    (tmp_path / "long.txt").write_text("def y(x)\n" * 40)
    arguments = ("--input", tmp_path / "ant.jsonl", tmp_path / "long.txt")
    prepare(*arguments, "--tokenizer", f"cpm-ant-greedy:{vocabulary}", "--output", tmp_path / "ant")
    return tmp_path / "ant"


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
    """The most memory that Python and numpy had since the test began, MiB."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()


def test_a_long_text_streams_to_disk_and_its_parts_are_read_alone(tmp_path, peak, monkeypatch):
    """6M tokens, of which 96 MiB as they come: neither writing, dividing nor reading has more than
    a few pieces.
    """
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


def test_lines_that_are_no_instances_are_counted_and_said(tmp_path):
    vocabulary = write_vocabulary(tmp_path / "bee.txt", *LETTERS)
    wrong = [
        ({"head": "x"}, "there is no text under the key <ans>"),
        ({"head": 3, "<ans>": "x"}, "the value of 'head' must be a text or an object, got int"),
        ("[]", "in-context samples, got an empty list"),
        ([{"<ans>": "x"}, "text"], "expected an object of texts and objects, got str"),
        ({"a < b": "x", "<ans>": "x"}, "begins with < but is not a special token"),
        ({"a": "\ud800", "<ans>": "x"}, "not Unicode: surrogates not allowed"),
        ("{", "not JSON"),
        (
            {"<ans>": {str(i): "x" for i in range(1100)}},
            "expected at most 2048 keys and texts, got 2202",
        ),
    ]
    as_jsonl(tmp_path / "x.jsonl", [line for line, _ in wrong] + [{"<ans>": "x"}])
    arguments = ("--tokenizer", f"cpm-bee:{vocabulary}", "--output", tmp_path / "out")
    assert "8 of 9 lines are bad, more than --max-bad 0.01" in prepare(
        "--input", tmp_path / "x.jsonl", *arguments, code=2
    )
    arguments += ("--max-bad", 0.9)
    said = prepare("--input", tmp_path / "x.jsonl", *arguments)
    assert "8 bad lines were skipped" in said
    index = json.loads((tmp_path / "out/train/index.json").read_text())
    for (_, reason), line in zip(wrong, index["first_bad_lines"], strict=True):
        assert reason in line
    assert index["documents"] == 1
    (tmp_path / "x.txt").write_text("text")
    said = prepare("--input", tmp_path / "x.txt", *arguments, "--overwrite", code=2)
    assert "CPM-Bee reads .jsonl: put a text into an object" in said
    as_jsonl(
        tmp_path / "y.jsonl",
        [{"text": "a", "task": "other"}, {"text": "a", "task": []}, {"text": 3}],
    )
    ants = ("--tokenizer", f"cpm-ant-greedy:{vocabulary}", "--output", tmp_path / "ants")
    assert "task must be one of mlm, lm, got 'other'" in prepare(
        "--input", tmp_path / "y.jsonl", *ants, code=2
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_characters_that_an_ant_leaves_out_are_counted_and_said(tmp_path, workers):
    vocabulary = ant_words(tmp_path, *LETTERS)
    as_jsonl(
        tmp_path / "x.jsonl",
        [{"text": "déf f(é)é"}] * 700 + [{"text": "é", "task": "none"}, {"text": "é"}],
    )
    (tmp_path / "y.txt").write_text("def é")
    arguments = (
        "--tokenizer",
        f"cpm-ant-greedy:{vocabulary}",
        "--output",
        tmp_path / "x",
        "--workers",
        workers,
    )
    said = prepare("--input", tmp_path / "x.jsonl", tmp_path / "y.txt", *arguments)
    assert "\n2,102 characters that the vocabulary lacks were left out\n" in said
    assert InstanceFile(tmp_path / "x/train", "cpm-ant").index["left_out_characters"] == 2102
    (tmp_path / "y.txt").write_text("def")
    assert "left out" not in prepare("--input", tmp_path / "y.txt", *arguments, "--overwrite")


def test_workers_and_a_split_by_number(tmp_path):
    vocabulary = write_vocabulary(tmp_path / "bee.txt", *LETTERS)
    as_jsonl(tmp_path / "x.jsonl", LINES[:4])
    arguments = ("--input", tmp_path / "x.jsonl", "--tokenizer", f"cpm-bee:{vocabulary}")
    for workers in (1, 2):
        prepare(*arguments, "--output", tmp_path / str(workers), "--workers", workers)
    files = [sorted((tmp_path / f"{w}/train").iterdir()) for w in (1, 2)]
    assert [f.name for f in files[0]] == [f.name for f in files[1]]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))
    said = prepare(*arguments, "--output", tmp_path / "split", "--val-fraction", 1e-9)
    assert "4 documents are too few to choose from: the last instances are for validation" in said
    parts = [InstanceFile(tmp_path / "split" / part, "cpm-bee") for part in ("train", "val")]
    assert [len(part.all.lengths) for part in parts] == [3, 1]
    whole = InstanceFile(tmp_path / "1/train", "cpm-bee")
    assert parts[1].instance(0).tokens.tolist() == whole.instance(3).tokens.tolist()


def test_folders_of_other_data_and_damaged_ones_are_refused(bee_folder, ant_folder, tmp_path):
    bee_folder = shutil.copytree(bee_folder, tmp_path / "bee")
    with pytest.raises(
        ValueError, match=r"holds instances of cpm-bee, but this model reads plain text"
    ):
        TokenFile(bee_folder / "train")
    with pytest.raises(
        ValueError, match="holds instances of cpm-ant, but this model reads instances of cpm-bee"
    ):
        InstanceFile(ant_folder / "train", "cpm-bee")
    segments = bee_folder / "train/segments.bin"
    data = bytearray(segments.read_bytes())
    data[0] += 1
    segments.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"segments.bin was changed"):
        InstanceFile(bee_folder / "train", "cpm-bee")
    index = json.loads((bee_folder / "train/index.json").read_text())
    index["sha256"].pop("segments.bin")
    (bee_folder / "train/index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="the segments of instance 0 do not match its tokens"):
        InstanceFile(bee_folder / "train", "cpm-bee").instance(0)
    segments.write_bytes(bytes(data[:-16]) + b"\0" * 32)
    with pytest.raises(ValueError, match=r"do not match its tokens|that do not match"):
        file = InstanceFile(bee_folder / "train", "cpm-bee")
        file.instance(index["documents"] - 1)
    (bee_folder / "train/subs.bin").unlink()
    with pytest.raises(ValueError, match=r"has no subs.bin"):
        InstanceFile(bee_folder / "train", "cpm-bee")


# Rows


@pytest.mark.parametrize("count", [1, 17, 3000])
def test_packing_is_tight_complete_and_always_the_same(count):
    of = functools.partial(pack_rows, slices=np.ones(count, dtype=int), size=100, most_slices=100)
    lengths = np.random.default_rng(1).integers(1, 101, count)
    rows = of(lengths, seed=3)
    assert sorted(itertools.chain.from_iterable(rows[i] for i in range(len(rows)))) == list(
        range(count)
    )
    assert all(1 <= lengths[rows[i]].sum() <= 100 for i in range(len(rows)))
    again, other = of(lengths, seed=3), of(lengths, seed=4)
    assert np.array_equal(rows.items, again.items) and np.array_equal(rows.starts, again.starts)
    assert count == 1 or not np.array_equal(rows.items, other.items)
    assert count < 3000 or lengths.sum() > 0.97 * 100 * len(rows)


def test_packing_keeps_to_the_slices_that_a_row_may_have():
    """Where they, not the tokens, are what fills rows, and where few items have nearly all of
    them.
    """
    chance = np.random.default_rng(2)
    lengths, costs = chance.integers(1, 11, 3000), chance.integers(1, 101, 3000)
    rows = pack_rows(lengths, costs, 1000, 100, seed=0)
    assert sorted(rows.items) == list(range(3000))
    assert all(costs[rows[i]].sum() <= 100 for i in range(len(rows)))
    # of slices the first row that has enough is taken, not the best
    assert costs.sum() > 0.9 * 100 * len(rows)
    costs = np.where(np.arange(3000) % 1500, 1, 900)
    rows = pack_rows(lengths, costs, 1000, 1000, seed=0)
    assert all(
        lengths[rows[i]].sum() <= 1000 and costs[rows[i]].sum() <= 1000 for i in range(len(rows))
    )
    assert lengths.sum() > 0.9 * 1000 * len(rows)


def test_rows_of_many_hidden_runs_are_packed_such_that_they_can_be_planned(tmp_path, monkeypatch):
    """An Ant's rows of masked texts; what a row would have, the models refuse."""
    vocabulary = ant_words(tmp_path, *LETTERS)
    as_jsonl(
        tmp_path / "x.jsonl",
        [{"text": "def f(x)" * 10, "task": "mlm"}] * 60 + [{"text": "def f(x)" * 10}] * 60,
    )
    prepare(
        "--input",
        tmp_path / "x.jsonl",
        "--tokenizer",
        f"cpm-ant-greedy:{vocabulary}",
        "--output",
        tmp_path / "x",
    )
    for module in (live_rows, live_scores):
        monkeypatch.setattr(module, "MOST_SLICES", 60)
    rows = AntRows(InstanceFile(tmp_path / "x/train", "cpm-ant"), PRESETS["cpm-ant-tiny"], 4096, 0)
    read = [rows.of_sample(i) for i in range(len(rows))]
    assert sum(row.instances for row in read) == 120
    assert len(rows) > 4 > 120 * 90 / 4096
    monkeypatch.setattr(live_rows, "MOST_SLICES", 10**6)
    with pytest.raises(ValueError, match="a mask of at most 60 slices"):
        AntRows(rows.file, rows.config, 4096, 0).read(0)


def test_bees_with_too_many_answers_are_left_out(tmp_path, monkeypatch):
    """Those that alone make more slices than a row may have: 723 texts make 261,726, 724 make
    262,450.
    """
    vocabulary = write_vocabulary(tmp_path / "bee.txt", *LETTERS)
    as_jsonl(
        tmp_path / "x.jsonl",
        [{"<ans>": dict.fromkeys(map(str, range(n)), "x")} for n in (723, 724, 1, 1023)],
    )
    prepare(
        "--input",
        tmp_path / "x.jsonl",
        "--tokenizer",
        f"cpm-bee:{vocabulary}",
        "--output",
        tmp_path / "x",
    )
    rows = bee_rows(tmp_path / "x", 8192)
    assert rows.file.all.kinds.tolist() == [723, 724, 1, 1023]
    assert (rows.instances, rows.too_many, rows.left_out) == (2, 2, 0)
    assert sum(rows.of_sample(i).instances for i in range(len(rows))) == 2
    said = dealer(monkeypatch, tmp_path / "x").describe(rows)
    assert said == "2 instances, 2 with too many texts to predict are left out"
    as_jsonl(tmp_path / "y.jsonl", [{"<ans>": dict.fromkeys(map(str, range(800)), "x")}])
    prepare(
        "--input",
        tmp_path / "y.jsonl",
        "--tokenizer",
        f"cpm-bee:{vocabulary}",
        "--output",
        tmp_path / "y",
    )
    with pytest.raises(
        ValueError, match="fits into --seq-len 8192; 1 has too many texts to predict"
    ):
        bee_rows(tmp_path / "y", 8192)


def bee_rows(folder, seq_len=160, seed=0) -> BeeRows:
    return BeeRows(
        InstanceFile(folder / "train", "cpm-bee"), PRESETS["cpm-bee-tiny"], seq_len, seed
    )


def same(a, b) -> bool:
    fields = all(a.fields[name].equal(b.fields[name]) for name in a.fields)
    return fields and a.targets.equal(b.targets) and a.scores == b.scores


def test_samples_do_not_depend_on_what_was_read_before(bee_folder, ant_folder):
    """An epoch has each row once; the next one has others of an Ant's tokens hidden."""
    ants = [
        AntRows(InstanceFile(ant_folder / "train", "cpm-ant"), PRESETS["cpm-ant-tiny"], 64, 5)
        for _ in range(2)
    ]
    for one, other in ([bee_rows(bee_folder), bee_rows(bee_folder)], ants):
        count = len(one)
        rows = [one.of_sample(i) for i in range(2 * count)]
        assert all(same(rows[i], other.of_sample(i)) for i in reversed(range(2 * count)))
        assert sorted(one.order(i) for i in range(count)) == list(range(count))
        assert same(one.read(0), other.read(0))
        assert sum(row.instances for row in rows[:count]) >= one.instances
        used = sum(int(row.fields["length"]) for row in rows[:count])
        assert one.padding == pytest.approx(1 - used / (count * one.seq_len))
    count = len(ants[0])
    again = next(s for s in range(count, 2 * count) if ants[0].order(s) == ants[0].order(0))
    assert not ants[0].of_sample(0).targets.equal(ants[0].of_sample(again).targets)
    assert ants[0].identity["seed"] == 5


def test_a_last_part_of_one_token_is_predicted(ant_folder):
    """By the token before it, which is read once more and is no target then."""
    file = InstanceFile(ant_folder / "train", "cpm-ant")
    longest = int(file.all.lengths.argmax())
    room = int(file.all.lengths[longest]) - 1
    ants = AntRows(file, PRESETS["cpm-ant-tiny"], room + 8, 0)
    parts = np.flatnonzero(ants._instance == longest)
    assert len(parts) == 2
    rows = [(row, ants.read(row)) for row in range(len(ants)) if parts[-1] in ants._rows[row]]
    [(number, row)] = rows
    at = ants._rows[number].index(parts[-1])
    mine = (row.fields["span"] == at) & (row.fields["segment"] > 0)
    assert row.fields["input"][mine].tolist() == file.instance(longest).tokens[-2:].tolist()
    assert row.targets[mine].tolist() == [EOS, -100]


@pytest.mark.parametrize(
    ("name", "kind", "before", "after", "changed"),
    [
        ("cpm-bee", BeeRows, {"a": "x", "<ans>": "y"}, {"a": {"x": "y"}, "<ans>": "b"}, "tokens"),
        ("cpm-bee", BeeRows, {"a": "é è", "<ans>": "b"}, {"a": "é é", "<ans>": "b"}, "subs"),
        (
            "cpm-bee",
            BeeRows,
            {"a": {"x": "y"}, "<ans>": "b"},
            {"a": "x", "y": {}, "<ans>": "b"},
            "segments",
        ),
        ("cpm-ant-greedy", AntRows, {"text": "def"}, {"text": "def", "task": "mlm"}, "segments"),
    ],
)
def test_a_run_does_not_go_on_with_other_instances(tmp_path, name, kind, before, after, changed):
    """Also where their tokens are the same; what differs is named."""
    model = name.removesuffix("-greedy")
    vocabulary = write_vocabulary(tmp_path / "v.txt", *LETTERS, model=model)
    config, seen = PRESETS[f"{model}-tiny"], []
    for i, line in enumerate((before, after)):
        as_jsonl(tmp_path / "x.jsonl", [line] * 3)
        folder = tmp_path / str(i)
        prepare(
            "--input",
            tmp_path / "x.jsonl",
            "--tokenizer",
            f"{name}:{vocabulary}",
            "--output",
            folder,
        )
        seen.append(kind(InstanceFile(folder / "train", model), config, 64, 0).identity)
    saved = SimpleNamespace(path="run", state={"model": config.to_dict(), "data": seen[0]})
    resume.check_same(
        saved, config, seen[0], new_stage=False, tokenizer=load_tokenizer(folder / "train")
    )
    with pytest.raises(
        ValueError,
        match=rf"run was reading other data: .*{changed}.bin \w+ -> \w+.*give --new-stage",
    ):
        resume.check_same(
            saved, config, seen[1], new_stage=False, tokenizer=load_tokenizer(folder / "train")
        )
    assert (changed == "tokens") == (seen[0]["digest"] != seen[1]["digest"])


def test_a_strategy_without_biases_is_refused_before_training(bee_folder):
    file = InstanceFile(bee_folder / "train", "cpm-bee")
    rows = BeeRows(file, PRESETS["cpm-bee-tiny"], int(file.all.lengths.max()), 0)
    config = TrainConfig(strategy="plain-ring")
    with pytest.raises(ValueError, match=r"--strategy plain-ring, .*: it does not support a bias"):
        config.check_strategy(1, rows.read(0).scores)


def test_instances_that_are_too_long_are_counted(bee_folder, ant_folder, monkeypatch):
    file = InstanceFile(bee_folder / "train", "cpm-bee")
    longest = int(file.all.lengths.max())
    rows = bee_rows(bee_folder, longest - 1)
    assert rows.left_out == int((file.all.lengths == longest).sum())
    assert rows.instances == len(file.all.lengths) - rows.left_out
    said = dealer(monkeypatch, bee_folder, seq_len=longest - 1).describe(rows)
    are = "is" if rows.left_out == 1 else "are"
    assert said == f"{rows.instances} instances, {rows.left_out} longer than a row {are} left out"
    with pytest.raises(ValueError, match="has no instance that fits into --seq-len 5"):
        bee_rows(bee_folder, 5)
    config = PRESETS["cpm-ant-tiny"]
    ants = AntRows(InstanceFile(ant_folder / "train", "cpm-ant"), config, 50, 0)
    assert ants.cut == int((ants.file.all.lengths > 42).sum()) > 1
    texts = [ants.read(i) for i in range(len(ants))]
    read = sum(int((row.fields["segment"] > 0).sum()) for row in texts)
    assert read == len(ants.file.tokens)
    with pytest.raises(ValueError, match="--seq-len 9 leaves no room after a prompt of 8 tokens"):
        AntRows(ants.file, config, 9, 0)
    with pytest.raises(ValueError, match="expected prompt_types and segment_types above 2"):
        AntRows(ants.file, changed(config, segment_types=2), 50, 0)
    with pytest.raises(ValueError, match="position_bias_num_segment_buckets must be at least 4"):
        BeeRows(file, changed(PRESETS["cpm-bee-tiny"], position_bias_num_segment_buckets=3), 160, 0)


def test_a_long_row_is_cheap(golden_words):
    """128K tokens, two spans of a long context each: seconds and a few dozen MiB, where S x S would
    be 16 GiB.
    """
    tokens = 1 << 17
    instance, _ = bee_instance(
        golden_words, {written(11): written(*[12, 13] * 32000), "<ans>": written(*[14] * 1500)}
    )
    config = PRESETS["cpm-bee-10b"]
    tracemalloc.start()
    began = time.process_time()
    row = bee_row(config, [instance] * 2, tokens, EOS)
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert int(row.fields["length"]) == 2 * len(instance) > tokens - 200
    assert len(row.scores.mask.slices) == 4
    assert peak < 64 << 20  # of numpy's; what torch has are copies of the same
    assert seconds < 5
    assert row.scores == bee_scores(config, *(row.fields[name] for name in BEE_FIELDS))


# Micro-batches


def dealer(monkeypatch, folder, rank=0, world=1, sp_size=1, **options):
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    name = TokenFile._read_index(type("At", (), {"folder": folder / "train"}))["instances"]
    config = TrainConfig(**{"seq_len": 160, "model": f"{name}-tiny", "batch_size": 4} | options)
    layout = "zigzag" if config.layout == "auto" else config.layout
    sp = SequenceParallel(rank % sp_size, sp_size, layout)
    made = {"cpm-bee": BeeBatches, "cpm-ant": AntBatches}[name]
    return made(config, config.model_config(), sp, torch.device("cpu"))


@pytest.mark.parametrize("layout", ["auto", "striped"])
def test_ranks_have_the_parts_of_rows_that_they_compute_with(bee_folder, monkeypatch, layout):
    """Put together again, the rows are as made; labels are right for one table of both; work is
    counted.
    """
    data = bee_rows(bee_folder)
    ranks = [
        dealer(monkeypatch, bee_folder, r, 3, 3, layout=layout, micro_batch_size=2)
        for r in range(3)
    ]
    read = [batches.of_step(data, 4)[0] for batches in ranks]
    rows = [data.of_sample(4), data.of_sample(5)]
    vocabulary = data.config.vocab_size
    table = list(zip(*(x.tolist() for x in read[0].inputs[2:]), strict=True))
    pairs = torch.cat(
        [torch.stack((row.fields["input"], row.fields["input_sub"])) for row in rows], 1
    ).T.tolist()
    assert table == sorted({(token, sub) for token, sub in pairs if sub})
    assert len(table) > 0
    for i, row in enumerate(rows):
        layouts = [batch.layouts[i] for batch in read]
        assert layouts[0] == layouts[1] == layouts[2]
        assert read[0].scores[i] == row.scores
        for place, name in enumerate(("input", "input_sub")):
            assert (
                layouts[0]
                .unshard([b.inputs[place][i] for b in read], 0)
                .equal(row.fields[name].long())
            )
        labels = layouts[0].unshard([b.labels[i] for b in read], 0).tolist()
        for label, target, sub in zip(
            labels, row.targets.tolist(), row.target_subs.tolist(), strict=True
        ):
            assert label == (vocabulary + table.index((target, sub)) if sub else target)
    work = [0, 0, 0]
    for row, cut in zip(rows, read[0].layouts, strict=True):
        for rank in range(3):
            work[rank] += 4 * int(row.scores.mask.dense()[cut.positions(rank)].sum())
    assert {batch.work for batch in read} == {tuple(work)}
    counts = {
        "instances": sum(r.instances for r in rows),
        "targets": sum(int((r.targets >= 0).sum()) for r in rows),
    }
    assert all(batch.counts == counts for batch in read)
    assert sum(int((batch.labels >= 0).sum()) for batch in read) == counts["targets"]


def test_steps_read_ahead_are_those_read_in_time(bee_folder, monkeypatch):
    data = bee_rows(bee_folder)
    batches, other = (dealer(monkeypatch, bee_folder, steps=3) for _ in range(2))
    in_order = [batches.of_step(data, first, last=first == 8) for first in (0, 4, 8)]
    assert batches._ahead is None  # after the last step
    for first in (8, 0, 4):  # none of which is the next
        [mine], [expected] = in_order[first // 4], other.of_step(data, first)
        assert mine.labels.equal(expected.labels)
        assert all(a.equal(b) for a, b in zip(mine.inputs, expected.inputs, strict=True))
        assert mine.scores == expected.scores


@pytest.mark.parametrize(("size", "steps"), [(2, 5), (4, 5), (8, 4)])
def test_a_run_goes_on_with_batches_of_another_size(bee_folder, monkeypatch, size, steps):
    """After two steps of 4: each sample is read once, all but the first step's ahead, and none
    beyond the last.
    """
    data, read = bee_rows(bee_folder), []
    of_sample = data.of_sample
    monkeypatch.setattr(data, "of_sample", lambda sample: read.append(sample) or of_sample(sample))
    batches = dealer(monkeypatch, bee_folder, steps=steps, batch_size=size, micro_batch_size=size)
    for step in range(2, steps):
        first, last = 8 + (step - 2) * size, step + 1 == steps
        [batch] = batches.of_step(data, first, last)
        assert batch.scores == tuple(
            of_sample(sample).scores for sample in range(first, first + size)
        )
        assert (batches._ahead is None) == last
    batches._reader.shutdown()
    assert read == [*range(8, 8 + (steps - 2) * size)]


@pytest.mark.parametrize("size", [1, 4])
def test_what_tokens_see_is_planned_when_rows_are_read(bee_folder, monkeypatch, size):
    """As attention takes several rows: as one sequence."""
    [*found] = dealer(monkeypatch, bee_folder, micro_batch_size=size).of_step(
        bee_rows(bee_folder), 0
    )
    for batch in found:
        planned = vars(batch.scores[0] if size == 1 else stack_scores(batch.scores))
        assert len(set(batch.scores)) == size
        assert {"terms", "digest"} <= planned.keys()


def test_evaluation_reads_rows_as_they_are_and_fills_up_with_ones_without_targets(
    ant_folder, monkeypatch
):
    data = AntRows(InstanceFile(ant_folder / "train", "cpm-ant"), PRESETS["cpm-ant-tiny"], 160, 0)
    batches = dealer(monkeypatch, ant_folder, micro_batch_size=4, eval_sequences=3)
    [batch] = batches.of_evaluation(data)
    chosen = [i * len(data) // 3 for i in range(3)]
    assert all(batch.labels[i].equal(data.read(row).targets) for i, row in enumerate(chosen))
    assert (batch.labels[3] == -100).all()
    assert batch.inputs[2].equal(torch.arange(160).expand(4, 160))


def test_a_batch_without_sub_ids_has_a_placeholder(golden_words, monkeypatch, bee_folder):
    row = bee_row(BEE, [bee_instance(golden_words, {"<ans>": written(20)})[0]], 20, EOS)
    batch = dealer(monkeypatch, bee_folder, seq_len=20)._make(None, [row])
    assert [x.tolist() for x in batch.inputs[2:]] == [[0], [1]]


def test_sub_ids_that_a_model_does_not_hold_are_refused_when_they_are_read(
    golden_words, monkeypatch, bee_folder
):
    row = bee_row(BEE, [bee_instance(golden_words, {"<ans>": written(20)})[0]], 20, EOS)
    row.fields["input_sub"][3] = 4095
    batches = dealer(monkeypatch, bee_folder, seq_len=20)
    assert 4095 in batches._make(None, [row]).inputs[3]
    batches._model = changed(batches._model, fp16_rotary=True)
    with pytest.raises(ValueError, match="fp16_rotary holds sub-ids below 4095, got 4095"):
        batches._make(None, [row])


# Models


def test_kinds_are_known_by_their_fields():
    for name, preset in PRESETS.items():
        values = preset.to_dict()
        kind = values.pop("model_type")
        assert config_of(values) == config_of(values | {"model_type": kind}) == preset
        assert kind_of(preset).name == kind == name.rsplit("-", 1)[0]
    with pytest.raises(
        ValueError, match=r"the kind of this model is ambiguous: add model_type, one of cpm-bee"
    ):
        config_of({"dim_model": 64})
    with pytest.raises(ValueError, match="expected names and values, got list"):
        config_of([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"documents": "mask"},
            "--documents does not go with --model cpm-bee-tiny, a cpm-bee: its instances say",
        ),
        ({"window": 8}, "--window does not go with"),
        (
            {"rope_theta": 1e6},
            "--rope-theta does not go with --model cpm-bee-tiny, a cpm-bee: it has no rotary",
        ),
        ({"rope_scaling": {"kind": "linear", "factor": 2}}, "--rope-scaling does not go with"),
        ({"untie": True}, "--untie does not go with .*, a cpm-bee: its head is its embeddings"),
    ],
)
def test_options_that_say_nothing_of_such_a_model_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(model="cpm-bee-tiny", **options).model_config()
