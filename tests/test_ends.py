"""Runs that end before their last step, and runs that leave out data: one rank, in this process."""

import json
import random
import time
from types import SimpleNamespace

import pytest

from models.cpm_live.config import PRESETS
from tests.live import SMALL_LIVE, changed, write_vocabulary
from tests.preparing import prepare, write_instances
from tests.refusals import refused_line
from tests.runs import newest, records, train
from tests.test_trainer import evaluating
from train.base import ranks
from train.checkpoints import checkpoint
from train.cpm_live.batches import LiveBatches
from train.cpm_live.tokenizers import AntGreedyTokenizer
from train.data.batches import Batches
from train.data.skips import Skips
from train.loop import saves
from train.loop.measure import Clock
from train.loop.saves import TimeLimit
from train.loop.stages import parse_run
from train.settings.config import TrainConfig
from train.settings.facts import parse_duration


@pytest.fixture
def settings(settings) -> dict:
    return settings | {"micro_batch_size": 2}


def test_stop_after_keeps_the_schedule_and_the_run_resumes(settings, tmp_path, capsys):
    """Also at a step at which no save is due, and with the same command once more."""
    options = {"steps": 5, "val_data": settings["data"], "eval_every": 2}
    assert train(settings, **options, output=str(tmp_path / "whole"))
    options |= {"save_every": 0, "resume": "auto"}
    assert not train(settings, **options, stop_after=3)
    assert newest(tmp_path / "run").state["step"] == 3
    capsys.readouterr()
    assert not train(settings, **options, stop_after=3)
    printed = capsys.readouterr().out
    assert "there is nothing to do: step 3 of 5 is done, and --stop-after is 3" in printed
    assert train(settings, **options)
    for name in ("loss", "lr", "val_loss"):
        assert records(tmp_path / "run", name) == records(tmp_path / "whole", name)


def test_a_step_is_named_once_for_one_stage(tmp_path, capsys):
    stages = {"stage": [{"name": "a", "stop_after": 3}, {"name": "b", "skip_data": "3:9"}]}
    (tmp_path / "stages.json").write_text(json.dumps(stages))
    line = ["--stages", str(tmp_path / "stages.json"), "--output", str(tmp_path / "run")]
    found = [stage.config for stage in parse_run(line)[1].all]
    assert [(x.stop_after, x.skip_data) for x in found] == [(3, None), (None, "3:9")]
    for option in (["--stop-after", "3"], ["--skip-data", "3:9"]):
        printed = refused_line(capsys, parse_run, *line, *option)
        told = f"{option[0]} is for one stage: give it in its table [[stage]] of {line[1]}"
        assert told in printed


SKIP = {"skip_data": "20:30", "resume": "auto"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_after": 9, "steps": 8}, "--stop-after 9 is beyond --steps 8, the last step"),
        ({**SKIP, "skip_data": "30:30"}, "--skip-data must be FROM:TO, two numbers .* got '30:30'"),
        ({**SKIP, "skip_data": "30"}, "--skip-data must be FROM:TO"),
        ({"skip_data": "20:30"}, "--skip-data needs a checkpoint to resume from: give --resume"),
        *[({"time_limit": text}, "--time-limit must be") for text in ("90", "0:00", "1:60", "x")],
    ],
)
def test_ends_that_contradict_the_run_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


def make_ants(tmp_path) -> dict:
    """Return options of an Ant and its instances."""
    words = write_vocabulary(tmp_path / "words.txt", *"abcdef", model="cpm-ant")
    chance = random.Random(0)
    texts = ("".join(chance.choices("abcdef", k=chance.randint(20, 60))) for _ in range(400))
    lines = ({"text": text} for text in texts)
    write_instances(tmp_path / "ants", AntGreedyTokenizer(words), *lines)
    ant = changed(PRESETS["cpm-ant-tiny"], **SMALL_LIVE, num_layers=1, vocab_size=40)
    (tmp_path / "ant.json").write_text(json.dumps(ant.to_dict()))
    return {"model": str(tmp_path / "ant.json"), "data": str(tmp_path / "ants"), "seq_len": 128}


