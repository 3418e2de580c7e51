"""Finds the Triton kernels of a rehearsal, and compiles one, for a GPU that is not there. Run by
test_warming.py. It prints the names of the kernels. No mask may need another one.
"""

from __future__ import annotations

import json
import random
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bmt_burst import ahead
from bmt_burst.base.registry import Registry
from bmt_burst.fused import torch_passes, triton_passes
from bmt_burst.lightning import kernels as lightning_kernels
from models.config import LIGHTNING
from tests.test_warming import RING, SHORT_BLOCKS, changed, fake_kernel, note, random_ends
from train.planning.warming import Rehearsal


class Driver:
    """A driver of one H100, with the answers that compilers need."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


if __name__ == "__main__":
    driver.set_active(Driver())
    fake_kernel(setattr)
    torch.set_num_threads(1)
    Registry.find = lambda self, x: self.load("triton")
    for module in [x for x in sys.modules.values() if hasattr(x, "find_passes")]:
        module.find_passes = lambda x: triton_passes
    torch_passes.rotate = triton_passes.rotate
    triton_passes.count_processors = lambda device, **_: 132
    lightning_kernels.pick = lambda *_: "triton"
    torch.cuda.device_of = lambda x: torch.no_grad()  # any context
    ahead._TOKENS = 1024
    of_model = {"head_dim": 16, "num_layers": 2, "attention_gate": True}
    mixers = {"mixers": ("attention", LIGHTNING)}
    shape = {"size": 2, "inner": 2, "seq_len": 1 << 12, "attention": RING}
    runs = [changed(**of_model, **mixers, **shape), changed(**of_model, **shape, chunks=3)]
    alone = {"size": 1, "inner": 1, "sparse": SHORT_BLOCKS}
    runs.append(changed(**of_model, **mixers, **shape | alone))
    found = [note(run) for run in runs]
    compiled = [{key for key in jobs if isinstance(key, str)} for jobs in found]
    print(*{json.loads(key)["name"].rpartition(".")[2] for keys in compiled[:2] for key in keys})

    chance = random.Random(2)
    examples = [random_ends(chance, runs[0].seq_len) for _ in range(3)]
    Rehearsal.examples = lambda _: examples
    for run, keys in zip(runs, compiled, strict=True):
        missing = {key for key in note(run) if isinstance(key, str)} - keys
        assert not missing, missing
    # only a GPU's driver makes what launches it
    job = next(job for key, job in found[0].items() if "_merge_outputs" in key)
    module, name, data = job.args
    assert getattr(ahead.importlib.import_module(module), name).preload(data).asm["cubin"]
