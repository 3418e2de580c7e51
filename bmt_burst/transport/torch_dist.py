"""Transport over a torch.distributed process group: gloo for CPU tensors, NCCL or copy engines for CUDA tensors."""

from __future__ import annotations

import functools
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from . import Arrival, Delivery, Messages, Parcel, Transport
from .copy_engine import CopyEngines, cuda_device

logger = logging.getLogger("bmt_burst")

_AGREEMENT_TIMEOUT = timedelta(minutes=2)  # after which a rank that did not take part is an error
_BACKENDS = (("cpu", "gloo"), ("cuda", "nccl"))


@dataclass(frozen=True)
class _Ticket:
    works: list[dist.Work]
    messages: tuple[Messages, Messages]  # kept alive until the exchange is over

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class TorchTransport(Transport):
    """Raises ValueError if this process is not a member of `group`.

    copy_engines  whether deliveries between GPUs go by their copy engines: False never, True or an error, None where
                  all ranks are on one host and can reach each other's memory
    """

    def __init__(self, group: dist.ProcessGroup, copy_engines: bool | None = None):
        self.group, self.wants_copy_engines = group, copy_engines
        self.copy_engines: CopyEngines | None = None
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
            dist.P2POp(op, tensor.view(-1).view(torch.uint8), group=self.group, group_peer=peer)
            for op, messages in ((dist.isend, sends), (dist.irecv, recvs))
            for tensor, peer in messages
        ]
        return _Ticket(dist.batch_isend_irecv(ops) if ops else [], (sends, recvs))

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:
        """Raises RuntimeError on every rank if copy engines were asked for by name and a rank cannot use them."""
        if device.type != "cuda" or self.size == 1 or self.wants_copy_engines is False:
            return
        engines = self.copy_engines or CopyEngines(self.rank, self.size, cuda_device(self.group, self._barrier))
        if engines.fits(lane_bytes):
            return
        reason = self._several_hosts()
        if reason is None:
            reason = self._first_failure(lambda: engines.reserve(lane_bytes))
        if reason is None:
            self.copy_engines = engines
        elif self.wants_copy_engines or self.copy_engines:
            raise RuntimeError(f"copy engines cannot be used: {reason}")
        else:
            self.wants_copy_engines = False
        logger.info("deliveries go %s", f"over NCCL: {reason}" if reason else "by the GPUs' copy engines")

    @property
    def held_bytes(self) -> int:
        return self.copy_engines.arena_bytes if self.copy_engines else 0

    def deliver(
        self, lane: str, nbytes: int, sends: Sequence[Parcel], arrivals: Sequence[Arrival], device: torch.device
    ) -> Delivery:
        if self.copy_engines and device.type == "cuda":
            return self.copy_engines.deliver(lane, nbytes, sends, arrivals)
        return super().deliver(lane, nbytes, sends, arrivals, device)

    def gather(self, message: bytes) -> list[bytes]:
        return super().gather(message) if "cpu" in self.device_types else _companion(self.group).gather(message)

    def _barrier(self) -> None:
        self.gather(b"")

    def _several_hosts(self) -> str | None:
        """A reason if the ranks are on several hosts, as NCCL sees them."""
        mine = os.environ.get("NCCL_HOSTID") or platform.node()
        hosts = sorted({host.decode() for host in self.gather(mine.encode("ascii", "replace")[:400])})
        return f"the ranks are on several hosts, {hosts}" if len(hosts) > 1 else None

    def _first_failure(self, attempt: Callable[[], None]) -> str | None:
        """Attempts on every rank; the first rank's failure, alike on all."""
        failure = ""
        try:
            attempt()
        except (RuntimeError, OSError) as caught:
            failure = f"{type(caught).__name__}: {caught}"
        replies = self.gather(failure.encode("ascii", "replace")[:400])
        return next((f"rank {rank}: {reply.decode()}" for rank, reply in enumerate(replies) if reply), None)


@functools.cache
def torch_transport(group: dist.ProcessGroup) -> TorchTransport:
    """The transport over `group`, one for all calls."""
    return TorchTransport(group)


@functools.cache
def _companion(group: dist.ProcessGroup) -> TorchTransport:
    """A gloo group of the same ranks, for messages between hosts. Made when all of them first call it."""
    members = dist.get_process_group_ranks(group)
    return TorchTransport(dist.new_group(members, _AGREEMENT_TIMEOUT, "gloo", use_local_synchronization=True))