def make_lanes(tmp_path) -> dict:
    """Return options of a stream of two lanes."""
    (tmp_path / "in").mkdir()
    for i in range(9):
        lines = [json.dumps({"text": f"<{i}.{j}" + "x" * (i * j % 40)}) for j in range(60)]
        (tmp_path / f"in/{i}.jsonl").write_text("\n".join(lines))
    inputs = ("--stream", "--input", tmp_path / "in", "--output", tmp_path / "out")
    prepare(*inputs, "--shuffle-tokens", 600)
    return {"data": str(tmp_path / "out/train")}


def make_mixture(tmp_path) -> dict:
    """Return options of two folders."""
    return {"data": {"a": f"{tmp_path}/text:0.3", "b": f"{tmp_path}/other:0.7"}}


SOURCES = {"mixture": make_mixture, "stream": make_lanes, "ant": make_ants}


@pytest.fixture
def rows_read(monkeypatch) -> list:
    """The tokens of the rows that are trained on."""
    rows: list = []
    for dealer in (Batches, LiveBatches):
        plain = dealer._make

        def noted(self, data, made, sources=None, plain=plain):
            rows.extend(
                tuple(getattr(r, "tokens", getattr(r, "targets", None)).tolist()) for r in made
            )
            return plain(self, data, made, sources)

        monkeypatch.setattr(dealer, "_make", noted)
    return rows


@pytest.mark.parametrize("name", SOURCES)
def test_skipped_data_is_left_out_once_for_all(name, settings, tmp_path, capsys, rows_read):
    """The order of the rest is the same, whether the option is typed again or not. A second range
    is in the same numbers.
    """
    settings |= SOURCES[name](tmp_path) | {"save_every": 0, "steps": 8}
    train(settings, output=str(tmp_path / "whole"), save=False)
    whole = rows_read[:]
    assert len({*whole}) > 8
    train(settings, stop_after=2)
    first, second = {"skip_data": "5:8"}, {"skip_data": "11:14"}
    settings |= {"steps": 5, "resume": "auto"}
    for step, options in ((3, first), (4, first), (5, second)):
        rows_read.clear()
        capsys.readouterr()
        assert train(settings, **options, stop_after=step) == (step == 5)
        printed, state = capsys.readouterr(), newest(tmp_path / "run").state
        ranges = [[5, 8]] if step < 5 else [[5, 8], [11, 14]]
        places = [x for x in range(16) if not any(a <= x < b for a, b in ranges)]
        assert rows_read[:2] == [whole[x] for x in places[2 * step - 2 : 2 * step]]
        assert (state["samples"], state["skip_data"]) == (2 * step, ranges)
        shown = ", ".join(f"{a}:{b}" for a, b in ranges)
        assert f"these sequences of the data are skipped: {shown}\n" in printed.out
        passed = {3: "5:8", 5: "11:14"}.get(step)
        assert ("skipped sequences" in printed.out) == bool(passed)
        assert not passed or f"step {step}: skipped sequences {passed} of the data" in printed.out
        assert "--skip-data" not in printed.err
    assert records(tmp_path / "run", "data_skipped") == {3: 3, 4: 3, 5: 6}
    assert records(tmp_path / "run", "samples") == {step: 2 * step for step in range(1, 6)}


def test_ranges_that_cannot_be_skipped_any_more_are_refused(settings, tmp_path):
    settings |= {"resume": "auto", "save_every": 1, "steps": 6}
    with pytest.raises(ranks.RankError, match=r"--skip-data 3:9 needs a checkpoint .*run has none"):
        train(settings, skip_data="3:9")
    train(settings, stop_after=2)
    for given, message in (
        ("3:9", "--skip-data 3:9 has sequences that were read already: the checkpoint has read "
         "the first 4 sequences of the data; .* skip from 4 on"),
        ("12:13", "--skip-data 12:13 is after the sequences that the run reads, up to 12"),
    ):  # fmt: skip
        with pytest.raises(ranks.RankError, match=message):
            train(settings, skip_data=given)
    assert not train(settings, skip_data="4:8", stop_after=3)
    for given in ("5:9", "4:9"):
        with pytest.raises(ranks.RankError, match=f"{given} has sequences that were read already"):
            train(settings, skip_data=given)
    with pytest.raises(ValueError, match="6:9 overlaps 7:8, which the checkpoint skips"):
        Skips(((7, 8),)).with_range((6, 9), 4, 100)


