"""The groups of sequence parallelism in the world of torch.distributed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....ranks.agreement import gather_terms, read_terms
from ....ranks.groups import make_group
from ....ranks.sequence_parallel import SequenceParallel
from ....transport.torch_dist import torch_transport, world_group


@dataclass(frozen=True)
class Peers:
    """The ranks with this rank's place in all groups: one of each group."""

    index: int  # this rank's group, in the order of their first ranks
    count: int  # the number of groups
    group: Any = None  # torch's group of these ranks, None if there is one

    def gather(self, x: Tensor) -> Tensor:
        """Return the x of all groups, joined along the first dimension, numbers as (count,)."""
        x = x.unsqueeze(0) if x.dim() == 0 else x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.count)]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts)

    def gather_objects(self, x: Any) -> Any:
        """Return the objects in the lists x of all groups."""
        if self.count == 1:
            return x
        parts: list[Any] = [None] * self.count
        dist.all_gather_object(parts, x, group=self.group)
        return [y for part in parts for y in part]

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        """Return the sum, mean or maximum of all groups' x, as accelerate's reduce does."""
        x = x.clone()
        if self.count == 1:
            return x
        operation = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
        dist.all_reduce(x, operation, group=self.group)
        return x.div_(self.count) if reduction == "mean" else x


def find_peers(sp: SequenceParallel) -> Peers:
    """Return the peers of this rank. Every rank of the world must call it."""
    mine = {"rank": dist.get_rank()}
    lines = gather_terms(sp.rings, "the start of a sequence parallel object", lambda: mine)
    members = [theirs["rank"] for theirs in read_terms(lines)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, members)
    groups = sorted({tuple(ranks) for ranks in everyone})
    index = groups.index(tuple(members))
    if len(groups) == 1:
        return Peers(index, 1)
    by_place: list[Any] = [[ranks[place] for ranks in groups] for place in range(sp.size)]
    return Peers(index, len(groups), make_group(torch_transport(world_group()), by_place))


def gather_in_group(
    sp: SequenceParallel, doing: str, find: Callable[[], Any], device: torch.device
) -> list[Any]:
    """Return what `find` returns on each rank that shares sequences with this one. They must all
    call it. If it fails on one of them, all raise.

    doing   names it in errors
    device  one that these ranks exchange tensors on
    """
    mine = b""

    def find_size() -> dict[str, int]:
        nonlocal mine
        mine = pickle.dumps(find())
        return {"bytes": len(mine)}

    sizes = [theirs["bytes"] for theirs in read_terms(gather_terms(sp.rings, doing, find_size))]
    parts = torch.zeros(sum(sizes), dtype=torch.uint8).split(sizes)
    parts[sp.rank].copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    whole = sp.sum(torch.cat(parts).to(device)).to(torch.uint8).cpu()
    return [pickle.loads(part.numpy().tobytes()) for part in whole.split(sizes)]
