"""CPM-Live's data: text to segments, instances on disk, and the rows and parts of them that ranks
compute with.
"""

import itertools
import json
import os
import shutil
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bmt_burst import SequenceParallel
from models.cpm_live import scores as live_scores
from models.cpm_live.config import PRESETS
from models.cpm_live.scores import ant_scores, bee_scores
from tests.live import ANT_FIELDS, BEE_FIELDS, as_jsonl, changed, golden, write_vocabulary
from tests.preparing import edit_index, prepare
from train.base.wording import counted
from train.cpm_live import rows as live_rows
from train.cpm_live.batches import AntBatches, BeeBatches
from train.cpm_live.instances import COLUMNS, Instance, bee_instance, shuffle_answers
from train.cpm_live.rows import AntRows, BeeRows, InstanceFile, ant_row, bee_row, hide, pack_rows
from train.cpm_live.stored import AntWriter
from train.cpm_live.tokenizers import AntGreedyTokenizer, BeeTokenizer
from train.data.folder import TokenFile
from train.data.tokenizer import load_tokenizer
from train.loop import resume
from train.settings.config import TrainConfig, check_strategy

BEE, ANT = golden("bee").config, golden("ant").config
EOS = 7


@pytest.fixture
def golden_words(tmp_path) -> BeeTokenizer:
    """Token i of the golden batch's vocabulary as a character of its own."""
    return BeeTokenizer(
        write_vocabulary(tmp_path / "words.txt", *(chr(0x4E00 + i) for i in range(11, 120)))
    )


def written(*tokens) -> str:
    return "".join(t if isinstance(t, str) else " " if t == 5 else chr(0x4E00 + t) for t in tokens)


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


def prepare_lines(folder, lines, *options, model="cpm-bee", code=0) -> str:
    """Prepare lines of data in `folder`. Return the output."""
    vocabulary = write_vocabulary(folder.with_suffix(".txt"), *LETTERS, model=model)
    kind = "cpm-ant-greedy" if model == "cpm-ant" else model
    lines = as_jsonl(folder.with_suffix(".jsonl"), lines)
    inputs = ("--input", lines, "--tokenizer", f"{kind}:{vocabulary}", "--output", folder)
    return prepare(*inputs, *options, code=code)


@pytest.fixture(scope="module")
def bee_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bee") / "bee"
    prepare_lines(folder, LINES, "--val-fraction", 0.2)
    return folder


@pytest.fixture(scope="module")
def ant_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ant") / "ant"
    lines = [{"text": "def f(x)" * (i % 9 + 1), "task": ("lm", "mlm")[i % 2]} for i in range(30)]
    prepare_lines(folder, [*lines, {"text": "def y(x)\n" * 40}], model="cpm-ant")
    return folder


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


def test_a_long_text_streams_to_disk_and_its_parts_are_read_alone(tmp_path, monkeypatch):
    """6M tokens arrive as 96 MiB. Writing, dividing and reading hold a few pieces each."""
    tracemalloc.start()
    writer = AntWriter(tmp_path / "whole", Spelled())
    writer.write(ant_pieces(0, 1))
    writer.write(ant_pieces(3, 0))
    for _ in range(2):
        writer.write(itertools.chain(ant_pieces(1, 0), ant_pieces(60, 100_000)))
    writer.finish()
    copied = AntWriter(tmp_path / "copied", Spelled())
    copied.copy(writer, 1, 2)
    copied.finish()
    assert tracemalloc.get_traced_memory()[1] < 48 << 20
    tracemalloc.stop()
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


def test_packing_keeps_to_the_slices_that_a_row_may_have():
    """Where slices rather than tokens fill rows, and where few items have nearly all of them."""
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


def test_bees_with_too_many_answers_are_left_out(tmp_path, monkeypatch):
    """Such a bee alone makes more slices than a row may have."""
    assert live_scores.slices_of(np.array([723, 724])).tolist() == [261_726, 262_450]
    assert 261_726 <= live_scores.MOST_SLICES < 262_450
    monkeypatch.setattr(live_rows, "MOST_SLICES", int(live_scores.slices_of(np.array([9]))[0]))
    lines = [{"<ans>": dict.fromkeys(map(str, range(n)), "x")} for n in (9, 10, 1, 30)]
    prepare_lines(tmp_path / "x", lines)
    rows = bee_rows(tmp_path / "x", 512)
    assert rows.file.all.kinds.tolist() == [9, 10, 1, 30]
    assert (rows.instances, rows.too_many, rows.left_out) == (2, 2, 0)
    count = len(rows)
    assert sum(rows.of_sample(i).instances for i in range(count)) == 2
    again = next(i for i in range(count, 2 * count) if rows.order(i) == rows.order(0))
    assert not same(rows.of_sample(0), rows.of_sample(again)), "answers have another order"
    assert rows.description == "2 instances, 2 with too many texts to predict are left out"
    prepare_lines(tmp_path / "y", lines[1:2])
    message = "fits into --seq-len 512; 1 has too many texts to predict"
    with pytest.raises(ValueError, match=message):
        bee_rows(tmp_path / "y", 512)


