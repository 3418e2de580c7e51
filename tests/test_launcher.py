"""Scripts on ranks end, whatever a rank does."""

import os
import time

from tests import launcher
from tests.launcher import run_script

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
