"""Records of a run in wandb, with a small stand-in for the package, which is large."""

import json
import sys

import pytest

from tests.runs import read_records, train
from train.base import ranks
from train.settings.config import TrainConfig

STAND_IN = """
import itertools, json
from types import SimpleNamespace
from pathlib import Path

class Error(Exception): pass
class UsageError(Error): pass
class CommError(Error): pass
class AuthenticationError(CommError): pass
errors = SimpleNamespace(UsageError=UsageError, CommError=CommError,
                         AuthenticationError=AuthenticationError)
LOG = Path(__file__).with_name("log")
FAILS, IDS = {}, itertools.count(1)

def note(**what):
    with open(LOG, "a") as file:
        file.write(json.dumps(what) + chr(10))

def Settings(console):
    return console

def init(mode="online", **options):
    note(init=options | {"mode": mode})
    if error := FAILS.pop(mode, None):
        raise error
    return Run(options["id"] or f"id{next(IDS)}")

def teardown():
    note(teardown=True)

def Run(id):
    return SimpleNamespace(
        id=id,
        define_metric=lambda name, step_metric: note(metric=[name, step_metric]),
        log=lambda values: note(log=values),
        finish=lambda: note(finish=id),
    )
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """The stand-in, and `log`, which returns its calls by their name."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    def log(name):
        calls = map(json.loads, (tmp_path / "site/log").read_text().splitlines())
        return [call[name] for call in calls if name in call]

    wandb.log = log
    yield wandb
    del sys.modules["wandb"]


def test_wandb_gets_every_record_and_a_resumed_run_continues_its_run(settings, tmp_path, wandb):
    run = settings | {"wandb": "mine", "resume": "auto", "save_every": 0}
    evaluated = {"val_data": settings["data"], "eval_every": 2}
    train(run, **evaluated, steps=2, decay_steps=0)
    train(run, **evaluated, steps=4, decay_steps=0)
    [first, second] = wandb.log("init")
    assert (first["project"], first["id"], first["name"]) == ("mine", None, "run")
    assert first["config"]["config"]["seq_len"] == 61
    assert second["id"] == "id1"
    assert wandb.log("log") == read_records(tmp_path / "run")
    assert wandb.log("metric") == [["*", "step"]] * 2
    assert (wandb.log("finish"), len(wandb.log("teardown"))) == (["id1", "id1"], 2)
    train(run | {"wandb": "other"}, steps=5, decay_steps=0)
    assert wandb.log("init")[-1]["id"] is None


def test_a_network_that_is_down_ends_no_run_and_a_missing_login_does(
    settings, tmp_path, wandb, capsys
):
    wandb.FAILS["online"] = wandb.CommError("timed out")
    train(settings, wandb="mine")
    assert "wandb cannot be reached, and records offline: timed out" in capsys.readouterr().err
    assert [call["mode"] for call in wandb.log("init")] == ["online", "offline"]
    for kind in (wandb.UsageError, wandb.AuthenticationError):
        wandb.FAILS["online"] = kind("not logged in")
        with pytest.raises(ranks.RankError, match="--wandb mine: not logged in"):
            train(settings, wandb="mine", output=str(tmp_path / kind.__name__))
        assert not (tmp_path / kind.__name__ / "metrics.jsonl").exists()


def test_wandb_that_is_not_installed_and_names_that_it_refuses_are_errors_at_once(
    settings, tmp_path, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ranks.RankError, match=r"--wandb needs .* pip install 'bmt_burst\[wandb\]'"):
        train(settings, wandb="mine")
    assert not (tmp_path / "run").exists()
    for name in ("a/b", "x" * 129):
        with pytest.raises(ValueError, match="--wandb must be a project's name of at most 128"):
            TrainConfig(wandb=name)
