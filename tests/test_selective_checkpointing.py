"""Torch's selective activation checkpointing: whatever a policy keeps, gradients stay the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from bmt_burst import (
    Chunks,
    InfLLMV2,
    Layout,
    Mask,
    Scores,
    SequenceParallel,
    burst_attn_func,
    lightning_attn_func,
    simulate,
)
from bmt_burst.fused import torch_passes
from bmt_burst.loss import cross_entropy_sum, linear_cross_entropy_sum, token_logprobs
from bmt_burst.nn import apply_rope, rope_tables
from models.linears import add_gated_linear, add_linear, add_swiglu_linear, norm_linears
from models.tiled import run_tiled

Function = Callable[..., Tensor]
TOKENS = 70
# of the operations that policies keep one by one
NAMES = {
    "_scaled_dot_product_flash_attention_for_cpu", "addmm", "alias", "bmm", "cat", "empty_like",
    "exp", "mm", "mul", "slice", "split_with_sizes", "view", "zeros_like",
}  # fmt: skip
QKV = [(1, TOKENS, 4, 8), (1, TOKENS, 2, 8), (1, TOKENS, 2, 8)]
STATES = [(2, 150, 3, 4)] * 3
BLOCK, WIDE = (1, 9, 8), (8, 8)
LABELS = torch.arange(20).remainder(11).view(1, 20).masked_fill(torch.arange(20) == 3, -100)
DOCUMENTS = Mask.documents((0, 30, 70))
SPARSE = InfLLMV2(block_size=4, kernel_size=4, kernel_stride=2, window_size=8, topk=3, dense_len=-1)


def attention(*named: str, **options) -> Function:
    """Return a function of q, k, v, and a tensor that is passed as `named`."""

    def attend(ring, q, k, v, *more):
        size = 1 if ring is None else ring.size
        given = dict.fromkeys(named, *more)
        return burst_attn_func(
            q, k, v, layout=Layout.zigzag(TOKENS, size), process_group=ring, **given, **options
        )

    return attend


def lightning(ring, q, k, v):
    layout = Layout.zigzag(150, 1 if ring is None else ring.size)
    slopes = torch.tensor([0.0, 0.01, 0.8])
    return lightning_attn_func(q, k, v, slopes, layout=layout, process_group=ring)


def unshard(ring, x):
    return SequenceParallel(ring.rank, ring.size, process_group=ring).unshard(x, TOKENS)


def norm(weight: Tensor) -> SimpleNamespace:
    return SimpleNamespace(weight=weight, eps_of=lambda _x: 1e-5)


def linear(weight: Tensor, bias: Tensor | None = None) -> SimpleNamespace:
    return SimpleNamespace(weight=weight, bias=bias)


def norm_two_linears(_ring, x, weight, a, b):
    kept, left, right = norm_linears(x, norm(weight), [linear(a), linear(b)])
    return kept + left * right


def tiled(_ring, x, weight):
    return run_tiled(lambda x: functional.silu(x @ weight.T) @ weight, [weight], 4, x)


ROTATIONS = rope_tables(torch.arange(TOKENS), 8)
BY_DISTANCE = Scores.by_distance(DOCUMENTS, torch.arange(-69, 70).abs().int())
# by name: ranks, shapes of the inputs, and a function of a ring and the inputs
CASES: dict[str, tuple[int, list, Function]] = {
    "reference": (1, QKV, attention(flash="reference", causal=True)),
    "cpu": (1, QKV, attention(flash="cpu", causal=True)),
    "documents": (1, QKV, attention(flash="cpu", mask=DOCUMENTS)),
    "window": (1, QKV, attention(flash="cpu", mask=Mask.documents((0, 30, 70), window=9))),
    "padding": (1, QKV, attention(flash="cpu", mask=Mask(TOKENS, Mask.causal(50).slices))),
    "sinks": (1, [*QKV, (4,)], attention("sinks", mask=DOCUMENTS)),
    "softcap": (1, QKV, attention(softcap=2.0, mask=DOCUMENTS)),
    "bias": (1, [*QKV, (70, 4)], attention("bias", scores=BY_DISTANCE)),
    "sparse": (1, QKV, attention(causal=True, sparse=SPARSE)),
    "lightning": (1, STATES, lightning),
    "ring": (2, QKV, attention(flash="cpu", mask=DOCUMENTS, strategy="ring")),
    "lightning ranks": (2, STATES, lightning),
    "unshard": (2, QKV[:1], unshard),
    "loss": (
        1, [(1, 20, 8), (7, 8), (4, 8)],
        lambda _, x, *weights: linear_cross_entropy_sum(x, weights, LABELS)[0],
    ),
    "logprobs": (
        1, [(1, 20, 8), (11, 8)],
        lambda _, x, w: torch.stack(token_logprobs(x, w, LABELS, entropies=True)),
    ),
    "cross entropy": (1, [(1, 20, 11)], lambda _, x: cross_entropy_sum(x, LABELS)[0]),
    "norm": (1, [BLOCK, (8,)], lambda _, x, weight: torch_passes.normalize(x, weight, 1e-5)[0]),
    "rotary": (1, QKV[:1], lambda _, x: apply_rope(x, *ROTATIONS)),
    "norm, linears": (1, [BLOCK, (8,), WIDE, WIDE], norm_two_linears),
    "linear": (1, [BLOCK, BLOCK, WIDE, (8,)], lambda _, x, y, *w: add_linear(x, y, linear(*w), 2)),
    "gated linear": (
        1, [BLOCK, BLOCK, BLOCK, (8,), WIDE],
        lambda _, x, y, gate, n, w: add_gated_linear(x, y, norm(n), gate, linear(w), 0.7),
    ),
    "swiglu": (
        1, [BLOCK, BLOCK, BLOCK, WIDE],
        lambda _, x, gate, up, w: add_swiglu_linear(x, gate, up, linear(w), 0.7),
    ),
    "tiled": (1, [BLOCK, WIDE], tiled),
}  # fmt: skip


class Listing(TorchDispatchMode):
    """A context that lists the operations inside."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.add(func)
        return func(*args, **(kwargs or {}))