def bee_rows(folder, seq_len=160, seed=0) -> BeeRows:
    return BeeRows(
        InstanceFile(folder / "train", "cpm-bee"), PRESETS["cpm-bee-tiny"], seq_len, seed
    )


def ant_rows(folder, seq_len, seed=0) -> AntRows:
    return AntRows(
        InstanceFile(folder / "train", "cpm-ant"), PRESETS["cpm-ant-tiny"], seq_len, seed
    )


def same(a, b) -> bool:
    fields = all(a.fields[name].equal(b.fields[name]) for name in a.fields)
    return fields and a.targets.equal(b.targets) and a.scores == b.scores


def test_samples_do_not_depend_on_what_was_read_before(bee_folder, ant_folder):
    """An epoch has each row once. The next one has others of an Ant's tokens hidden."""
    ants = [ant_rows(ant_folder, 64, 5) for _ in range(2)]
    for one, other in ([bee_rows(bee_folder), bee_rows(bee_folder)], ants):
        count = len(one)
        rows = [one.of_sample(i) for i in range(2 * count)]
        assert all(same(rows[i], other.of_sample(i)) for i in reversed(range(2 * count)))
        assert sorted(one.order(i) for i in range(count)) == list(range(count))
        assert same(one.read(0), other.read(0))
        assert sum(row.instances for row in rows[:count]) >= one.instances
    count = len(ants[0])
    again = next(s for s in range(count, 2 * count) if ants[0].order(s) == ants[0].order(0))
    assert not ants[0].of_sample(0).targets.equal(ants[0].of_sample(again).targets)
    assert ants[0].identity["seed"] == 5


@pytest.mark.parametrize(
    ("model", "before", "after", "changed"),
    [
        ("cpm-bee", {"a": "é è", "<ans>": "b"}, {"a": "é é", "<ans>": "b"}, "subs"),
        ("cpm-bee", {"a": {"x": "y"}, "<ans>": "b"}, {"a": "x", "y": {}, "<ans>": "b"}, "segments"),
        ("cpm-ant", {"text": "def"}, {"text": "def", "task": "mlm"}, "segments"),
    ],
)
def test_a_run_does_not_continue_with_other_instances(tmp_path, model, before, after, changed):
    """Not even if their tokens are the same. The difference is named."""
    seen, rows = [], {"cpm-bee": bee_rows, "cpm-ant": ant_rows}[model]
    for name, line in (("before", before), ("after", after)):
        prepare_lines(tmp_path / name, [line] * 3, model=model)
        seen.append(rows(tmp_path / name, 64).identity)
    saved = SimpleNamespace(path="run", state={"data": seen[0]})
    options = {"new_stage": False, "tokenizer": load_tokenizer(tmp_path / "after/train")}
    resume.check_data(saved, seen[0], **options)
    expected = rf"run was reading other data: .*{changed}.bin \w+ -> \w+.*give --new-stage"
    with pytest.raises(ValueError, match=expected):
        resume.check_data(saved, seen[1], **options)
    assert (changed == "tokens") == (seen[0]["digest"] != seen[1]["digest"])


def test_a_strategy_without_biases_is_refused_before_training(bee_folder):
    file = InstanceFile(bee_folder / "train", "cpm-bee")
    rows = BeeRows(file, PRESETS["cpm-bee-tiny"], int(file.all.lengths.max()), 0)
    message = r"--strategy plain-ring, .*: it supports dense attention only, not a bias"
    with pytest.raises(ValueError, match=message):
        check_strategy(TrainConfig(strategy="plain-ring"), 1, rows.read(0).scores)


def test_instances_that_are_too_long_are_counted(bee_folder, ant_folder):
    file = InstanceFile(bee_folder / "train", "cpm-bee")
    longest = int(file.all.lengths.max())
    rows = bee_rows(bee_folder, longest - 1)
    assert rows.left_out == int((file.all.lengths == longest).sum())
    assert rows.instances == len(file.all.lengths) - rows.left_out
    left_out = counted(rows.left_out, "longer than a row is", "longer than a row are")
    assert rows.description == f"{rows.instances} instances, {left_out} left out"
    with pytest.raises(ValueError, match="has no instance that fits into --seq-len 5"):
        bee_rows(bee_folder, 5)
    ants = ant_rows(ant_folder, 50)
    assert ants.cut == int((ants.file.all.lengths > 42).sum()) > 1
    texts = [ants.read(i) for i in range(len(ants))]
    read = sum(int((row.fields["segment"] > 0).sum()) for row in texts)
    assert read == len(ants.file.tokens)
    with pytest.raises(ValueError, match="--seq-len 9 leaves no room after a prompt of 8 tokens"):
        ant_rows(ant_folder, 9)
    with pytest.raises(ValueError, match="expected prompt_types and segment_types above 2"):
        AntRows(ants.file, changed(ants.config, segment_types=2), 50, 0)
    few = changed(PRESETS["cpm-bee-tiny"], position_bias_num_segment_buckets=3)
    with pytest.raises(ValueError, match="position_bias_num_segment_buckets must be at least 4"):
        BeeRows(file, few, 160, 0)


