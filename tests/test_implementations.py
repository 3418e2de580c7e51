"""One way to choose an implementation, by name or by a tensor."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from bmt_burst.base.registry import Registry

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