def gradients(case, run) -> list[Tensor]:
    """Return the result of a function, as `run` calls it on each rank, and its gradients."""
    size, shapes, function = case
    torch.manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]

    def work(ring):
        mine = leaves
        if ring is not None:
            layout = Layout.zigzag(shapes[0][1], size)
            mine = [layout.shard(x, ring.rank) for x in leaves]

        def block(*inputs):  # its last operation needs the function's result again
            return function(ring, *(x * 1.0 for x in inputs)).sin()

        return run(block, *mine)

    out = torch.cat([x.flatten() for x in (simulate(size, work) if size > 1 else [work(None)])])
    dout = torch.linspace(-1, 1, out.numel(), dtype=out.dtype) ** 3
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def keep(*kept: OpOverload) -> Function:
    """Return torch's checkpointing with a policy that keeps the results of some operations."""

    def choose(_context, operation, *_args, **_named):
        keeps = operation in kept
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("name", CASES)
def test_gradients_do_not_depend_on_what_a_policy_keeps(name):
    def list_operations(block, *inputs):
        with Listing() as listing:
            result = block(*inputs)
        operations.update(listing.found)
        return result

    operations: set[OpOverload] = set()
    gradients(CASES[name], list_operations)
    expected = gradients(CASES[name], lambda block, *inputs: block(*inputs))
    each = [(operation,) for operation in operations if operation._opname in NAMES]
    assert each
    for kept in (*each, tuple(operations)):
        found = gradients(CASES[name], keep(*kept))
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10, msg=f"with {kept} kept")


@pytest.mark.parametrize("operation", ["mul", "sum", "all"])
def test_a_chunk_that_is_computed_again_does_not_depend_on_a_policy(operation):
    """Its first run also compares its keys with the kept ones."""
    torch.manual_seed(0)
    x = torch.randn(1, TOKENS, 2, 8, dtype=torch.float64)

    def gradient(run):
        chunks = Chunks(Mask.causal(TOKENS), 35, 1)
        weight = torch.ones(8, dtype=torch.float64, requires_grad=True)

        def block(chunk, weight):
            mine = x[:, chunk.span] * weight
            return (chunk.attend(0, mine, mine, mine) * mine.sum()).sin()

        for chunk in chunks.forward():
            block(chunk, weight)
        for chunk in chunks.backward():
            out = run(block, chunk, weight)
            (out * x[:, chunk.span]).sum().backward()
        return weight.grad

    aten = torch.ops.aten
    kept = {"mul": [aten.mul.Tensor], "sum": [aten.sum.default]}
    everything = [*kept["mul"], *kept["sum"], aten.sub.Tensor, aten.abs.default, aten.amax.default]
    expected = gradient(lambda block, *inputs: block(*inputs))
    torch.testing.assert_close(gradient(keep(*kept.get(operation, everything))), expected)
