"""The rings between the ranks of a call, and the messages over them."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..errors import RanksDisagree
from ..transport import ALONE, Transport
from ..transport.bmtrain import bmtrain_transport, initialized_bmtrain
from ..transport.torch_dist import torch_transport, world_group

MOST_KEPT = 64  # plans and requests, each, unless a sequence in chunks needs more
_PROCESS = uuid.uuid4().hex  # ranks may be forks, or threads of a test

# a ProcessGroup, a DeviceMesh of one dimension, a bmtrain NCCLCommunicator or a Transport
Group = Any

Kept = TypeVar("Kept")


@dataclass
class History:
    """The common past of the ranks of some rings.

    calls     the number of calls. It is equal on all ranks, since all agree on each call.
    plans     plans of calls, by all ranks' lines about them
    requests  calls that this rank has checked, by all that checks depend on
    most      of plans and of requests, how many are kept
    is_grid   whether a double ring is known to be a grid of ranks
    """

    calls: int = 0
    plans: dict[Any, Any] = field(default_factory=dict)
    requests: dict[Any, Any] = field(default_factory=dict)
    most: int = MOST_KEPT
    is_grid: bool = False

    def find(self, kept: dict[Any, Any], key: Any, make: Callable[[], Kept]) -> Kept:
        """Return what was made for a key of plans or requests. The latest `most` are kept."""
        found: Kept | None = kept.pop(key, None)
        if found is None:
            found = make()
            # Several threads without a group may do this at once: copying the keys is atomic.
            for old in list(kept)[: 1 - self.most]:
                kept.pop(old, None)
        kept[key] = found  # last in order: just used
        return found


@dataclass(frozen=True)
class Rings:
    """The rings of a rank: `inner` within a host, and if `double`, `outer` between hosts."""

    inner: Transport
    outer: Transport
    double: bool = False

    @property
    def size(self) -> int:
        return self.inner.size * self.outer.size

    @property
    def rank(self) -> int:
        return self.outer.rank * self.inner.size + self.inner.rank

    @functools.cached_property
    def history(self) -> History:
        history: History = self.inner.histories.setdefault(self.outer, History())
        return history

    @functools.cached_property
    def shared(self) -> tuple[Transport, ...]:
        """The rings that have other ranks."""
        return tuple(ring for ring in (self.inner, self.outer) if ring.size > 1)

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks (a line of text each) in rank order. Raises
        RanksDisagree on every rank if double rings are no grid of ranks.
        """
        if not self.double:
            return self.inner.messenger.gather(message)
        try:
            if not self.history.is_grid:
                self._check_grid()
                self.history.is_grid = True
            return self._gather_over_both(message)
        except BaseException as error:
            self.close_if_unusable(f"in its other group: {error}")
            raise

    def _gather_over_both(self, message: bytes) -> list[bytes]:
        here = b"".join(b"\0" + line for line in self.inner.messenger.gather(message))
        hosts = self.outer.messenger.gather(here)
        for rank, lines in enumerate(hosts):
            if not lines.startswith(b"\0"):
                passed = f"rank {rank} of the inter group passed it as process_group"
                got = lines.decode(errors="replace")[:200]
                raise RanksDisagree(f"{passed}: expected packed lines, got '{got}'")
        return [line for lines in hosts for line in lines[1:].split(b"\0")]

    def _check_grid(self) -> None:
        """Raise RanksDisagree if the rings are no grid: ranks of a host must share a host number,
        and ranks of an outer ring a place in their hosts.

        A rank that finds a fault sends it over both rings.
        """
        inner, outer, fault = self.inner, self.outer, ""

        def describe(role: str, place: int, host: int) -> str:
            return f"{role} group, place {place} of {inner.size} on host {host} of {outer.size}"

        for ring, role in ((inner, "intra"), (outer, "inter")):
            here = describe(role, inner.rank, outer.rank)
            for rank, line in enumerate(ring.messenger.gather(here.encode())):
                at = (rank, outer.rank) if role == "intra" else (inner.rank, rank)
                expected, found = describe(role, *at), line.decode(errors="replace")[:200]
                if found != expected and not fault:
                    of_group = f"expected rank {rank} of an {role} group"
                    fault = f"{of_group} to be '{expected}', got '{found}'"
        # the same number of messages over both, in case a rank swapped them
        for ring in (inner, outer, inner, outer):
            lines = ring.messenger.gather(fault.encode())
            fault = next((line.decode() for line in lines if line), "")
        if fault:
            raise RanksDisagree(f"double_group must be a grid of hosts and places in them: {fault}")
        # Groups may also connect two grids so that each rank sees one of them. Then the ranks of a
        # host see different ones.
        thread = f"{_PROCESS} {os.getpid()} {threading.get_ident()}"
        everyone = self._gather_over_both(thread.encode())
        digest = hashlib.sha256(b"\n".join(everyone)).hexdigest().encode()
        if any(theirs != digest for theirs in inner.messenger.gather(digest)):
            raise RanksDisagree("double_group must be a grid: ranks of a host see different ranks")

    def fail(self, reason: str) -> RuntimeError | None:
        """Report over both rings that this rank failed in the middle of a call, see Messenger."""
        # After equally many deliveries, each one has begun at both of its ends. Exchanges are not
        # counted: over gloo a rank ends its own, or has a place that no other rank has.
        rings, errors = self.shared, list[RuntimeError | None]()
        try:
            places = [ring.begun if ring.end_exchanges() else -1 - ring.rank for ring in rings]
            for ring, place in zip(rings, places, strict=True):
                errors.append(ring.messenger.fail(reason, place))
        except BaseException:  # this rank is interrupted again
            for ring in rings:
                ring.messenger.close(reason)
            raise
        finally:
            self.close_if_unusable(reason)
        return next((error for error in errors if error), None)

    def close_if_unusable(self, reason: str) -> None:
        """Close both groups if one is unusable."""
        usable = [ring.messenger for ring in self.shared if not ring.messenger.unusable]
        if len(usable) < len(self.shared):
            for messenger in usable:
                messenger.close(reason)
            for ring in self.shared:
                ring.disconnect()

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:
        """Prepare for deliveries within the host, and for exchanges over both rings. All ranks call
        it with the same numbers, also ranks with nothing to send.
        """
        self.inner.reserve(lane_bytes, device)
        for ring in (self.inner, self.outer):
            ring.connect(device)

    def gather_tensors(self, x: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return the contiguous x of all ranks in rank order. `shapes` are their shapes."""
        inner, outer = self.inner.size, self.outer.size
        start = self.outer.rank * inner
        here = enumerate(self.inner.all_to_all([x] * inner, shapes[start : start + inner]))
        by_place = [self.outer.all_to_all([x] * outer, shapes[place::inner]) for place, x in here]
        return [of_hosts[host] for host in range(outer) for of_hosts in by_place]

    def gather_equal(self, x: Tensor) -> Tensor:
        """Return the contiguous x of all ranks, of one shape, in rank order: (size, *x.shape)."""
        here = self.inner.gather_equal(x)
        return self.outer.gather_equal(here).flatten(0, 1) if self.double else here

    def sum_for_each(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of the tensors that all ranks have for this one.

        parts[r] is for rank r, contiguous, and of one shape and dtype on all ranks. Ranks add up in
        a fixed order, half precision in fp32, and return that dtype.
        """
        inner = self.inner.size
        starts = range(0, self.size, inner)
        by_host = [sum_over(self.inner, parts[start : start + inner]) for start in starts]
        return sum_over(self.outer, by_host)


def sum_over(ring: Transport, parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the tensors that the ranks of a ring have for this one, by `parts`."""
    found = ring.all_to_all(parts, [parts[ring.rank].shape] * ring.size)
    dtype = found[0].dtype
    wide = accumulator_dtype(dtype) if dtype.is_floating_point else dtype
    total = found[0].to(wide, copy=True)
    for part in found[1:]:
        total += part
    return total


def make_rings(process_group: Group | None, double_group: Sequence[Group | None]) -> Rings:
    """Return the rings that `burst_attn_func`'s arguments name.

    Intra has the ranks of a host, inter those at the same place of all hosts. Each may be a pair of
    groups, as in the official BurstAttention, where the second one of a pair sends dq. Here the
    first one sends everything.

    Raises TypeError for what is no group. Raises ValueError for a mesh of more dimensions, groups
    without this rank, both kinds, and pairs of groups with other ranks or in another order.
    """
    if not isinstance(double_group, Sequence) or len(double_group) != 2:
        raise TypeError(f"double_group: expected a pair (intra, inter), got {double_group!r}")
    intra, inter = double_group
    if isinstance(intra, tuple | list) or isinstance(inter, tuple | list):
        intra, inter = map(_take_first, double_group, ("intra", "inter"))
    if (intra is None) != (inter is None):
        raise ValueError(f"double_group: expected both groups or neither, got {double_group!r}")
    if intra is None:
        return Rings(_find_transport(process_group), ALONE)
    if process_group is not None:
        raise ValueError("expected process_group or double_group, got both: pass one of them")
    return Rings(_find_transport(intra), _find_transport(inter), double=True)


def _take_first(group: Group | None, role: str) -> Group | None:
    """Return a group, or the first of a pair of groups with the same ranks."""
    if not isinstance(group, tuple | list):
        return group
    if len(group) != 2 or any(x is None for x in group):
        expected = f"{role} to be a group or a pair of groups"
        raise TypeError(f"double_group: expected {expected}, got {group!r}")
    first, second = map(_list_ranks, group)
    if first != second:
        expected = f"both groups of {role} to have the same ranks in the same order"
        raise ValueError(f"double_group: expected {expected}, got ranks {first} and {second}")
    return group[0]


def _list_ranks(group: Group) -> list[int] | str:
    """Return the ranks of a group in their order, or this rank's place if it does not know them."""
    bmtrain = initialized_bmtrain()
    if bmtrain and isinstance(group, bmtrain.nccl.NCCLCommunicator):
        return f"{bmtrain.nccl.commRank(group)} of {bmtrain.nccl.commCount(group)}"
    group = _find_mesh_group(group) if isinstance(group, dist.DeviceMesh) else group
    if isinstance(group, dist.ProcessGroup):
        return dist.get_process_group_ranks(group)
    transport = _find_transport(group)
    return f"{transport.rank} of {transport.size}"


def _find_transport(group: Group | None) -> Transport:
    if isinstance(group, Transport):
        return group
    bmtrain = initialized_bmtrain()
    if bmtrain and (group is None or isinstance(group, bmtrain.nccl.NCCLCommunicator)):
        return bmtrain_transport(bmtrain.config["comm"] if group is None else group)
    if group is None:
        return torch_transport(world_group()) if dist.is_initialized() else ALONE
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        rank = dist.get_rank()
        raise ValueError(f"expected a process_group with rank {rank}, got one without it")
    if isinstance(group, dist.DeviceMesh):
        group = _find_mesh_group(group)
    if isinstance(group, dist.ProcessGroup):
        return torch_transport(group)
    raise TypeError(
        "expected a group: a ProcessGroup or DeviceMesh of torch.distributed, a bmtrain "
        f"NCCLCommunicator or a Transport; got {type(group).__name__}"
    )


def _find_mesh_group(mesh: dist.DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names: tuple[str | int, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        hint = f"pass mesh[{names[-1]!r}]"
        raise ValueError(f"expected one dimension of a DeviceMesh, got {names}: {hint}")
    check_member(mesh)
    return mesh.get_group()


def check_member(mesh: dist.DeviceMesh) -> None:
    """Raise ValueError if this rank is not in the mesh."""
    if mesh.get_coordinate() is None:
        rank, ranks = dist.get_rank(), mesh.mesh.tolist()
        raise ValueError(f"expected a DeviceMesh with rank {rank}, got {ranks}")


def check_device(rings: Rings, x: Tensor) -> None:
    """Raise ValueError if the rings cannot exchange tensors on x's device."""
    for transport in rings.shared:
        if x.device.type not in transport.device_types:
            expected = f"inputs on one of {sorted(transport.device_types)}"
            raise ValueError(f"expected {expected}, which the group can exchange, got {x.device}")
