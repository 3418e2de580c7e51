"""The functions that add a bias to FA4's scores, called on numbers as the package calls them.

They need no GPU here.
"""

import ctypes
import importlib.util
import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from bmt_burst.bias import kernels
from bmt_burst.bias.call_bias import CallBias, SegmentIds
from bmt_burst.bias.kernels import fa4
from bmt_burst.sequence.span import length
from bmt_burst.sequence.tile import KernelCall
from tests.cases import named_calls, random_bias

NO_INFO = SimpleNamespace()


class Registers(list):
    """Numbers that a thread holds."""

    @property
    def shape(self) -> int:
        return len(self)

    def load(self):
        return self

    def __add__(self, other):
        return Registers(x + y for x, y in zip(self, other, strict=True))


class Pointer(NamedTuple):
    """Into memory of the CPU; as a tensor, what is there."""

    kind: type
    address: int

    def __add__(self, count):
        return self._replace(address=self.address + count * ctypes.sizeof(self.kind))

    def __getitem__(self, place):
        return (self + place).kind.from_address((self + place).address).value


def score_functions(monkeypatch) -> ModuleType:
    """`fa4_scores` where CuTe DSL's types are Python's."""
    cutlass, cute = ModuleType("cutlass"), ModuleType("cutlass.cute")
    cutlass.cute, cutlass.min, cutlass.max, cutlass.range_constexpr = cute, min, max, range
    cutlass.Float32, cutlass.Int32, cutlass.Int64 = ctypes.c_float, ctypes.c_int32, ctypes.c_int64
    cutlass.select_ = lambda condition, one, other: one if condition else other
    cute.jit, cute.size, cute.make_layout = (lambda function: function), int, int
    cute.AddressSpace = SimpleNamespace(gmem=None)
    cute.make_ptr = lambda kind, address, space, assumed_align: Pointer(kind, address)
    cute.make_tensor = lambda pointer, layout: pointer
    cute.make_rmem_tensor = lambda size, dtype: Registers([0.0] * size)
    monkeypatch.setitem(sys.modules, "cutlass", cutlass)
    monkeypatch.setitem(sys.modules, "cutlass.cute", cute)
    spec = importlib.util.find_spec("bmt_burst.bias.kernels.fa4_scores")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(functions: ModuleType, bias: CallBias, call: KernelCall, name: str) -> None:
    """Compare each pair of each tile. Calls have some keys of a query, also beyond the last one."""
    batch, heads = 2, bias.table.shape[1]
    options = fa4._bias_options(bias, call, batch)
    add, numbers = options["score_mod"], [x.value for x in options["aux_scalars"]]
    assert add is getattr(functions, name)
    expected, spans, seen = bias.table[bias.rows()], call.sequences(), 0
    for sequence, (q, kv) in enumerate(spans * batch):
        for i, j, head in itertools.product(
            range(length(q)), range(0, length(kv), 3), range(heads)
        ):
            where = [sequence], [head]
            names = {
                "q_idx": [i] * 3,
                "kv_idx": [j, j + 1, j + 2],
                "seqlen_info": NO_INFO,
                "aux_tensors": (),
            }
            scores = Registers((0.5, 0.25, -4.0))
            found = add(scores, *where, **names, aux_scalars=numbers)
            there = min(length(kv) - j, 3)
            added = torch.tensor(found)[:there] - torch.tensor(scores)[:there]
            assert torch.allclose(
                added, expected[q[0] + i, kv[0] + j :, head][:there], atol=1e-6
            ), (sequence, i, j)
            assert (
                functions.gradient_of_sum(found, scores, *where, **names, aux_scalars=numbers)
                == found
            )
            seen += there
    assert seen == batch * heads * sum(length(q) * length(kv) for q, kv in call.tiles)


@pytest.fixture
def functions(monkeypatch) -> ModuleType:
    module = score_functions(monkeypatch)
    monkeypatch.setattr(kernels, "fa4_scores", module, raising=False)
    return module


def test_biases_by_distance(functions):
    """Distances go beyond reach, and tiles are far apart."""
    generator = torch.Generator().manual_seed(0)
    call = KernelCall(11, 10, (((0, 4), (2, 5)), ((5, 11), (5, 9))))
    q_position, kv_position = (torch.arange(count, dtype=torch.int32) + 3 for count in (11, 10))
    q_position[5:] += 7
    distances = torch.randint(6, (7,), dtype=torch.int32, generator=generator)
    apart = tuple(int(kv_position[kv[0]] - q_position[q[0]]) for q, kv in call.tiles)
    bias = CallBias(
        torch.randn(6, 3, generator=generator), q_position, kv_position, distances, apart=apart
    )
    check(functions, bias, call, "add_by_distance")


@pytest.mark.parametrize("kind", ["causal", "tiles apart", "documents"])
def test_biases_by_segments(functions, kind):
    """Tokens are those of a contiguous, zigzag or striped rank, or in no order."""
    call = named_calls(3)[kind]
    for seed in range(4):
        check(functions, random_bias(call, 2, seed, torch.float32), call, "add_by_segments")


def test_the_numbers_of_a_table_are_made_once(functions):
    """Their address is the first number."""
    call = named_calls(3)["documents"]
    bias = random_bias(call, 2, 0, torch.float32)
    first, again = (fa4._bias_options(bias, call, 2)["aux_scalars"][0].value for _ in range(2))
    assert first == again


def test_biases_where_no_groups_are_equal(functions):
    """There may be no pairs of segments at all."""
    numbers = [torch.full((4,), i, dtype=torch.int32) for i in range(4)]
    segments = SegmentIds(*numbers, numbers[0][:0], 5)
    bias = CallBias(torch.randn(6, 2), *numbers[:2], numbers[0][:1], segments)
    check(functions, bias, KernelCall.whole(4), "add_by_segments")
