"""Finds the Triton kernels of a rehearsal, and compiles some, for a GPU that is not there. Run by
test_warming.py. It prints the names of the kernels.
"""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bmt_burst.kernels.fa4 import Fa4Kernel
from bmt_burst.merging import fused, merge
from tests.test_warming import CPU, changed
from train.planning import rehearsal


class Driver:
    """A driver of one H100, as far as compilers ask."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


if __name__ == "__main__":
    driver.set_active(Driver())
    merge._backend = lambda x: fused
    rehearsal._TOKENS = 1024
    rehearsal.Rehearsal.pick_kernel = lambda *_: Fa4Kernel()
    torch.cuda.empty_cache = lambda: None
    jobs = rehearsal.find_jobs(changed(seq_len=2048), CPU)
    launched = [job for job in jobs if job.func is not rehearsal._compile]
    print(*{job.func.__self__.__name__ for job in launched})
    kernel = launched[0]()
    assert kernel.asm["cubin"]
