"""What FA4 adds to scores, without a GPU: its functions on numbers, called as the package calls them."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import torch

from bmt_burst.kernels import fa4
from bmt_burst.kernels.bias import CallBias
from bmt_burst.span import length
from bmt_burst.tile import KernelCall

NO_INFO = SimpleNamespace()


class Registers(list):
    def load(self):
        (number,) = self
        return number


def score_functions(monkeypatch) -> ModuleType:
    """`fa4_scores` where CuTe DSL's types are Python's."""
    cutlass, cute = ModuleType("cutlass"), ModuleType("cutlass.cute")
    cutlass.cute, cutlass.Float32, cutlass.min, cutlass.max = cute, float, min, max
    cute.jit, cute.make_rmem_tensor = (lambda function: function), (lambda size, dtype: Registers([dtype()] * size))
    monkeypatch.setitem(sys.modules, "cutlass", cutlass)
    monkeypatch.setitem(sys.modules, "cutlass.cute", cute)
    spec = importlib.util.find_spec("bmt_burst.kernels.fa4_scores")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_fa4_adds_to_scores_goes_by_distance(monkeypatch):
    """Of every pair of every tile, of each of a batch; distances go beyond reach, and tiles are far apart."""
    functions, generator = score_functions(monkeypatch), torch.Generator().manual_seed(0)
    call = KernelCall(11, 10, (((0, 4), (2, 5)), ((5, 11), (5, 9))))
    q_position, kv_position = (torch.arange(count, dtype=torch.int32) + 3 for count in (11, 10))
    q_position[5:] += 7
    distances = torch.randint(6, (7,), dtype=torch.int32, generator=generator)
    apart = tuple(int(kv_position[kv[0]] - q_position[q[0]]) for q, kv in call.tiles)
    bias = CallBias(torch.randn(6, 3, generator=generator), q_position, kv_position, distances, apart=apart)
    batch, aux_tensors = 2, fa4._distances(bias, call, batch=2)
    assert [x.dtype for x in aux_tensors] == [torch.float32, torch.int32]
    expected, spans, seen = bias.table[bias.rows()], call.sequences(), 0
    for sequence, (q, kv) in enumerate(spans * batch):
        for i, j, head in torch.cartesian_prod(*map(torch.arange, (length(q), length(kv), 3))).tolist():
            where = [sequence], [head]
            names = {"q_idx": [i], "kv_idx": [j], "seqlen_info": NO_INFO, "aux_tensors": aux_tensors}
            added = functions.add_by_distance(0.5, *where, **names) - 0.5
            assert abs(added - expected[q[0] + i, kv[0] + j, head]) < 1e-6, (sequence, i, j)
            assert functions.gradient_by_distance(2.5, 0.5, *where, **names) == 2.5
            seen += 1
    assert seen == batch * 3 * (4 * 3 + 6 * 4)
