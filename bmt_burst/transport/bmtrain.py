"""A transport over NCCL communicators of BMTrain, next to its own all-gathers and reduce-scatters.

Exchanges run on a stream of high priority. The ranks of a group find each other in the store of
torch.distributed's launchers. No process group of torch.distributed is made.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from . import Messages, Ticket
from .messenger import DEFAULT_TIMEOUT, make_late_error
from .processes import ExchangeTicket, ProcessTransport

Communicator = Any  # bmtrain's NCCLCommunicator: the package has no types
_groups_made = itertools.count()


@dataclass(frozen=True)
class _Bytes:
    """A contiguous tensor's bytes, since BMTrain's functions send the whole storage of a tensor."""

    tensor: torch.Tensor
    dtype: torch.dtype = torch.uint8
    is_cuda: bool = True

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    def size(self) -> int:
        return self.tensor.nbytes


class BMTrainTransport(ProcessTransport):
    """The ranks of `comm`, a bmtrain NCCLCommunicator. All of them make it at the same point."""

    device_types = frozenset({"cuda"})

    def __init__(self, comm: Communicator):
        from bmtrain import nccl

        self.nccl, self.comm = nccl, comm
        self.rank, self.size = nccl.commRank(comm), nccl.commCount(comm)
        self.stream = torch.cuda.Stream(priority=-1)
        drawn = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8, device="cuda")
        shared = torch.empty_like(drawn)
        nccl.broadcast(_Bytes(drawn), _Bytes(shared), 0, comm)
        self.name = bytes(shared.tolist()).hex()  # of the group's entries in the store
        # a process group without a backend, by whose store ranks find each other's memory
        self.group: dist.ProcessGroup | None = None
        super().__init__(dist.PrefixStore(f"{self.name}/messages", store()))

    def exchange(self, sends: Messages, recvs: Messages) -> Ticket:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.nccl.groupStart()
            for tensor, peer in sends:
                self.nccl.send(_Bytes(tensor), peer, self.comm)
            for tensor, peer in recvs:
                self.nccl.recv(_Bytes(tensor), peer, self.comm)
            self.nccl.groupEnd()
        done = self.stream.record_event()
        return ExchangeTicket(
            [lambda: torch.cuda.current_stream().wait_event(done)], (sends, recvs)
        )

    def symmetric_group(self) -> str:
        if self.group is None:
            found = dist.PrefixStore(self.name, store())
            self.group = dist.ProcessGroup(found, self.rank, self.size)
            register: Any = torch._C._distributed_c10d._register_process_group
            register(self.name, self.group)
        return self.name

    def make_group(self, partition: Sequence[range]) -> BMTrainTransport:
        """Make a transport for each part, as every rank must. Return the one of this rank."""
        part = next(part for part in partition if self.rank in part)
        name, rank = f"{self.name}/group/{next(_groups_made)}/{part.start}", part.index(self.rank)
        seconds = self.messenger.timeout
        if rank == 0:
            store().set(name, self.nccl.getUniqueId().hex())
        try:
            store().wait([name], timedelta(seconds=seconds))
        except dist.DistStoreError as error:
            raise make_late_error([0], seconds) from error
        unique = bytes.fromhex(store().get(name).decode())
        made = bmtrain_transport(self.nccl.commInitRank(unique, len(part), rank))
        made.set_timeout(self.asked_timeout)
        # connect to every rank now: otherwise the first exchange would wait for that
        mine = torch.zeros(1, dtype=torch.uint8, device="cuda")
        made.all_to_all([mine] * made.size, [mine.shape] * made.size)
        torch.cuda.synchronize()
        return made


_transports: dict[Communicator, BMTrainTransport] = {}
# One lock for each communicator: its ranks make its transport together, so a thread that makes
# another group's must not wait for them.
_making: dict[Communicator, threading.Lock] = {}


def bmtrain_transport(comm: Communicator) -> BMTrainTransport:
    """Return the only transport over `comm`. All its ranks make it at the same point."""
    with _making.setdefault(comm, threading.Lock()):  # one thread's lock, for all
        if comm not in _transports:
            _transports[comm] = BMTrainTransport(comm)
        return _transports[comm]


def initialized_bmtrain() -> ModuleType | None:
    """Return the module bmtrain if it is imported and initialized, else None."""
    bmtrain = sys.modules.get("bmtrain")
    return bmtrain if bmtrain and bmtrain.config["initialized"] else None


_connecting = threading.Lock()


def store() -> dist.Store:
    """Return the launcher's store at MASTER_ADDR and MASTER_PORT, or one that rank 0 keeps."""
    with _connecting:
        return _connect_to_store()


@functools.cache
def _connect_to_store() -> dist.Store:
    from bmtrain import config

    found, _, _ = next(dist.rendezvous("env://", config["rank"], config["world_size"]))
    found.set_timeout(timedelta(seconds=DEFAULT_TIMEOUT))
    return dist.PrefixStore("bmt_burst", found)
