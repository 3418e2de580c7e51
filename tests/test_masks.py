"""Any mask, in any layout, equals dense attention: out, lse, dq, dk, dv in fp64 to 1e-10, through the simulator."""

import itertools
import random

import pytest
import torch

from bmt_burst import Layout, Mask, Slice, burst_attn_func, simulate, tiling
from tests.helpers import random_qkv, ring_arguments

RINGS = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7), (8, 8), (4, 2), (6, 3), (6, 2), (8, 4), (4, 1)]
HEADS = [(2, 2), (4, 2), (3, 1)]
SCALE = 0.31
CASES = 500
PARTS = 20  # tests that share them


def random_mask(chance: random.Random, tokens: int) -> Mask:
    """Of any kind: causal, full, windows, documents, both, arbitrary slices."""
    cuts = sorted({0, tokens, *(chance.randint(1, tokens) for _ in range(chance.randint(0, 6)))})
    window = chance.randint(1, tokens)
    makers = (
        lambda: Mask.causal(tokens),
        lambda: Mask.full(tokens),
        lambda: Mask.window(tokens, window),
        lambda: Mask.documents(cuts, causal=chance.random() < 0.7),
        lambda: Mask.documents(cuts, causal=chance.random() < 0.7, window=window),
        lambda: Mask(tokens, tuple(random_slices(chance, tokens))),
    )
    return chance.choice(makers)()


def random_slices(chance: random.Random, tokens: int):
    """Cells of a grid, each with a band of its own; some of two bands that touch."""
    grid = [sorted({0, tokens, *(chance.randint(0, tokens) for _ in range(3))}) for _ in range(2)]
    for q, kv in itertools.product(*map(itertools.pairwise, grid)):
        low, high = (chance.choice((None, chance.randint(-tokens, tokens))) for _ in range(2))
        if chance.random() < 0.6:
            yield Slice(q, kv, low, high)
            if high is not None and (low is None or low <= high) and chance.random() < 0.3:
                yield Slice(q, kv, high, high + 3)


def random_layout(chance: random.Random, mask: Mask, size: int) -> Layout:
    named = [layout(mask.seq_len, size) for layout in (Layout.zigzag, Layout.striped, Layout.contiguous)]
    return chance.choice([*named, Layout.balanced(mask, size)])


def dense_results(mask: Mask, tensors, scale=SCALE):
    """Whole out, lse, dq, dk, dv in fp64; 0 and -inf of queries that see nothing."""
    *inputs, dout = tensors
    q, k, v = inputs = [x.double().clone().requires_grad_() for x in inputs]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) * scale).masked_fill(~mask.dense(), -torch.inf)
    blind = ~mask.dense().any(1)
    probs = scores.masked_fill(blind.unsqueeze(1), 0.0).softmax(-1).masked_fill(blind.unsqueeze(1), 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", probs, v)
    return [out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, inputs, dout.double())]


def ring_results(mask, layout, tensors, inner, **options):
    """The same of a simulated ring."""

    def work(ring):
        q, k, v, dout = (layout.shard(x, ring.rank) for x in tensors)
        for x in (q, k, v):
            x.requires_grad_()
        arguments = {"mask": mask, "layout": layout, **options, **ring_arguments(ring, inner)}
        out, lse = burst_attn_func(q, k, v, SCALE, return_lse=True, **arguments)
        return out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout)

    results = simulate(layout.size, work)
    return [layout.unshard([r[i] for r in results], 2 if i == 1 else 1) for i in range(5)]


@pytest.mark.parametrize("part", range(PARTS))
def test_any_mask_equals_dense(part, monkeypatch):
    for seed in range(part, CASES, PARTS):
        chance = random.Random(seed)
        monkeypatch.setattr(tiling, "_GAP", chance.choice((0, 3, 256)))
        size, inner = RINGS[seed % len(RINGS)]
        mask = random_mask(chance, chance.randint(size, 70))
        layout = random_layout(chance, mask, size)
        tensors = random_qkv(chance.choice((1, 1, 2)), mask.seq_len, *chance.choice(HEADS), 8, seed=seed)
        options = {
            "backward": chance.choice(("q", "kv")),
            "flash": chance.choice(("cpu", "reference")),
            "optimize_bwd_comm": chance.random() < 0.7,
            "group_bytes": chance.choice((0, 5_000, 20_000, 1 << 30)),
        }
        got, expected = ring_results(mask, layout, tensors, inner, **options), dense_results(mask, tensors)
        for name, mine, exact in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
            if name == "lse":
                assert mine.isinf().equal(exact.isinf()), (seed, mask, layout, options)
                mine, exact = (x.masked_fill(exact.isinf(), 0.0) for x in (mine, exact))
            error = (mine - exact).norm() / exact.norm().clamp_min(1e-3)
            assert error < 1e-10, (seed, name, mask, layout, options)
