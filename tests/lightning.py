"""Lightning attention token by token, and calls of it over simulated ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_burst import Layout, Mask, lightning_attn_func, simulate
from tests.rings import ring_arguments

SLOPES = (0.0, 1 / 256, 0.84, 20.0)  # none, the slowest and the fastest of SALA, and faster


class Cut(Layout):
    """Spans of the sequence, each of them one rank's: `owners` by position."""

    name = "cut"

    def __init__(self, owners: Sequence[int]):
        super().__init__(len(owners), max(owners) + 1)
        self.owners = owners

    def ranges(self, rank):
        return [range(i, i + 1) for i, owner in enumerate(self.owners) if owner == rank]


def recurrence(q: Tensor, k: Tensor, v: Tensor, rates: Tensor, scale: float, borders) -> Tensor:
    """Return out (B, S, H, D) of whole sequences, token by token. `borders` are those of a row.

    rates  slopes (H,), or log_decay (B, S, H)
    """
    decays = torch.exp(rates if rates.dim() == 3 else -rates.to(q.dtype).expand(q.shape[:3]))
    rows = []
    for row, begins in zip(zip(q, k, v, decays, strict=True), borders, strict=True):
        state, out = torch.zeros(()), []
        for t, (queries, keys, values, decay) in enumerate(zip(*row, strict=True)):
            own = keys.unsqueeze(2) * values.unsqueeze(1)
            state = own if t in begins else decay.view(-1, 1, 1) * state + own
            out.append(scale * (queries.unsqueeze(1) @ state).squeeze(1))
        rows.append(torch.stack(out))
    return torch.stack(rows)


def random_tensors(batch: int, tokens: int, size: int = 4, heads: int = len(SLOPES)):
    """Return random q, k, v and an output gradient, and as many slopes as heads."""
    tensors = torch.randn(4, batch, tokens, heads, size, dtype=torch.float64).unbind()
    return tensors, torch.tensor(SLOPES[:heads])


def random_log_decay(
    batch: int, tokens: int, heads: int = len(SLOPES), chance: torch.Generator | None = None
) -> Tensor:
    """Return random decays of tokens: from none to e^-40, and one of 16 empties a state."""
    strength = torch.tensor([0.0, 0.01, 1.0, 20.0], dtype=torch.float64)
    chosen = strength[torch.randint(4, (batch, tokens, heads), generator=chance)]
    empties = torch.rand(batch, tokens, heads, generator=chance) < 1 / 16
    found = torch.rand(batch, tokens, heads, dtype=torch.float64, generator=chance)
    found = -chosen * 2 * found
    return found.masked_fill(empties, -torch.inf)


def expected_results(tensors, rates, scale, masks: Sequence[Mask]) -> list[Tensor]:
    """Return out, dq, dk, dv and the gradient of a log_decay, by the recurrence, of rows' masks."""
    *qkv, dout = tensors
    leaves = [x.clone().requires_grad_() for x in (*qkv, rates)]
    borders = [{s.q[0] for s in mask.slices} for mask in masks]
    out = recurrence(*leaves, scale, borders)
    if rates.dim() == 1:
        leaves.pop()
    grads = torch.autograd.grad(out, leaves, dout, materialize_grads=True)
    return [out.detach(), *grads]


def shard_results(tensors, rates, **options) -> list[Tensor]:
    """Return a rank's out, dq, dk, dv and the gradient of a log_decay. Its inputs must stay."""
    kept = [x.clone() for x in (*tensors, rates)]
    *qkv, dout = (x.detach() for x in tensors)
    leaves = [x.requires_grad_() for x in qkv]
    if rates.dim() == 3:
        leaves.append(rates.detach().requires_grad_())
        out = lightning_attn_func(*qkv, log_decay=leaves[3], **options)
    else:
        out = lightning_attn_func(*qkv, rates, **options)
    grads = torch.autograd.grad(out, leaves, dout)
    for x, before in zip((*tensors, rates), kept, strict=True):
        assert x.allclose(before, rtol=0, atol=0, equal_nan=True)
    return [out.detach(), *grads]


def over_ranks(layouts: Sequence[Layout], tensors, rates, inner=None, **options):
    """Return whole results of simulated ranks and (peer, bytes) sent by ring. Rows have layouts."""
    size = layouts[0].size

    def work(ring):
        groups = ring_arguments(ring, inner or size)
        shards = [shard_rows(x, layouts, ring.rank) for x in tensors]
        mine = shard_rows(rates, layouts, ring.rank) if rates.dim() == 3 else rates
        found = shard_results(shards, mine, layout=[*layouts], **options, **groups)
        rings = groups.get("double_group", [ring])
        return found, [end.traffic for end in rings]

    results = simulate(size, work)
    whole = [
        torch.cat(
            [
                layout.unshard([found[i][row : row + 1] for found, _ in results])
                for row, layout in enumerate(layouts)
            ]
        )
        for i in range(len(results[0][0]))
    ]
    return whole, [sent for _, sent in results]


def shard_rows(x: Tensor, layouts: Sequence[Layout], rank: int) -> Tensor:
    """Return a rank's part of x (B, S, ...), whose rows have these layouts."""
    rows = [layout.shard(row, rank) for layout, row in zip(layouts, x.split(1), strict=True)]
    return torch.cat(rows)


def worst_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest error, as a share of the largest entry of its tensor."""
    sizes = [float(x.detach().abs().max()) for x in expected]
    assert all(sizes), "nothing to compare with"
    errors = [float((x - y).detach().abs().max()) for x, y in zip(got, expected, strict=True)]
    return max(error / size for error, size in zip(errors, sizes, strict=True))


def worst_rank_error(
    groups: dict,
    rank: int,
    size: int,
    layout: Layout | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    tokens_choose: bool = False,
) -> float:
    """Return the error of this rank of `groups`, in two calls: the second finds a plan."""
    mask, layout = Mask.documents((0, 20, 21, 60)), layout or Layout.zigzag(60, size)
    torch.manual_seed(0)
    tensors, slopes = random_tensors(1, 60, 16)  # the Triton kernel needs heads of 16
    log_decay = random_log_decay(1, 60).to(torch.promote_types(dtype, torch.float32))
    rounded = [x.to(dtype) for x in tensors]
    rates = log_decay.double() if tokens_choose else slopes
    exact = expected_results([x.double() for x in rounded], rates, 0.3, [mask])
    parts = [layout.shard(x, rank) for x in exact]
    shards = [layout.shard(x, rank).to(device) for x in rounded]
    options = {"scale": 0.3, "mask": mask, "layout": layout, **groups}
    own = layout.shard(log_decay, rank) if tokens_choose else slopes
    calls = [shard_results(shards, own.to(device), **options) for _ in range(2)]
    return max(worst_error([x.cpu().double() for x in got], parts) for got in calls)
