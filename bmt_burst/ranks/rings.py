"""The rings between the ranks of a call, and how they tell each other things over them."""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RanksDisagree
from ..transport import ALONE, Transport
from ..transport.bmtrain import bmtrain_transport, initialized_bmtrain
from ..transport.torch_dist import torch_transport

_PROCESS = uuid.uuid4().hex  # ranks may be forks, or threads of a test

# A torch.distributed ProcessGroup or DeviceMesh of one dimension, a bmtrain NCCLCommunicator or a
# Transport.
Group = Any


@dataclass
class History:
    """What the ranks of some rings did together so far.

    calls    how many; every rank counts alike, since all agree on each
    known    calls that this rank has checked, by their arguments
    plans    of calls, by what the ranks said of them
    is_grid  whether a double ring is known to be a grid of ranks
    """

    calls: int = 0
    known: dict[tuple, Any] = field(default_factory=dict)
    plans: dict[tuple[bytes, ...], Any] = field(default_factory=dict)
    is_grid: bool = False


@dataclass(frozen=True)
class Rings:
    """The rings of a rank: `inner` within a host, `outer` between hosts; without `double` the outer
    is of one rank.
    """

    inner: Transport
    outer: Transport
    double: bool = False

    @property
    def size(self) -> int:
        return self.inner.size * self.outer.size

    @property
    def rank(self) -> int:
        return self.outer.rank * self.inner.size + self.inner.rank

    @property
    def history(self) -> History:
        return self.inner.histories.setdefault(self.outer, History())

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks (a line of text each) in rank order, over both rings.

        Raises ValueError on every rank if double rings are no grid of ranks.
        """
        if not self.double:
            return self.inner.gather(message)
        try:
            if not self.history.is_grid:
                self._check_grid()
                self.history.is_grid = True
            return self._gather_over_both(message)
        except BaseException:
            self._leave_if_broken(b"waiting for the ranks of its other group")
            raise

    def _gather_over_both(self, message: bytes) -> list[bytes]:
        here = zlib.compress(b"\n".join(self.inner.gather(message)), 1)
        hosts = enumerate(self.outer.gather(here))
        return [reply for rank, host in hosts for reply in _unpack_host(rank, host).split(b"\n")]

    def _check_grid(self) -> None:
        """Ranks of a host must have one place among hosts, those at one place of all hosts one
        place in them.

        A rank that finds a fault says so over both rings, so that all that it is connected with
        raise too.
        """
        inner, outer, fault = self.inner, self.outer, ""
        for ring, role in ((inner, "intra"), (outer, "inter")):
            for rank, said in enumerate(
                ring.gather(_describe_place(role, inner.rank, inner.size, outer.rank, outer.size))
            ):
                place, host = (rank, outer.rank) if role == "intra" else (inner.rank, rank)
                expected = _describe_place(role, place, inner.size, host, outer.size)
                if said != expected and not fault:
                    fault = f"rank {rank} of an {role} group is '{said.decode()[:200]}', not '{expected.decode()}'"
        # over both equally often, in case a rank takes one for the other
        for ring in (inner, outer, inner, outer):
            fault = next((told.decode() for told in ring.gather(fault.encode()) if told), "")
        if fault:
            raise RanksDisagree(
                f"double_group's groups are no grid of hosts and places in them: {fault}"
            )
        # Groups may also connect two grids so that each rank sees one; then a host's ranks see
        # unlike ones.
        everyone = self._gather_over_both(
            f"{_PROCESS} {os.getpid()} {threading.get_ident()}".encode()
        )
        digest = hashlib.sha256(b"\n".join(everyone)).hexdigest().encode()
        if any(theirs != digest for theirs in inner.gather(digest)):
            raise RanksDisagree(
                "double_group's groups are no grid: from the ranks of one host they lead to unlike ranks"
            )

    def give_up(self, words: bytes) -> RuntimeError | None:
        """As Transport.give_up, over both rings; a rank to which one of them is lost leaves the
        other one too.
        """
        if not self.double:
            return self.inner.give_up(words)
        reason = self.inner.find_lost_rank() or self.outer.find_lost_rank()
        for ring in (self.inner, self.outer):
            if reason:
                ring.leave(words)
            elif not ring.broken:
                reason = ring.give_up(words)
                self._leave_if_broken(words)
        return reason

    def _leave_if_broken(self, words: bytes) -> None:
        """Leaves the one ring if the other is of no use any more."""
        for ring, other in ((self.inner, self.outer), (self.outer, self.inner)):
            if other.broken and not ring.broken:
                ring.leave(words)

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:
        """Prepares for deliveries within the host, as Transport.reserve, and for exchanges over
        both rings.

        All ranks call it alike, whether they will have anything to send or not.
        """
        self.inner.reserve(lane_bytes, device)
        for ring in (self.inner, self.outer):
            ring.connect(device)

    def note_enqueued(self, doing: str) -> None:
        """As Transport.note_enqueued, over the ring that may leave streams waiting."""
        self.inner.note_enqueued(doing)

    def gather_tensors(self, x: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Contiguous x of all ranks in rank order; `shapes` are those of all ranks."""
        start = self.outer.rank * self.inner.size
        here = self.inner.all_gather(
            [x], [[shape] for shape in shapes[start : start + self.inner.size]]
        )
        host_shapes = [
            shapes[i : i + self.inner.size] for i in range(0, self.size, self.inner.size)
        ]
        hosts = self.outer.all_gather([tensor for [tensor] in here], host_shapes)
        return [tensor for host in hosts for tensor in host]


