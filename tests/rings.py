"""Calls of attention over simulated rings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_burst import Layout, Mask, SequenceParallel, burst_attn_func, simulate
from bmt_burst.bias import kernels as bias_kernels
from bmt_burst.bias.scoring import TableScoring
from bmt_burst.kernels import load, names
from bmt_burst.spec import Spec
from bmt_burst.strategies import Problem, Sizes
from bmt_burst.transport import Transport
from bmt_burst.transport.simulator import SimulatedRing
from bmt_burst.transport.sockets import SocketMessenger
from tests.reference import attention_errors


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
    kv_layout: Layout | None = None,
    **options,
) -> list[Tensor]:
    """Return whole out, lse, dq, dk, dv of a simulated ring, and the gradients of a bias and sinks.

    The ring is double with `inner` ranks a host. With dlse (B, H, S), gradients are those of both
    results. With `strided`, ranks get transposed tensors.
    """
    arguments = {"layout": whole, "kv_layout": kv_layout, **options}
    keys = kv_layout or whole
    layouts = whole, keys, keys, whole  # of q, k, v and the output gradient

    def work(ring):
        shards = [x.shard(y, ring.rank) for x, y in zip(layouts, tensors, strict=True)]
        if strided:
            shards = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in shards]
        own = None if dlse is None else whole.shard(dlse, ring.rank, dim=2)
        groups = ring_arguments(ring, inner or ring.size)
        return shard_results(shards, scale, own, **arguments, **groups)

    results = simulate(whole.size, work)
    joined = [
        layout.unshard([r[i] for r in results], 2 if i == 1 else 1)
        for i, layout in enumerate((whole, whole, whole, keys, keys))
    ]
    return [*joined, *(sum(shares) for shares in zip(*(r[5:] for r in results), strict=True))]


def ring_output(whole: Layout, tensors: Sequence[Tensor], scale=None, **options) -> Tensor:
    """Return the whole output of a simulated single ring for q, k and v."""

    def work(ring):
        shards = [whole.shard(x, ring.rank) for x in tensors]
        return burst_attn_func(*shards, scale, process_group=ring, **{"layout": whole, **options})

    return whole.unshard(simulate(whole.size, work))


def call_messages(
    layout: Layout,
    tensors: Sequence[Tensor],
    inner: int,
    kv_layout: Layout | None = None,
    **options,
) -> list[list[list[list[tuple[int, int]]]]]:
    """Return by rank and by half of a step, by ring the peer and bytes of each message of tensors.

    The halves are forward and backward. A double ring has two rings.
    """
    arguments = {"layout": layout, "kv_layout": kv_layout, **options}
    keys = kv_layout or layout
    layouts = layout, keys, keys, layout

    def work(ring):
        groups = ring_arguments(ring, inner)
        single = [groups["process_group"]] if "process_group" in groups else []
        ends = single or list(groups["double_group"])
        *shards, dout = (x.shard(y, ring.rank) for x, y in zip(layouts, tensors, strict=True))
        inputs = [x.requires_grad_() for x in shards]
        out = burst_attn_func(*inputs, **arguments, **groups)
        counts = [len(end.traffic) for end in ends]
        torch.autograd.grad(out, inputs, dout)
        counted = list(zip(ends, counts, strict=True))
        return [[end.traffic[:n] for end, n in counted], [end.traffic[n:] for end, n in counted]]

    return simulate(layout.size, work)


def shard_results(
    shards: Sequence[Tensor], scale: float, dlse: Tensor | None = None, **options
) -> list[Tensor]:
    """Return a rank's out, lse, dq, dk, dv, and its share of the gradients of a bias and sinks.

    `shards` are its q, k, v and output gradient. A call must leave its inputs as they are.
    """
    kept = [x.clone() for x in shards]
    learned = {
        name: options.pop(name).detach()
        for name in ("bias", "sinks")
        if options.get(name) is not None
    }
    *qkv, dout = (x.detach() for x in shards)
    inputs = [x.requires_grad_() for x in (*qkv, *learned.values())]
    out, lse = burst_attn_func(*qkv, scale, return_lse=True, **learned, **options)
    results, given = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    grads = torch.autograd.grad(results, inputs, given)
    for x, before in zip(shards, kept, strict=True):
        assert x.allclose(before, rtol=0, atol=0, equal_nan=True)
    return [out.detach(), lse.detach(), *grads]


def rank_results(
    rank: int,
    whole: Layout,
    tensors: Sequence[Tensor],
    expected: Sequence[Tensor],
    scale: float,
    kv_layout: Layout | None = None,
    **options,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return this rank's results of a call, and its part of the whole `expected` ones.

    `options` are those of burst_attn_func. Gradients of a bias and sinks stay whole.
    """
    keys = kv_layout or whole
    sides = zip((whole, keys, keys, whole), tensors, strict=True)
    shards = [layout.shard(x, rank) for layout, x in sides]
    got = shard_results(shards, scale, **{"layout": whole, "kv_layout": kv_layout, **options})
    parts = [
        layout.shard(expected[i], rank, 2 if i == 1 else 1)
        for i, layout in enumerate((whole, whole, whole, keys, keys))
    ]
    return got, [*parts, *expected[5:]]


def worst_rank_error(
    rank: int,
    whole: Layout,
    tensors: Sequence[Tensor],
    expected: Sequence[Tensor],
    scale: float,
    **options,
) -> float:
    """Return the largest of attention_errors of `rank_results`."""
    got, own = rank_results(rank, whole, tensors, expected, scale, **options)
    return max(attention_errors(got, own, tensors[3], scale).values())


def problem(mask: Mask, layout: Layout, inner: int | None = None, **changes) -> Problem:
    """Return a call of attention over the layout's ranks, `inner` of them a host.

    `changes` are fields of Problem or of Sizes, or `scores` for a scoring.
    """
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "head_size": 8}
    sizes |= {"dtype": torch.float32, "partial": torch.float32}
    sizes = Sizes(**{name: changes.pop(name, default) for name, default in sizes.items()})
    if scores := changes.pop("scores", None):
        changes["scoring"] = TableScoring(scores, bias_kernels.load("reference"))
    inner = inner or layout.size
    ranks = {"inner": inner, "outer": layout.size // inner}
    return Problem(mask, layout, Spec(0.3), load("cpu"), sizes, **ranks, **changes)


def on_ranks(size: int, work: Callable[[SequenceParallel], Any]) -> list:
    """Return the results of work(sp) on each of `size` ranks."""
    if size == 1:
        return [work(SequenceParallel())]
    return simulate(size, lambda ring: work(SequenceParallel(ring.rank, size, process_group=ring)))


def ring_arguments(ring: SimulatedRing, inner: int) -> dict:
    """Return burst_attn_func's arguments of groups: a single ring, or hosts of `inner` ranks."""
    if inner == ring.size:
        return {"process_group": ring}
    host, place = divmod(ring.rank, inner)
    intra = ring.subring(range(host * inner, (host + 1) * inner))
    return {"double_group": (intra, ring.subring(range(place, ring.size, inner)))}


class Mute(Transport):
    """A transport of two ranks that sends nothing but its messenger's messages."""

    rank, size = 0, 2

    def __init__(self, messenger: Any):
        self.messenger = messenger

    def exchange(self, sends, recvs):
        raise AssertionError("nothing is sent here")


def wait_for_lost_rank(messenger: SocketMessenger) -> str:
    """Wait until a rank is lost, and return its description.

    The end of a connection may arrive later than the messages before it.
    """
    deadline = time.monotonic() + 30
    while not (lost := messenger.find_lost_rank()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return lost
