"""Stages of a file: options, resuming with the same command, and replaced processes."""

import dataclasses
import gc
import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.launcher import forkserver
from tests.preparing import write_tokens
from tests.refusals import refused_line
from tests.runs import records
from tests.test_model import SMALL
from tests.test_tokenizer import words_file
from train import pretrain
from train.base.ranks import RankError
from train.base.signals import StopSignal
from train.checkpoints import checkpoint
from train.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from train.loop.stages import STAGE, parse_run

FIRST = {"name": "short", "seq_len": 31, "steps": 3}
SECOND = {"name": "long", "seq_len": 61, "steps": 2, "rope_theta": 5e4, "sp_size": 1}


class Folder:
    """A folder with data, and a file of stages."""

    def __init__(self, path: Path):
        self.path, self.file = path, path / "stages.json"
        self.prepare("data", ByteTokenizer())
        (path / "model.json").write_text(json.dumps(SMALL.to_dict()))

    def prepare(self, name: str, tokenizer: Tokenizer) -> None:
        texts = (f"f({i}) = {i * i};\n" for i in range(200))
        write_tokens(self.path / name, tokenizer, *texts)

    def write(self, *stages: dict, **common) -> Path:
        options = {"model": str(self.path / "model.json"), "data": str(self.path / "data")}
        options |= {"output": str(self.path / "run"), "batch_size": 2, "lr": 3e-3}
        self.file.write_text(json.dumps(options | common | {"stage": list(stages)}))
        return self.file

    def train(self) -> int:
        code = pretrain.main(["--stages", str(self.file)])
        gc.collect()  # the rank's lock, which ends with its process
        return code


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path)


def refused(*argv, capfd) -> str:
    printed = refused_line(capfd, parse_run, *argv)
    assert printed.startswith("pretrain.py: ")
    return printed


def test_wrong_files_are_refused(folder, capfd):
    for stages, common, given, message in (
        ([], {}, [], "stages.json: expected a table [[stage]] for each stage"),
        ([{"seq_len": 4}], {}, [], "stage 1 needs a name of letters, digits"),
        ([FIRST, SECOND, FIRST], {}, [], "stages.json: two stages are called short"),
        ([{**FIRST, "steppes": 1}], {}, [], "stages.json: stage short: unknown option 'steppes'"),
        ([FIRST], {"steppes": 1}, [], "stages.json: unknown option 'steppes'"),
        ([FIRST, {**SECOND, "lr": -1.0}], {}, [], "stage long: --lr must be positive, got -1.0"),
        ([{**FIRST, "steps": "4K"}], {}, [], "stage short: steps must be int, got '4K'"),
        ([{**FIRST, "seq_len": "4KB"}], {}, [], "stage short: seq_len: expected a number, with"),
        ([{**FIRST, "model": "7b"}], {}, [], "stage short: model is the same in all stages"),
        ([FIRST], {"new_stage": True}, [], "--new-stage does not go with --stages"),
        ([FIRST], {"output": ""}, [], "--output must not be empty"),
        ([FIRST], {"save": False}, [], "--save does not go with --stages: a stage begins"),
        ([FIRST], {}, ["--resume", "runs/x"], "--resume does not go with --stages: stages always"),
        ([FIRST], {}, ["--config", "x.toml"], "--config does not go with --stages"),
        ([FIRST], {}, ["--seq-len", "8"], "stage short sets seq_len: leave out --seq-len"),
    ):
        file = folder.write(*stages, **common)
        assert message in refused("--stages", file, *given, capfd=capfd)


def test_a_stage_has_the_options_of_all_its_own_and_those_of_the_command_line(folder):
    (folder.path / "stages.toml").write_text(
        'model = "7b"\nlr = 0.1\nsteps = 9\n[[stage]]\nname = "4k"\nlr = 1\n[[stage]]\nname = "x"\n'
    )
    line = ["--stages", str(folder.path / "stages.toml"), "--output", "runs/a", "--steps", "7"]
    config, stages = parse_run([*line, "--resume", "auto"])
    found = [(s.config.lr, s.config.steps, s.config.model) for s in stages.all]
    assert found == [(1.0, 7, "7b"), (0.1, 7, "7b")]
    assert [str(stage.folder) for stage in stages.all] == ["runs/a/01-4k", "runs/a/02-x"]
    assert (config.output, config.resume, config.new_stage) == ("runs/a/01-4k", "auto", False)
    assert [stages.shared[f"--lr (stage {name})"] for name in ("4k", "x")] == [1.0, 0.1]


@pytest.fixture
def replaced(monkeypatch) -> Iterator[list[dict[str, str]]]:
    """Return the environment variables of the processes that would replace this one."""
    asked: list[dict[str, str]] = []
    never = SimpleNamespace(received=False)
    monkeypatch.setattr("train.pretrain.StopSignal", lambda *_: never)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("train.loop.metrics.plot_losses", lambda records, file: None)
    monkeypatch.setattr(
        "train.pretrain.replace_process", lambda argv, variables, stop: asked.append(variables)
    )
    yield asked
    if dist.is_initialized():  # after a failure
        dist.destroy_process_group()


