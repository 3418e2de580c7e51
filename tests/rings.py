"""Calls of attention over simulated rings."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_burst import Layout, Mask, burst_attn_func, simulate
from bmt_burst.bias import kernels as bias_kernels
from bmt_burst.bias.scoring import TableScoring
from bmt_burst.kernels import load, names
from bmt_burst.spec import Spec
from bmt_burst.strategies import Problem, Sizes
from bmt_burst.transport.simulator import SimulatedRing
from bmt_burst.transport.sockets import SocketMessenger


def cpu_kernels(spec: Spec) -> list[str]:
    """Return the names of the kernels that attend to fp64 tensors on CPUs with such scores."""
    q = torch.empty(1, 4, 2, 8, dtype=torch.float64)
    return [name for name in names() if load(name).refuses(spec, q, q) is None]


CPU_KERNELS = cpu_kernels(Spec(0.3))


def ring_results(
    whole: Layout,
    tensors: Sequence[Tensor],
    scale: float,
    inner: int | None = None,
    strided: bool = False,
    dlse: Tensor | None = None,
    **options,
) -> list[Tensor]:
    """Return whole out, lse, dq, dk, dv of a simulated ring, and the gradients of a bias and sinks.

    The ring is double with `inner` ranks a host. With dlse (B, H, S), gradients are those of both
    results. With `strided`, ranks get transposed tensors.
    """
    learned = {
        name: options.pop(name) for name in ("bias", "sinks") if options.get(name) is not None
    }

    def work(ring):
        q, k, v, dout = (whole.shard(x, ring.rank) for x in tensors)
        if strided:
            q, k, v, dout = (
                x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout)
            )
        for x in (q, k, v):
            x.requires_grad_()
        mine = {name: x.detach().requires_grad_() for name, x in learned.items()}
        arguments = {"layout": whole, **mine, **options, **ring_arguments(ring, inner or ring.size)}
        out, lse = burst_attn_func(q, k, v, scale, return_lse=True, **arguments)
        results, given = [out], [dout]
        if dlse is not None:
            results.append(lse)
            given.append(whole.shard(dlse, ring.rank, dim=2))
        grads = torch.autograd.grad(results, (q, k, v, *mine.values()), given)
        return out.detach(), lse.detach(), *grads

    results = simulate(whole.size, work)
    joined = [whole.unshard([r[i] for r in results], 2 if i == 1 else 1) for i in range(5)]
    return [*joined, *(sum(shares) for shares in zip(*(r[5:] for r in results), strict=True))]


def problem(mask: Mask, layout: Layout, inner: int | None = None, **changes) -> Problem:
    """Return a call of attention over the layout's ranks, `inner` of them a host.

    `changes` are fields of Problem or of Sizes, or `scores` for a scoring.
    """
    sizes = {
        "batch": 1,
        "heads": 2,
        "kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float32,
        "partial": torch.float32,
    }
    sizes = Sizes(**{name: changes.pop(name, default) for name, default in sizes.items()})
    if scores := changes.pop("scores", None):
        changes["scoring"] = TableScoring(scores, bias_kernels.load("reference"))
    inner = inner or layout.size
    ranks = {"inner": inner, "outer": layout.size // inner}
    return Problem(
        mask=mask,
        layout=layout,
        spec=Spec(0.3),
        kernel=load("cpu"),
        sizes=sizes,
        **ranks,
        **changes,
    )


def ring_arguments(ring: SimulatedRing, inner: int) -> dict:
    """Return burst_attn_func's arguments of groups: a single ring, or hosts of `inner` ranks."""
    if inner == ring.size:
        return {"process_group": ring}
    host, place = divmod(ring.rank, inner)
    intra = ring.subring(range(host * inner, (host + 1) * inner))
    return {"double_group": (intra, ring.subring(range(place, ring.size, inner)))}


def wait_for_lost_rank(messenger: SocketMessenger) -> str:
    """Wait until a rank is lost, and return its description.

    The end of a connection may arrive later than the messages before it.
    """
    deadline = time.monotonic() + 30
    while not (lost := messenger.find_lost_rank()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return lost
