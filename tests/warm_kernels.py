"""Finds the Triton kernels of a rehearsal, and compiles one, for a GPU that is not there. Run by
test_warming.py. It prints the names of the kernels. No mask may need another one.
"""

from __future__ import annotations

import random

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bmt_burst import Layout, Mask, alibi_slopes, lightning_attn_func, simulate
from bmt_burst.kernels.fa4 import Fa4Kernel
from bmt_burst.lightning import kernels as lightning_kernels
from bmt_burst.merging import fused, merge
from bmt_burst.transport import Transport
from tests.test_warming import CPU, changed, random_ends
from train.planning import rehearsal


class Driver:
    """A driver of one H100, with the answers that compilers need."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def pass_states(facts: rehearsal.Rehearsal, ring: Transport, ends: list[int]) -> None:
    """Compute a rank's lightning attention, with its backward, of documents that end there."""
    layout = Layout.zigzag(facts.seq_len, facts.sp_size)
    shape = 1, layout.length(ring.rank), facts.heads, facts.head_size
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    options = {"mask": Mask.documents(ends), "layout": layout, "process_group": ring}
    lightning_attn_func(q, k, v, alibi_slopes(facts.heads), **options).sum().backward()


if __name__ == "__main__":
    driver.set_active(Driver())
    merge._MODULES.find = lambda x: fused
    rehearsal._TOKENS = 1024
    rehearsal.Rehearsal.pick_kernel = lambda *_: Fa4Kernel()
    lightning_kernels.pick = lambda *_: "triton"
    whole = changed(
        head_size=16, sp_size=4, inner_size=4, seq_len=1 << 13, lightning="auto", gated=True
    )
    runs = [whole, changed(head_size=16, sp_size=4, inner_size=4, seq_len=1 << 13, chunks=3)]
    found = [rehearsal.find_jobs(facts, CPU) for facts in runs]
    launched = [[job for job in jobs if job.func is rehearsal._compile] for jobs in found]
    print(*{job.args[0].__name__ for jobs in launched for job in jobs})

    chance = random.Random(2)
    examples = [random_ends(chance, whole.seq_len) for _ in range(12)]
    rehearsal.Rehearsal.tokens, rehearsal.Rehearsal.examples = whole.seq_len, lambda _: examples
    for facts, jobs in zip(runs, launched, strict=True):
        needed = {}
        with rehearsal._noting_launches(needed):
            rehearsal.rehearse(facts, rehearsal.Recorder(Fa4Kernel()), CPU)
            for ends in examples if facts.lightning else ():
                simulate(facts.sp_size, lambda ring, ends=ends: pass_states(whole, ring, ends))
        missing = needed.keys() - {job.args[1] for job in jobs}
        assert not missing, missing
    kernel, data = launched[0][0].args  # only a GPU's driver makes what launches it
    assert kernel.preload(data).asm["cubin"]