def test_a_long_row_is_cheap(golden_words):
    """128K tokens in two spans with a long context each need seconds and a few dozen MiB. S x S
    would be 16 GiB.
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
    """Unsharded, the rows are as made. Labels are right for one table of both. Work is counted."""
    data, read = bee_rows(bee_folder), []
    for rank in range(3):
        mine = dealer(monkeypatch, bee_folder, rank, 3, 3, layout=layout, micro_batch_size=2)
        read.append(mine.of_step(data, 4)[0])
    rows = [data.of_sample(4), data.of_sample(5)]
    table = list(zip(*(x.tolist() for x in read[0].inputs[2:]), strict=True))
    tokens, subs = (torch.cat([row.fields[x] for row in rows]) for x in ("input", "input_sub"))
    pairs = zip(tokens.tolist(), subs.tolist(), strict=True)
    assert table == sorted({(token, sub) for token, sub in pairs if sub})
    assert len(table) > 0
    work = [0, 0, 0]
    for i, row in enumerate(rows):
        cut = read[0].layouts[i]
        assert all(batch.layouts[i] == cut for batch in read)
        assert read[0].scores[i] == row.scores
        for place, name in enumerate(("input", "input_sub")):
            whole = cut.unshard([batch.inputs[place][i] for batch in read], 0)
            assert whole.equal(row.fields[name].long())
        labels = cut.unshard([batch.labels[i] for batch in read], 0).tolist()
        targets = zip(row.targets.tolist(), row.target_subs.tolist(), strict=True)
        size = data.config.vocab_size
        assert labels == [size + table.index(pair) if pair[1] else pair[0] for pair in targets]
        for rank in range(3):
            work[rank] += 4 * int(row.scores.mask.dense()[cut.positions(rank)].sum())
    assert {batch.work for batch in read} == {tuple(work)}
    targets = sum(int((row.targets >= 0).sum()) for row in rows)
    instances = sum(row.instances for row in rows)
    assert all(b.counts == {"instances": instances, "targets": targets} for b in read)
    assert sum(int((batch.labels >= 0).sum()) for batch in read) == targets


def test_a_run_continues_with_batches_of_another_size(bee_folder, monkeypatch):
    """After two steps of 4, each sample is read once, and none after the last step."""
    data, read, size, steps = bee_rows(bee_folder), [], 2, 5
    of_sample = data.of_sample
    monkeypatch.setattr(data, "of_sample", lambda sample: read.append(sample) or of_sample(sample))
    batches = dealer(monkeypatch, bee_folder, steps=steps, batch_size=size, micro_batch_size=size)
    for step in range(2, steps):
        first, last = 8 + (step - 2) * size, step + 1 == steps
        [batch] = batches.of_step(data, first, last)
        expected = [of_sample(sample).scores for sample in range(first, first + size)]
        assert batch.scores == tuple(expected)
        assert (not batches._ahead) == last
    batches._reader.shutdown()
    assert read == [*range(8, 8 + (steps - 2) * size)]


def test_a_batch_without_sub_ids_has_a_placeholder_and_too_large_ones_are_refused(
    golden_words, monkeypatch, bee_folder
):
    row = bee_row(BEE, [bee_instance(golden_words, {"<ans>": written(20)})[0]], 20, EOS)
    batches = dealer(monkeypatch, bee_folder, seq_len=20)
    assert [x.tolist() for x in batches._make(None, [row]).inputs[2:]] == [[0], [1]]
    row.fields["input_sub"][3] = 4095
    assert 4095 in batches._make(None, [row]).inputs[3]
    batches._model = changed(batches._model, fp16_rotary=True)
    with pytest.raises(ValueError, match="fp16_rotary holds sub-ids below 4095, got 4095"):
        batches._make(None, [row])


def test_options_without_meaning_for_such_a_model_are_refused():
    for options, message in (
        ({"documents": "mask"}, "--documents does not go with .*, a cpm-bee: its instances say"),
        ({"window": 8}, "--window does not go with"),
        ({"rope_theta": 1e6}, "--rope-theta does not go with .*, a cpm-bee: it has no rotary"),
        ({"rope_scaling": {"kind": "linear", "factor": 2}}, "--rope-scaling does not go with"),
        ({"untie": True}, "--untie does not go with .*, a cpm-bee: its head is its embeddings"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainConfig(model="cpm-bee-tiny", **options).model_config()
