"""Sparse attention on GPUs: one process and several ranks equal the definition in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from bmt_burst import InfLLMV2, Mask, burst_attn_func
from bmt_burst.sparse import choose, keep_choices
from tests.cases import made_layout, random_qkv
from tests.launcher import needs_ranks, run_ranks
from tests.reference import relative_error
from tests.sparse import attend_to_blocks
from tests.test_gpu import rings

pytestmark = [pytest.mark.gpu, needs_ranks(1)]

SPARSE = InfLLMV2(window_size=128, topk=4, dense_len=-1)
CU_SEQLENS = (0, 1, 130, 194, 1031)  # the last document has 14 blocks, of which a query takes 6
# Operands and results are rounded to 8 (bf16), 11 (fp16) or 24 bits, and parts once more.
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 5e-5}


def make_tensors(heads, kv_heads, head_size, dtype, device):
    """Return q, k, v, dout. Large queries make scores of blocks differ."""
    q, *others = random_qkv(1, CU_SEQLENS[-1], heads, kv_heads, head_size, dtype)
    return [x.to(device) for x in (3 * q, *others)]


def define(tensors, chosen):
    """Return out, lse, dq, dk and dv of whole sequences in float64, given the choice."""
    blocks = [[[b for b in of_head if b >= 0] for of_head in row] for row in chosen[0].tolist()]
    *leaves, dout = (x[0].double().cpu() for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    out, lse = attend_to_blocks(*leaves, CU_SEQLENS, blocks, SPARSE)
    grads = torch.autograd.grad(out, leaves, dout)
    return [x.detach().unsqueeze(0) for x in (out, lse, *grads)]


def attend(shards, dout, **options):
    """Return this rank's out, lse, dq, dk and dv, and the choice that it kept."""
    leaves = [x.detach().requires_grad_() for x in shards]
    first_run, _ = keep_choices()
    with first_run:
        out, lse = burst_attn_func(*leaves, sparse=SPARSE, return_lse=True, **options)
    results = out.detach(), lse, *torch.autograd.grad(out, leaves, dout)
    return results, first_run.kept[0].int()


def later(chosen, positions):
    """Return the far blocks of queries at some positions that choose by score."""
    [last] = [start for start, stop in itertools.pairwise(CU_SEQLENS) if stop - start > 500]
    here = positions[positions >= last + SPARSE.exact_tokens].to(chosen.device)
    return chosen[:, here, :, : SPARSE.topk]


def check_call(heads, kv_heads, head_size, dtype, device="cuda"):
    tensors = make_tensors(heads, kv_heads, head_size, dtype, device)
    mask = Mask.documents(CU_SEQLENS)
    chosen = choose(*tensors[:2], mask, SPARSE)
    exact = choose(*(x.double().cpu() for x in tensors[:2]), mask, SPARSE)
    # Few scores of random numbers are equal in the digits that the GPU computes.
    assert (chosen.cpu() != exact).any(-1).double().mean() < 0.01
    got, kept = attend(tensors[:3], tensors[3], mask=mask)
    assert kept.equal(later(chosen, torch.arange(CU_SEQLENS[-1])))
    for mine, expected in zip(got, define(tensors, chosen), strict=True):
        assert relative_error(mine.cpu(), expected) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "dtype"),
    [
        (32, 2, 128, torch.bfloat16),
        (4, 4, 64, torch.bfloat16),
        (6, 2, 80, torch.float16),
        (16, 1, 256, torch.bfloat16),
        (8, 2, 96, torch.float32),
        (4, 2, 256, torch.float32),
    ],
)
def test_calls_equal_the_definition(heads, kv_heads, head_size, dtype):
    check_call(heads, kv_heads, head_size, dtype)


def find_errors(rank: int, size: int, groups, device: str) -> dict[str, float]:
    """Return the worst error of each layout, strategy and group. The choice is that of one rank."""
    mask, found = Mask.documents(CU_SEQLENS), {}
    tensors = make_tensors(8, 2, 64, torch.bfloat16, device)
    chosen = choose(*tensors[:2], mask, SPARSE)
    exact = define(tensors, chosen)
    strategies = {"strategy": "ring", "group_bytes": 1 << 16}, {"strategy": "all-gather"}
    cases = list(itertools.product(("zigzag", "striped", "contiguous", "balanced"), strategies))
    if size > 2:  # of many ranks on a GPU each call takes long
        cases = [cases[i] for i in (0, 3, 4, 7)]
    for (name, options), (ring, group) in itertools.product(cases, groups.items()):
        layout = made_layout(name, mask, size)
        *shards, dout = (layout.shard(x, rank) for x in tensors)
        got, kept = attend(shards, dout, mask=mask, layout=layout, **options, **group)
        assert kept.equal(later(chosen, layout.positions(rank)))
        expected = [layout.shard(x, rank, 2 if i == 1 else 1) for i, x in enumerate(exact)]
        found[f"{name} {options['strategy']} {ring}"] = max(
            relative_error(a.cpu(), b) for a, b in zip(got, expected, strict=True)
        )
    return found


def errors_of_rank(rank: int, size: int) -> dict[str, float]:
    return find_errors(rank, size, rings(size), "cuda")


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_equal_the_definition(size):
    for errors in run_ranks(size, errors_of_rank, size, backend="nccl"):
        name, worst = max(errors.items(), key=lambda entry: entry[1])
        assert worst < BOUNDS[torch.bfloat16], (name, worst)
