"""Registries: of the kinds of models, and of implementations by name or by a tensor."""

import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from bmt_burst.base.registry import Registry
from models.config import CPMConfig
from tests.launcher import ROOT
from train.registry import KINDS, Kind, kind_of_data, load
from train.settings.kinds import PRESETS, config_of, kind_of

EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@EACH_KIND
def test_a_kind_is_found_by_its_configurations_and_by_its_data(kind: Kind):
    presets = [preset for preset in PRESETS.values() if isinstance(preset, load(kind.config))]
    assert presets
    for preset in presets:
        assert kind_of(preset) is kind
        assert config_of(preset.to_dict()) == preset
        assert kind.own & preset.to_dict().keys()
    assert kind_of_data(kind.name) is kind
    assert kind_of_data(None) is KINDS[0]


def test_a_configuration_of_no_kind_is_refused():
    for values, message in (
        ({"dim_model": 64}, "the kind of this model is ambiguous: add model_type, one of cpm-bee"),
        ([], "expected names and values, got list"),
        ({"model_type": "gpt2", "n_embd": 64}, "expected one of llama, .*'model_type': 'gpt2'"),
    ):
        with pytest.raises(ValueError, match=message):
            config_of(values)
    with pytest.raises(ValueError, match="expected a configuration of 'cpm', got one of 'gpt2'"):
        CPMConfig.from_dict(PRESETS["cpm-tiny"].to_dict() | {"model_type": "gpt2"})


def _modules_after(statement: str) -> set[str]:
    """Return the modules that a new process has imported after a statement."""
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_a_script_imports_only_what_it_needs():
    assert not _modules_after("import train.registry") & {"torch", "numpy", "models"}
    prepare = _modules_after("import train.prepare_data")
    assert "train.data.text" in prepare
    assert not prepare & {"torch", "train.cpm_live", "models.cpm"}
    pretrain = _modules_after("import train.pretrain")
    assert "train.data.batches" in pretrain
    others = {"train.cpm_live.rows", "train.generation", "models.cpm_bee", "models.cpm_ant"}
    assert not pretrain & (others | {"bmt_burst.adapters"})


REASONS = {"fast": "it is closed", "slow": None}


@pytest.fixture
def registry(monkeypatch):
    registry = Registry("collections", dict.fromkeys(REASONS, "abc"))
    monkeypatch.setattr(registry, "load", lambda name: SimpleNamespace(reason=REASONS[name]))
    return registry


def pick(registry, flash):
    return registry.pick(flash, torch.zeros(2, 8), lambda x: x.reason, {"old": ("fast",)})


def test_auto_takes_the_first_that_does_not_refuse(registry):
    assert pick(registry, "auto") == pick(registry, "slow") == "slow"


@pytest.mark.parametrize("flash", ["fast", "old"])
def test_what_is_asked_for_by_name_is_taken_or_refused(registry, flash):
    reason = f"no kernel for flash='{flash}', torch.float32, head size 8 on cpu: fast: it is closed"
    with pytest.raises(ValueError, match=reason):
        pick(registry, flash)


def test_names_that_are_not_known(registry):
    with pytest.raises(ValueError, match=r"'auto', 'old', 'fast', 'slow'\], got 'new'"):
        pick(registry, "new")
    with pytest.raises(TypeError, match="flash must be the name of a kernel, got 3"):
        pick(registry, 3)


def test_implementations_are_loaded_once():
    registry = Registry("unittest", {"torch": "mock", "mock": "mock:Mock"})
    assert registry.load("torch") is registry.find(torch.zeros(1, device="meta")) is mock
    assert isinstance(registry.load("mock"), mock.Mock)
    assert registry.load("mock") is registry.load("mock")
