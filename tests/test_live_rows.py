"""Rows of CPM-Live's instances, and the parts of them that ranks compute with."""

# ruff: noqa: F811 - folders and words are fixtures

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
from models.cpm_live.scores import bee_scores
from tests.live import BEE_FIELDS, changed, golden
from tests.live_folders import ant_folder, bee_folder, golden_words, prepare_lines, written  # noqa: F401
from train.base.wording import counted
from train.cpm_live import rows as live_rows
from train.cpm_live.batches import AntBatches, BeeBatches
from train.cpm_live.data import InstanceFile
from train.cpm_live.instances import bee_instance
from train.cpm_live.packing import pack_rows
from train.cpm_live.rows import AntRows, BeeRows, bee_row
from train.data.folder import TokenFile
from train.data.tokenizer import load_tokenizer
from train.run import resume
from train.run.checks import check_strategy
from train.run.config import TrainConfig

BEE = golden("bee").config
EOS = 7


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
        used = sum(int(row.fields["length"]) for row in rows[:count])
        assert one.padding == pytest.approx(1 - used / (count * one.seq_len))
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
    config = PRESETS[f"{model}-tiny"]
    saved = SimpleNamespace(path="run", state={"model": config.to_dict(), "data": seen[0]})
    options = {"new_stage": False, "tokenizer": load_tokenizer(tmp_path / "after/train")}
    resume.check_same(saved, config, seen[0], **options)
    expected = rf"run was reading other data: .*{changed}.bin \w+ -> \w+.*give --new-stage"
    with pytest.raises(ValueError, match=expected):
        resume.check_same(saved, config, seen[1], **options)
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
        assert (batches._ahead is None) == last
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
