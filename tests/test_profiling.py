"""Traces of steps, and the table of where their time went."""

import contextlib
import gzip
import json
from types import SimpleNamespace

import pytest

from bmt_burst import alibi_slopes, burst_attn_func, lightning_attn_func, simulate
from bmt_burst.base import ranges
from tests.cases import random_qkv
from tests.runs import train
from train.settings.config import TrainConfig


def spans(file) -> list[str]:
    """The names of a trace's spans."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("ph") == "X"]


def test_steps_are_profiled_and_their_time_is_shown(settings, tmp_path, capsys):
    train(settings, profile="2:3")
    printed = capsys.readouterr().out
    [trace] = (tmp_path / "run/profile").iterdir()
    assert trace.name == "steps_2-3_rank_00000.json.gz"
    names = spans(trace)
    # two steps of two micro-batches
    assert [names.count(phase) for phase in ("data", "forward", "optimizer")] == [2, 4, 2]
    assert {"aten::mm", "burst kernel"} <= {*names}
    assert f"traces of all ranks: {tmp_path}/run/profile/steps_2-3_rank_*.json.gz" in printed
    for column in ("Self CPU %", "# of Calls", "aten::"):
        assert column in printed[printed.index("profile of steps") :]
    assert printed.count("profile of steps") == 1


def test_a_run_that_is_stopped_or_resumed_profiles_the_steps_that_it_does(
    settings, tmp_path, monkeypatch
):
    stop = SimpleNamespace(received=False)

    def rate(step, config):
        stop.received = step == 2
        return 0.0

    monkeypatch.setattr("train.loop.trainer.learning_rate", rate)
    assert not train(settings, stop, profile="2:3", steps=3)
    assert train(settings, profile="2:3", steps=3, resume="auto")
    names = sorted(file.name[:9] for file in (tmp_path / "run/profile").iterdir())
    assert names == ["steps_2-2", "steps_3-3"]


def test_bad_ranges_are_refused():
    for text in ("3", "0:2", "3:2", "9:11"):
        with pytest.raises(ValueError, match=r"--profile .*must"):
            TrainConfig(profile=text, steps=10)


def test_calls_name_what_they_do(monkeypatch):
    found = set()

    @contextlib.contextmanager
    def note(name):  # a profiler of one thread does not see the others
        found.add(name.split(" 0")[0].rstrip())
        yield

    monkeypatch.setattr(ranges, "_profiler_enabled", lambda: True)
    monkeypatch.setattr(ranges, "record_function", note)

    def work(ring):
        options = {"process_group": ring}
        q, k, v = (x.requires_grad_() for x in random_qkv(1, 64, 4, 2, 16)[:3])
        for strategy in ("ring", "ulysses", "plain-ring"):
            burst_attn_func(q, k, v, causal=True, strategy=strategy, **options).sum().backward()
        lightning_attn_func(q, q, q, alibi_slopes(4), **options).sum().backward()

    simulate(2, work)
    names = "agreement pack fetch land own compute kernel merge return collect states hop"
    assert {f"burst {name}" for name in names.split()} <= found
