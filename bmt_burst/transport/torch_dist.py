"""Transport over a torch.distributed process group: gloo for CPU tensors, NCCL or copy engines for CUDA tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from bmt_burst import transport

from . import Messages, Transport, as_bytes
from .processes import ProcessTransport

_BACKENDS = (("cpu", "gloo"), ("cuda", "nccl"))


@dataclass
class _Ticket:
    works: list[dist.Work]
    messages: tuple[Messages, ...]  # kept alive until the exchange is over

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.messages = ()


class TorchTransport(ProcessTransport):
    """Raises ValueError if this process is not a member of `group`; `copy_engines` is a ProcessTransport's."""

    def __init__(self, group: dist.ProcessGroup, copy_engines: bool | None = None):
        super().__init__(copy_engines)
        self.group = group
        self.rank = dist.get_rank(group)
        members = dist.get_process_group_ranks(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group of ranks {members}")
        self.size = len(members)
        backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
        self.device_types = frozenset(device for device, backend in _BACKENDS if backends.get(device) == backend)
        if not self.device_types:
            raise ValueError(f"a process group needs gloo for CPU or NCCL for CUDA tensors, this one has {backends}")

    def exchange(self, sends: Messages, recvs: Messages) -> _Ticket:
        ops = [
            dist.P2POp(op, as_bytes(tensor), group=self.group, group_peer=peer)
            for op, messages in ((dist.isend, sends), (dist.irecv, recvs))
            for tensor, peer in messages
        ]
        return _Ticket(dist.batch_isend_irecv(ops) if ops else [], (sends, recvs))

    def symmetric_group(self) -> dist.ProcessGroup:
        return self.group

    def _gather_remotely(self, message: bytes, longest: int) -> list[bytes]:
        if "cpu" in self.device_types:
            return Transport._gather(self, message, longest)
        return _companion(self.group)._gather_remotely(message, longest)


@functools.cache
def torch_transport(group: dist.ProcessGroup) -> TorchTransport:
    """The transport over `group`, one for all calls; kept for as long as the process lives."""
    return TorchTransport(group)


@functools.cache
def _companion(group: dist.ProcessGroup) -> TorchTransport:
    """A gloo group of the same ranks, for messages between hosts. Made when all of them first call it."""
    members = dist.get_process_group_ranks(group)
    timeout = timedelta(seconds=transport.AGREEMENT_TIMEOUT)
    return TorchTransport(dist.new_group(members, timeout, "gloo", use_local_synchronization=True))
