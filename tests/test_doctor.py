"""The doctor on this machine, and on one with something broken."""

import subprocess
import sys

import pytest

from bmt_burst import doctor, kernels


@pytest.mark.slow
def test_doctor_finds_what_works_here():
    done = subprocess.run([sys.executable, "-m", "bmt_burst.doctor"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    marks = {line[4:16].strip(): line[:2] for line in done.stdout.splitlines() if line[:2] in ("ok", "--", "!!")}
    assert marks["torch"] == marks["reference"] == marks["ring"] == "ok"
    assert marks.keys() >= {"GPUs", "links", "NCCL", *kernels.names(), "fused sums", "BMTrain"}
    assert "!!" not in marks.values()


def test_doctor_says_what_does_not_work(monkeypatch, capsys):
    kernel = kernels.load("cpu")
    plain = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda *args, **options: [x * 1.1 for x in plain(*args, **options)])
    monkeypatch.setattr(doctor, "checks", lambda: [("cpu", lambda: doctor._kernel("cpu"))])
    assert doctor.main() == 1
    assert "!!  cpu          RuntimeError: results are wrong by" in capsys.readouterr().out
