"""Works that take turns."""

import pytest
import torch

from bmt_burst.tracks import finish, take_turns

CPU = torch.device("cpu")


def counting(said, name, steps, failing=None):
    try:
        for step in range(steps):
            said.append(f"{name}{step}")
            yield
            if step == failing:
                raise RuntimeError(name)
    finally:
        said.append(f"{name}.")
    return name


def test_turns():
    said = []
    take_turns([[counting(said, "a", 2), counting(said, "b", 1)], [counting(said, "c", 4)]], CPU)
    assert said == ["a0", "c0", "a1", "c1", "a.", "c2", "b0", "c3", "b.", "c."]
    assert finish(counting(said, "d", 2)) == "d"


def test_a_failure_closes_what_began():
    said = []
    works = [[counting(said, "a", 2, failing=0), counting(said, "b", 1)], [counting(said, "c", 4)]]
    with pytest.raises(RuntimeError, match="a"):
        take_turns(works, CPU)
    assert said == ["a0", "c0", "a.", "c."]
    assert not any(list(work) for works in works for work in works)
