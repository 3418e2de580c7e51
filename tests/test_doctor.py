"""The doctor on this machine, and on one with something broken."""

import re
import subprocess
import sys

import pytest

from bmt_burst import doctor, kernels
from tests.launcher import GPUS, ROOT

gpu_if_there_is_one = pytest.mark.gpu if GPUS else lambda test: test
ALWAYS = {"torch", "reference", "ring"}
ON_GPUS = {"GPUs", "NCCL", "aten", "triton"}


@gpu_if_there_is_one
@pytest.mark.ranks
@pytest.mark.slow
def test_doctor_finds_what_works_here():
    done = subprocess.run(
        [sys.executable, "-m", "bmt_burst.doctor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.partition("\n\n")[0].splitlines()
    marks = {line[4:16].strip(): line[:2] for line in lines}
    assert marks.keys() == {*ALWAYS, *ON_GPUS, *kernels.names(), "links", "BMTrain"}
    assert "!!" not in marks.values()
    assert {name for name, mark in marks.items() if mark == "ok"} >= ALWAYS | (
        ON_GPUS if GPUS else set()
    )
    way = "by copy engines|over NCCL" if GPUS > 1 else "over gloo"
    assert re.search(rf"ok +ring +two processes ({way})", done.stdout)


def test_doctor_reports_a_broken_kernel(monkeypatch, capsys):
    kernel = kernels.load("cpu")
    plain = kernel.forward
    monkeypatch.setattr(
        kernel, "forward", lambda *args, **options: [x * 1.1 for x in plain(*args, **options)]
    )
    monkeypatch.setattr(
        doctor, "list_checks", lambda: [("cpu", lambda: doctor._check_kernel("cpu"))]
    )
    wrong = "!!  cpu          RuntimeError: results are wrong by"
    assert doctor.main() == 1
    assert capsys.readouterr().out.startswith(wrong)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert doctor.main() == 1
    assert capsys.readouterr().out.startswith(f"..  cpu\r{wrong}")
