"""What torch.compile makes of the library: functions that are compiled on GPUs are what is written,
for shapes as they come; models of its users go on over several ranks as if they were not compiled.
"""

import contextlib
import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import bmt_burst
from bmt_burst import (
    Cache,
    Chunks,
    Decoder,
    Mask,
    SequenceParallel,
    burst_attn_func,
    init_sequence_parallel,
    nn,
    simulate,
)
from bmt_burst.loss import linear_cross_entropy_sum
from bmt_burst.merging.surrogate import surrogate_out
from bmt_burst.parts.chunks import Chunk
from tests.launcher import ROOT, run_ranks
from tests.reference import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def test_compiled_equals_written():
    """As torch traces it on CPUs, without generated code. Entries round, but delta counts."""
    torch._dynamo.reset()
    written = surrogate_out.__wrapped__
    traced = torch.compile(written, dynamic=True, fullgraph=True, backend="aot_eager")
    compiled = surrogate_out if DEVICE == "cuda" else traced
    for tokens in (5, 10):  # nothing is compiled again for more of them
        out = torch.randn(2, tokens, 3, 8).to(DEVICE, torch.bfloat16)
        delta = torch.randn(2, 3, tokens, device=DEVICE)
        mine, expected = (each(out, delta) for each in (compiled, written))
        assert mine.dtype == expected.dtype
        mine, expected = ((x * out.double()).sum(-1) for x in (mine, expected))
        assert torch.allclose(mine, expected, rtol=1e-5, atol=1e-6)


def test_a_program_that_compiles_nothing_does_not_load_the_compiler():
    """It takes seconds and more than 100 MiB."""
    program = """
import sys, torch
from bmt_burst import Mask, burst_attn_func, nn, simulate
from bmt_burst.loss import linear_cross_entropy_sum
x = torch.randn(1, 8, 2, 4, requires_grad=True)
burst_attn_func(x, x, x, mask=Mask.documents((0, 3, 8))).sum().backward()
simulate(2, lambda ring: burst_attn_func(x, x, x, process_group=ring).sum().backward())
layer = nn.BurstAttention(8, 2)
layer(torch.randn(1, 8, 8), *nn.rope_tables(torch.arange(8), 4)).sum().backward()
weight = torch.randn(5, 8, requires_grad=True)
hidden, targets = torch.randn(3, 8, requires_grad=True), torch.tensor([1, 2, 3])
linear_cross_entropy_sum(hidden, weight, targets)[0].backward()
assert "torch._dynamo" not in sys.modules, "loaded"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


class Model(torch.nn.Module):
    """A layer of attention between what a compiler may fuse, and a loss."""

    def __init__(self, sp):
        super().__init__()
        self.attention = nn.BurstAttention(16, 4, 2, sp=sp)
        self.head = torch.nn.Parameter(torch.randn(11, 16))

    def forward(self, x, positions, labels):
        cos, sin = nn.rope_tables(positions, self.attention.head_dim)
        x = x + self.attention(F.layer_norm(x, (16,)), cos, sin)
        total, _ = linear_cross_entropy_sum(x, self.head, labels)
        return total + (F.gelu(x) ** 2).sum()


def worst_differences(rank: int) -> list[float]:
    """Return the errors of losses and gradients, compiled against not, for several lengths.

    Compiling takes long, so each rank compiles in another way: rank 0 for two lengths, rank 1 with
    its backward, for one. The last error is of autograd compiled as a whole, which rank 0 has.
    """
    sp, worst = init_sequence_parallel(), []
    torch.manual_seed(0)
    model = Model(sp)
    lengths = (16, 24, 9)
    if rank == 0:
        compiled, chosen = torch.compile(model, backend="eager"), lengths[::2]
    else:
        compiled, chosen = torch.compile(model, backend="aot_eager"), lengths[1:2]
    for tokens in lengths:
        x, labels = torch.randn(2, tokens, 16), torch.randint(0, 11, (2, tokens))
        arguments = sp.shard(x), sp.positions(tokens), sp.shard(labels)
        results = []
        for function in (model, compiled if tokens in chosen else model):
            loss = function(*arguments)
            results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        worst.append(max(relative_error(a, b) for a, b in zip(*results, strict=True)))
    compiled_backward = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    # of attention alone, since it would take long for a layer
    shards, grads = [sp.shard(torch.randn(1, 8, 2, 4)) for _ in range(3)], []
    for context in (contextlib.nullcontext(), compiled_backward):
        inputs = [shard.clone().requires_grad_() for shard in shards]
        with contextlib.nullcontext() if rank else context:
            burst_attn_func(*inputs, causal=True).square().sum().backward()
        grads.append([x.grad for x in inputs])
    return [*worst, max(relative_error(a, b) for a, b in zip(*grads, strict=True))]


def test_a_compiled_model_of_several_ranks_takes_every_length():
    for differences in run_ranks(2, worst_differences):
        assert max(differences) < 2e-6


def test_a_compiled_function_may_attend_in_chunks_and_caches():
    torch._dynamo.reset()
    x = torch.randn(1, 24, 2, 4)

    def attend(part, x):
        return part.attend(0, x * 2, x, x) + 1

    def work(ring):
        sp, results = SequenceParallel(ring.rank, 2, process_group=ring), []
        compiled = torch.compile(attend, backend="eager")
        for run in (attend, attend if ring.rank else compiled):  # another rank need not compile
            cache = Cache(sp, 1, 26)
            chunks = Chunks(Mask.causal(24), 24, 1, sp).forward(last=True), cache.prefill(24)
            parts = itertools.chain(*chunks)
            results.append([run(part, part.shard(x)) for part in parts])
            results[-1].append(run(cache, x[:, :2]))
        return all(map(torch.equal, *results))

    assert simulate(2, work) == [True, True]


def test_no_graph_has_what_ranks_do_together():
    on_one_rank = {"alibi_slopes", "fold_prefixes", "init_sequence_parallel", "shard", "unshard"}
    names = set(bmt_burst.__all__) - on_one_rank - {"shift_labels", "simulate"}
    entries = [vars(bmt_burst)[name] for name in names if name.islower()]
    entries += [
        Cache.attend,
        Chunk.attend,
        Chunk.mix,
        Cache.mix,
        Chunk.longest,
        Chunk.check_positions,
    ]
    entries += [Decoder.__call__]
    entries += [vars(SequenceParallel)[name] for name in ("longest", "unshard", "sum")]
    assert [x for x in entries if not getattr(x, "_torchdynamo_disable", False)] == []