def test_a_new_stage_may_skip_what_the_one_before_has_read(settings, tmp_path, rows_read):
    train(settings)
    stage = {"resume": str(checkpoint.newest(tmp_path / "run")), "new_stage": True}
    read, rows_read[:] = rows_read[:], []
    train(settings, **stage, output=str(tmp_path / "b"), skip_data=f"0:{len(read)}")
    assert len(rows_read) == len(read) and not {*rows_read} & {*read}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("12:30", 45000), ("0:05", 300), ("00:00:07", 7), ("100:00", 360000), ("2-0", 172800),
     ("1-02:03", 93780), ("1-02:03:04", 93784)],
)  # fmt: skip
def test_durations_are_written_as_for_slurm(text, seconds):
    assert parse_duration(text) == seconds


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock that stands still, of a command that started 100 s before."""
    clock = SimpleNamespace(now=0.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(saves, "time", fake)
    monkeypatch.setattr(saves, "running_time", lambda: clock.now + 100.0)
    return clock


def test_a_run_stops_while_two_steps_and_a_save_fit(clock):
    limit = TimeLimit("0:10")
    assert not limit.wants_a_save
    for _ in range(2):
        limit.begin_step()
        clock.now += 20
        limit.end_step()
    limit.note_save(40)
    limit.note_save(10)
    needed = 2 * 20 + 1.25 * 40 + 5
    for writing, count in ((False, 0), (True, 1)):
        clock.now = 500 - needed - count * 1.25 * 40 - 0.1
        assert not limit.is_late(writing)
        clock.now += 0.2
        assert limit.is_late(writing)
    limit.begin_step()
    clock.now = 500 - 45 - 85  # a step of 45 s so far
    assert not limit.is_late()
    clock.now += 45
    assert limit.is_late()
    clock.now = 480.0
    assert limit.describe() == "stopping: 20 s of --time-limit 0:10 are left, a save takes 40 s"


def test_the_limit_counts_from_the_start_of_the_command(monkeypatch):
    """Of this process, or of the one that started the ranks."""
    monkeypatch.delenv("BMT_BURST_LAUNCHER", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    mine = saves.running_time()
    assert time.process_time() < mine
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert saves.running_time() > mine


def test_a_run_saves_once_to_know_its_time_and_stops_in_time(
    settings, tmp_path, monkeypatch, clock, capsys
):
    """Each step takes 50 s of 500, and no save is due before the last one."""

    def read(self):
        clock.now += 50
        return {}

    monkeypatch.setattr(Clock, "read", read)
    settings |= {"steps": 50, "save_every": 0, "resume": "auto", "time_limit": "0:10"}
    assert not train(settings)
    assert list(records(tmp_path / "run")) == [*range(1, 10)]
    steps = [int(path.name[-2:]) for path in checkpoint.listed(tmp_path / "run")]
    assert steps == [9, 6]
    assert "stopping: 100 s of --time-limit 0:10 are left, a save" in capsys.readouterr().out
    clock.now = 496.0
    assert not train(settings)  # too late for a step
    assert newest(tmp_path / "run").state["step"] == 9


def test_a_limit_stops_an_evaluation(settings, tmp_path, monkeypatch, clock):
    def during():
        clock.now += 600

    evaluating(monkeypatch, during)
    options = {"val_data": settings["data"], "eval_every": 2, "time_limit": "0:10"}
    assert not train(settings, **options)
    assert newest(tmp_path / "run").state["step"] == 2
    assert not records(tmp_path / "run", "val_loss")