def _unpack_host(rank: int, said: bytes) -> bytes:
    """What the ranks of a host say, packed by the one that is `rank` in the inter group."""
    try:
        return zlib.decompress(said)
    except zlib.error:
        words = said.decode(errors="replace")[:200]
        raise RanksDisagree(
            f"rank {rank} of the inter group takes it for its process_group: it says '{words}'"
        ) from None


def _describe_place(role: str, place: int, places: int, host: int, hosts: int) -> bytes:
    return f"{role} group, place {place} of {places} on host {host} of {hosts}".encode()


def make_rings(process_group: Group | None, double_group: Sequence[Group | None]) -> Rings:
    """The rings that `burst_attn_func`'s arguments name.

    Without a double group: one ring over `process_group`, by default all ranks of BMTrain or
    torch.distributed, or this process alone where neither is initialised. With double_group=(intra,
    inter): an inner ring over intra, the ranks of a host, and an outer one over inter, the ranks at
    one place of all hosts; process_group must then be None. A rank's number in the sequence is then
    (its rank in inter) * (size of intra) + (its rank in intra). A group is a torch.distributed
    ProcessGroup or DeviceMesh of one dimension, after bmtrain.init_distributed also a bmtrain
    NCCLCommunicator, or a Transport.

    Raises TypeError for anything else, ValueError for a mesh of more dimensions, if this rank is in
    none of the groups or if both kinds are given.
    """
    if not isinstance(double_group, Sequence) or len(double_group) != 2:
        raise TypeError(
            f"double_group must be a pair (intra, inter) of groups, got {double_group!r}"
        )
    intra, inter = double_group
    if (intra is None) != (inter is None):
        raise ValueError(f"double_group needs both groups or neither, got {double_group!r}")
    if intra is None:
        return Rings(_find_transport(process_group), ALONE)
    if process_group is not None:
        raise ValueError(
            "give either process_group or double_group: the double group alone names all ranks"
        )
    return Rings(_find_transport(intra), _find_transport(inter), double=True)


def _find_transport(group: Group | None) -> Transport:
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
    if isinstance(group, dist.DeviceMesh):
        return torch_transport(_find_mesh_group(group))
    raise TypeError(
        "a group must be a torch.distributed ProcessGroup, a bmtrain NCCLCommunicator or a Transport, got "
        f"{type(group).__name__}"
    )


def _find_mesh_group(mesh: dist.DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise ValueError(
            f"a group must be one dimension of a DeviceMesh, got one of {names}: give mesh[{names[-1]!r}]"
        )
    check_member(mesh)
    return mesh.get_group()


def check_member(mesh: dist.DeviceMesh) -> None:
    """Raises ValueError if this rank is not in the mesh."""
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the DeviceMesh it was given, {mesh.mesh.tolist()}"
        )


def check_device(rings: Rings, x: Tensor) -> None:
    """Raise ValueError if the rings cannot move a tensor that lies where x does."""
    for transport in (rings.inner, rings.outer):
        if transport.size > 1 and x.device.type not in transport.device_types:
            able = sorted(transport.device_types)
            raise ValueError(
                f"inputs are on {x.device}, but the group moves tensors on {able} only"
            )