def test_one_command_trains_all_stages_and_resumes_in_each(folder, replaced, monkeypatch, capfd):
    """The second stage begins at the first one's last checkpoint, as --new-stage does."""
    folder.write(FIRST, SECOND)
    run = folder.path / "run"
    assert folder.train() == 0 and replaced == [{STAGE: "2"}]
    assert folder.train() == 0 and replaced == [{STAGE: "2"}] * 2, "a kill between both"
    assert "there is nothing to do: step 3 of 3 is done" in capfd.readouterr().out
    monkeypatch.setenv(STAGE, "2")
    assert folder.train() == 0 and len(replaced) == 2
    printed = capfd.readouterr().out
    assert f"stage 2 of 2: long, in {run}/02-long" in printed
    assert f"a new stage from {run}/01-short/step_00000003" in printed
    assert f"all 2 stages of {folder.file} are done" in printed
    monkeypatch.delenv(STAGE)
    expected = records(run / "02-long")
    assert checkpoint.newest(run / "02-long").name == "step_00000002"
    options = {"model": folder.path / "model.json", "data": folder.path / "data", "lr": 3e-3}
    options |= {"batch_size": 2, "output": folder.path / "by-hand", "seq_len": 61, "steps": 2}
    options |= {"rope_theta": 5e4, "resume": run / "01-short/step_00000003"}
    line = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", value)]
    assert pretrain.main([*map(str, line), "--new-stage"]) == 0
    assert records(folder.path / "by-hand") == expected
    mixture = {"x": f"{folder.path}/data:1"}
    folder.write({**FIRST, "lr": 0.1, "save_every": 1, "data": mixture}, {**SECOND, "steps": 3})
    capfd.readouterr()
    assert folder.train() == 0
    out, err = capfd.readouterr()
    now = f"--data {folder.path}/data -> x={folder.path}/data:1, --lr 0.003 -> 0.1"
    assert f"stage short is done; not applied to it: {now}\n" in out
    assert "--steps 2 -> 3" in err and "resumed after step 2" in out
    assert list(records(run / "02-long")) == [1, 2, 3]
    _, stages = parse_run(["--stages", str(folder.write(FIRST, SECOND, model=None))])
    found = [stages.opening(stage).model_config() for stage in stages.all]
    assert found == [SMALL, dataclasses.replace(SMALL, rope_theta=5e4)], "those of the checkpoints"


def test_other_stages_than_those_that_were_trained_are_refused(folder, capfd):
    (folder.path / "run/01-short/step_00000003").mkdir(parents=True)
    assert parse_run(["--stages", str(folder.write(FIRST, SECOND))])[1].current.number == 1
    for stages in ([SECOND, FIRST], [{**FIRST, "name": "renamed"}]):
        printed = refused("--stages", folder.write(*stages), capfd=capfd)
        assert "run has checkpoints of 01-short, which" in printed and "does not have" in printed


def test_a_stage_begins_at_the_end_of_a_longer_one(folder):
    """The first stage was trained for more steps than its file has now."""
    for step in (3, 9):
        (folder.path / f"run/01-short/step_{step:08d}").mkdir(parents=True)
    stages = parse_run(["--stages", str(folder.write(FIRST, SECOND))])[1]
    assert stages.all[0].last_checkpoint.name == "step_00000009"


def test_a_file_that_lost_the_stage_of_this_process_is_refused(folder, monkeypatch, capfd):
    monkeypatch.setenv(STAGE, "3")
    printed = refused("--stages", folder.write(FIRST, SECOND), capfd=capfd)
    assert "stages.json: expected at least 3 stages as before, got 2" in printed


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"data": "nowhere"}, "stage long: nowhere has no index.json"),
        ({"data": "OTHER"}, "stage long: .*other has another tokenizer than .*data: expected"),
        ({"sp_size": 2}, "stage long: --sp-size 2 does not divide the world of 1 rank"),
        ({"micro_batch_size": 4}, "stage long: --batch-size 2 is not a multiple of --micro"),
        ({"dtype": "fp16", "engine": "torch"}, "stage long: --dtype fp16 and --offload-opt"),
        ({"wandb": "mine"}, "stage long: --wandb needs the package wandb"),
    ],
)
def test_every_stage_is_checked_before_the_first_step(folder, second, message, monkeypatch, alone):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda x: None if x == "wandb" else find(x))
    if second.get("data") == "OTHER":
        second = {"data": str(folder.path / "other")}
        other = words_file(folder.path, ["f", "[UNK]"], ["</s>"])
        folder.prepare("other", open_tokenizer(other))
    _, stages = parse_run(["--stages", str(folder.write(FIRST, {**SECOND, **second}))])
    with pytest.raises(RankError, match=message):
        stages.check(torch.device("cpu"))


def _stop_and_close(received: bool) -> None:
    stop = StopSignal()
    if received:
        signal.raise_signal(signal.SIGTERM)
    assert stop.close() == received
    signal.raise_signal(signal.SIGTERM)
    os._exit(1)  # not reached


@pytest.mark.parametrize("received", [False, True])
def test_a_signal_at_the_end_of_a_stage_is_not_lost(received):
    process = forkserver().Process(target=_stop_and_close, args=(received,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGTERM
