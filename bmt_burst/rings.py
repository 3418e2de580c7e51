"""The rings between the ranks of a call, and what they tell each other over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .transport import ALONE, MESSAGE_BYTES, Transport
from .transport.bmtrain import bmtrain_transport, initialized_bmtrain
from .transport.torch_dist import torch_transport

Group = Any  # a torch.distributed ProcessGroup, a bmtrain NCCLCommunicator or a Transport


@dataclass(frozen=True)
class Rings:
    """The rings of a rank: `inner` within a host, `outer` between hosts; without `double` the outer is of one rank."""

    inner: Transport
    outer: Transport
    double: bool = False

    @property
    def size(self) -> int:
        return self.inner.size * self.outer.size

    @property
    def rank(self) -> int:
        return self.outer.rank * self.inner.size + self.inner.rank

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks (a line each) in rank order, over both rings.

        Raises ValueError if these are no grid of ranks.
        """
        if not self.double:
            return self.inner.gather(message)
        shape = f"{self.inner.size} x {self.outer.size}".encode()
        shapes = {s.decode() for ring in (self.inner, self.outer) for s in ring.gather(shape)}
        if len(shapes) > 1:
            raise ValueError(f"double_group's rings differ in size between ranks: {sorted(shapes)}")
        here = b"\n".join(self.inner.gather(message))
        hosts = self.outer.gather(here, longest=self.inner.size * (MESSAGE_BYTES + 1))
        return [reply for host in hosts for reply in host.split(b"\n")]

    def gather_tensors(self, x: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Contiguous x of all ranks in rank order; `shapes` are those of all ranks."""
        start = self.outer.rank * self.inner.size
        here = self.inner.all_gather([x], [[shape] for shape in shapes[start : start + self.inner.size]])
        host_shapes = [shapes[i : i + self.inner.size] for i in range(0, self.size, self.inner.size)]
        hosts = self.outer.all_gather([tensor for [tensor] in here], host_shapes)
        return [tensor for host in hosts for tensor in host]


def make_rings(process_group: Group | None, double_group: Sequence[Group | None]) -> Rings:
    """The rings that `burst_attn_func`'s arguments name.

    Without a double group: one ring over `process_group`, by default all ranks of BMTrain or torch.distributed, or this
    process alone where neither is initialised. With double_group=(intra, inter): an inner ring over intra, the ranks of
    a host, and an outer one over inter, the ranks at one place of all hosts; process_group must then be None. A rank's
    number in the sequence is then (its rank in inter) * (size of intra) + (its rank in intra). A group is a
    torch.distributed ProcessGroup, after bmtrain.init_distributed also a bmtrain NCCLCommunicator, or a Transport.

    Raises TypeError for anything else, ValueError if this rank is in none of the groups or both kinds are given.
    """
    if not isinstance(double_group, Sequence) or len(double_group) != 2:
        raise TypeError(f"double_group must be a pair (intra, inter) of groups, got {double_group!r}")
    intra, inter = double_group
    if (intra is None) != (inter is None):
        raise ValueError(f"double_group needs both groups or neither, got {double_group!r}")
    if intra is None:
        return Rings(_transport(process_group), ALONE)
    if process_group is not None:
        raise ValueError("give either process_group or double_group: the double group alone names all ranks")
    return Rings(_transport(intra), _transport(inter), double=True)


def _transport(group: Group | None) -> Transport:
    if isinstance(group, Transport):
        return group
    bmtrain = initialized_bmtrain()
    if bmtrain and isinstance(group, bmtrain.nccl.NCCLCommunicator):
        return bmtrain_transport(group)
    if group is None and bmtrain:
        return bmtrain_transport(bmtrain.config["comm"])
    if group is None:
        return torch_transport(dist.group.WORLD) if dist.is_initialized() else ALONE
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in the process group it was given")
    if isinstance(group, dist.ProcessGroup):
        return torch_transport(group)
    raise TypeError(
        "a group must be a torch.distributed ProcessGroup, a bmtrain NCCLCommunicator or a Transport, got "
        f"{type(group).__name__}"
    )
