"""Transport over a torch.distributed process group: gloo for CPU tensors, NCCL or copy engines for
CUDA tensors.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from bmt_burst import transport

from ..errors import RankGone
from . import Messages, Transport, as_bytes, make_late_error, name_ranks
from .processes import ProcessTransport

_BACKENDS = (("cpu", "gloo"), ("cuda", "nccl"))
_NOTHING = 1 << 30  # a tag that no message has


@dataclass
class _Ticket:
    works: list[dist.Work]
    messages: tuple[Messages, ...]  # kept alive until the exchange is over

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.messages = ()


@dataclass
class _GlooTicket(_Ticket):
    """An exchange over gloo: a work for each message, in their order, and the seconds to wait for
    each.
    """

    seconds: float

    def wait(self) -> None:
        peers = [peer for messages in self.messages for _, peer in messages]
        for work, peer in zip(self.works, peers, strict=True):
            with _naming([peer], self.seconds):
                work.wait(timedelta(seconds=self.seconds))
        self.messages = ()


@contextlib.contextmanager
def _naming(peers: Sequence[int], seconds: float) -> Iterator[None]:
    """Raise RankLate for `peers` that torch has waited for in vain, RankGone where it fails before."""
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if time.monotonic() - began >= seconds:
            raise make_late_error(peers, seconds) from error
        raise RankGone(f"{name_ranks(peers)} of the group has ended or gave up: {error}") from error


class TorchTransport(ProcessTransport):
    """Raises ValueError if this process is not a member of `group`; `copy_engines` is a
    ProcessTransport's.

    Does not keep the group alive: once it is destroyed and its users let go of it, its connections
    close.
    """

    def __init__(self, group: dist.ProcessGroup, copy_engines: bool | None = None):
        super().__init__(copy_engines)
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        members = dist.get_process_group_ranks(group)
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process group of ranks {members}"
            )
        self.size = len(members)
        backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
        self.device_types = frozenset(
            device for device, backend in _BACKENDS if backends.get(device) == backend
        )
        if not self.device_types:
            raise ValueError(
                f"a process group needs gloo for CPU or NCCL for CUDA tensors, this one has {backends}"
            )
        self.patience = max(_timeout(group, device) for device in self.device_types)
        self.companion: TorchTransport | None = None
        self.connected = False  # over NCCL

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return group

    def exchange(self, sends: Messages, recvs: Messages) -> _Ticket:
        if any(tensor.device.type == "cpu" for tensor, _ in (*sends, *recvs)):
            return self._exchange_over_gloo(sends, recvs)
        group = self.group
        ops = [
            dist.P2POp(op, as_bytes(tensor), group=group, group_peer=peer)
            for op, messages in ((dist.isend, sends), (dist.irecv, recvs))
            for tensor, peer in messages
        ]
        return _Ticket(dist.batch_isend_irecv(ops) if ops else [], (sends, recvs))

    def _exchange_over_gloo(self, sends: Messages, recvs: Messages) -> _GlooTicket:
        group, seconds, works = self.group, _timeout(self.group, "cpu"), []
        for tensor, peer in sends:
            with _naming([peer], seconds):
                works.append(dist.isend(as_bytes(tensor), group=group, group_dst=peer))
        for tensor, peer in recvs:
            with _naming([peer], seconds):
                works.append(dist.irecv(as_bytes(tensor), group=group, group_src=peer))
        return _GlooTicket(works, (sends, recvs), seconds)

    def connect(self, device: torch.device) -> None:
        """NCCL makes its communicator in a group's first operation, for which it waits for all
        ranks of the group.
        """
        if device.type == "cuda" and self.size > 1 and not (self.copy_engines or self.connected):
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
            self.connected = True

    def symmetric_group(self) -> dist.ProcessGroup:
        return self.group

    def disconnect(self) -> None:
        if "cpu" not in self.device_types:
            if self.companion:
                self.companion.disconnect()
            return
        nothing, peer = torch.empty(1, dtype=torch.uint8), (self.rank + 1) % self.size
        # gloo closes all connections of a group where one wait takes too long
        with contextlib.suppress(RuntimeError):
            work = dist.irecv(nothing, group=self.group, group_src=peer, tag=_NOTHING)
            assert work is not None, "this rank is in its group"
            work.wait(timedelta(milliseconds=1))

    def _gather_remotely(self, message: bytes) -> list[bytes]:
        if "cpu" in self.device_types:
            return Transport._gather(self, message)
        if self.companion is None:
            self.companion = self._make_companion()
        return self.companion._gather_remotely(message)

    def _make_companion(self) -> TorchTransport:
        """Over a gloo group of the same ranks, for messages between hosts. All of them make it at
        the same point.
        """
        members = dist.get_process_group_ranks(self.group)
        timeout = timedelta(seconds=max(self.patience, transport.AGREEMENT_TIMEOUT))
        others = [peer for peer in range(self.size) if peer != self.rank]
        with _naming(others, timeout.total_seconds()):
            companion = dist.new_group(members, timeout, "gloo", use_local_synchronization=True)
        weakref.finalize(self.group, _destroy, companion).atexit = False
        return TorchTransport(companion)


def _timeout(group: dist.ProcessGroup, device: str) -> float:
    """Return how many seconds a group waits for its ranks, over the backend for tensors on
    `device`.
    """
    return group._get_backend(torch.device(device)).options._timeout.total_seconds()


_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, TorchTransport] = (
    weakref.WeakKeyDictionary()
)
# two threads that each made a transport would not see each other in a call
_finding = threading.Lock()


def torch_transport(group: dist.ProcessGroup) -> TorchTransport:
    """Return the transport over `group`: one for all calls and threads, for as long as the group is
    there.
    """
    with _finding:
        if group not in _transports:
            _transports[group] = TorchTransport(group)
        return _transports[group]


def _destroy(companion: dist.ProcessGroup) -> None:
    """Unless all groups were destroyed together."""
    if companion in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(companion)
