"""Transport over a torch.distributed process group: gloo for CPU tensors, NCCL or copy engines for CUDA tensors."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from bmt_burst import transport

from . import Messages, Transport, as_bytes
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


class TorchTransport(ProcessTransport):
    """Raises ValueError if this process is not a member of `group`; `copy_engines` is a ProcessTransport's.

    Does not keep the group alive: once it is destroyed and its users let go of it, its connections close.
    """

    def __init__(self, group: dist.ProcessGroup, copy_engines: bool | None = None):
        super().__init__(copy_engines)
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        members = dist.get_process_group_ranks(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group of ranks {members}")
        self.size = len(members)
        backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
        self.device_types = frozenset(device for device, backend in _BACKENDS if backends.get(device) == backend)
        if not self.device_types:
            raise ValueError(f"a process group needs gloo for CPU or NCCL for CUDA tensors, this one has {backends}")
        options = (group._get_backend(torch.device(device)).options for device in self.device_types)
        self.patience = max(each._timeout.total_seconds() for each in options)
        self.companion: TorchTransport | None = None
        self.connected = False  # over NCCL

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return group

    def exchange(self, sends: Messages, recvs: Messages) -> _Ticket:
        group = self.group
        ops = [
            dist.P2POp(op, as_bytes(tensor), group=group, group_peer=peer)
            for op, messages in ((dist.isend, sends), (dist.irecv, recvs))
            for tensor, peer in messages
        ]
        return _Ticket(dist.batch_isend_irecv(ops) if ops else [], (sends, recvs))

    def connect(self, device: torch.device) -> None:
        """NCCL makes its communicator in a group's first operation, for which it waits for all ranks of the group."""
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
        with contextlib.suppress(RuntimeError):  # gloo closes all connections of a group where one wait takes too long
            dist.irecv(nothing, group=self.group, group_src=peer, tag=_NOTHING).wait(timedelta(milliseconds=1))

    def _gather_remotely(self, message: bytes) -> list[bytes]:
        if "cpu" in self.device_types:
            return Transport._gather(self, message)
        if self.companion is None:
            self.companion = self._make_companion()
        return self.companion._gather_remotely(message)

    def _make_companion(self) -> TorchTransport:
        """Over a gloo group of the same ranks, for messages between hosts. All of them make it at the same point."""
        members = dist.get_process_group_ranks(self.group)
        timeout = timedelta(seconds=max(self.patience, transport.AGREEMENT_TIMEOUT))
        companion = dist.new_group(members, timeout, "gloo", use_local_synchronization=True)
        weakref.finalize(self.group, _destroy, companion).atexit = False
        return TorchTransport(companion)


_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, TorchTransport] = weakref.WeakKeyDictionary()


def torch_transport(group: dist.ProcessGroup) -> TorchTransport:
    """The transport over `group`, one for all calls, for as long as the group is there."""
    if group not in _transports:
        _transports[group] = TorchTransport(group)
    return _transports[group]


def _destroy(companion: dist.ProcessGroup) -> None:
    """Unless all groups were destroyed together."""
    if companion in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(companion)
