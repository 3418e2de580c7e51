"""The tests' own tools: ranks end, whatever one does, and rounding is told from a wrong entry."""

import math
import os
import time

import pytest
import torch

from bmt_burst import Mask, Slice
from tests import launcher
from tests.cases import random_qkv
from tests.launcher import run_script
from tests.reference import attention_errors, dense_results

FAILING = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(__file__).parent
sys.stdout.write(f"rank {rank} of {dist.get_world_size()}\\n")  # in one piece
sys.stdout.flush()
(folder / f"{rank}").touch()
while rank == 1:
    if all((folder / f"{other}").exists() for other in range(3)):  # all have printed it
        os._exit(7)
    time.sleep(0.01)
time.sleep(500)
"""


def test_ranks_that_outlive_a_failed_one_are_ended(tmp_path, monkeypatch):
    """The failed one is not the first, for which a loop over ranks would wait."""
    monkeypatch.setattr(launcher, "GRACE", 0.5)
    (tmp_path / "script.py").write_text(FAILING)
    began = time.monotonic()
    code, printed = run_script(3, tmp_path / "script.py")
    assert time.monotonic() - began < 300
    assert code == 7
    assert all(f"rank {rank} of 3" in printed for rank in range(3)), printed
    assert printed.endswith("run_script: ended rank 0 with -9, rank 1 with 7, rank 2 with -9\n")


def test_a_forked_process_has_the_files_that_are_passed_and_no_others():
    """What it writes to another one is lost."""
    read, passed = os.pipe()
    other = os.dup(passed)
    code = f"import os; os.write({other}, b'other'); os.write({passed}, b'passed')"
    pid = launcher._fork(None, [code], [passed])
    os.close(passed)
    os.close(other)
    with open(read, "rb") as file:
        assert file.read() == b"passed"
    assert os.waitpid(pid, 0) == (pid, 0)


SCALE = 0.3
# each query sees one key or none, so dq and dk are 0 in exact arithmetic
MASK = Mask(6, (Slice((0, 3), (0, 1)),))


def results() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return out, lse, dq, dk, dv of MASK, and the gradient of out."""
    tensors = random_qkv(1, 6, 2, 2, 8)
    return dense_results(MASK, tensors, SCALE), tensors[3]


def test_rounding_where_all_cancels_is_a_small_error():
    """CPUs round differently, so a 0 of one CPU may be 1e-15 on another."""
    expected, dout = results()
    assert max(x.abs().max() for x in expected[2:4]) < 1e-14
    got = [x + 1e-15 for x in expected]
    assert max(attention_errors(got, expected, dout, SCALE).values()) < 1e-14
    got = [*expected[:2], torch.full_like(dout, 1e-15), torch.zeros_like(dout), expected[4]]
    assert max(attention_errors(got, expected, dout, SCALE).values()) < 1e-14


@pytest.mark.parametrize("i", range(5))
@pytest.mark.parametrize("wrong", [1e-6, math.nan])
def test_one_wrong_entry_is_a_large_error(i, wrong):
    expected, dout = results()
    got = [x.clone() for x in expected]
    got[i][0, 0, 0] += wrong
    assert max(attention_errors(got, expected, dout, SCALE).values()) > 1e-8


@pytest.mark.parametrize("wrong", [0.0, math.inf, math.nan])
def test_an_lse_of_who_sees_nothing_is_minus_infinity(wrong):
    expected, dout = results()
    assert expected[1][0, 0, 5] == -math.inf
    got = [x.clone() for x in expected]
    got[1][0, 0, 5] = wrong
    assert attention_errors(got, expected, dout, SCALE)["lse"] == math.inf
