"""Transport over NCCL communicators of BMTrain, beside its own all-gathers and reduce-scatters.

Exchanges run on a stream of high priority that the current stream is waited for by and waits for.
The ranks of a group agree over the store that torch.distributed's launchers provide; no process
group of torch.distributed is made.
"""

from __future__ import annotations

import functools
import sys
import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from bmt_burst import transport

from . import Messages, make_late_error
from .processes import ProcessTransport


@dataclass(frozen=True)
class _Bytes:
    """A contiguous tensor's own bytes, as BMTrain's nccl functions want them: they would send a
    whole storage.
    """

    tensor: Tensor
    dtype: torch.dtype = torch.uint8
    is_cuda: bool = True

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    def size(self) -> int:
        return self.tensor.nbytes


@dataclass
class _Ticket:
    done: torch.cuda.Event
    messages: tuple[Messages, ...]  # kept alive until the exchange is over

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)
        self.messages = ()


class BMTrainTransport(ProcessTransport):
    """Over the ranks of `comm`, a bmtrain NCCLCommunicator; all of them make it at the same point."""

    device_types = frozenset({"cuda"})

    def __init__(self, comm, copy_engines: bool | None = None):
        super().__init__(copy_engines)
        from bmtrain import nccl

        self.nccl, self.comm = nccl, comm
        self.rank, self.size = nccl.commRank(comm), nccl.commCount(comm)
        self.stream = torch.cuda.Stream(priority=-1)
        self.name = self._draw_name()
        self.group: dist.ProcessGroup | None = None
        self.gathers = 0

    def exchange(self, sends: Messages, recvs: Messages) -> _Ticket:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.nccl.groupStart()
            for tensor, peer in sends:
                self.nccl.send(_Bytes(tensor), peer, self.comm)
            for tensor, peer in recvs:
                self.nccl.recv(_Bytes(tensor), peer, self.comm)
            self.nccl.groupEnd()
        return _Ticket(self.stream.record_event(), (sends, recvs))

    def _gather_remotely(self, message: bytes) -> list[bytes]:
        self.gathers += 1
        store().set(self._key(self.gathers, self.rank), message)
        replies = [self._reply(peer) for peer in range(self.size)]
        if self.gathers > 1:  # all have written this one, so all have read the one before
            store().delete_key(self._key(self.gathers - 1, self.rank))
        return replies

    def _reply(self, peer: int) -> bytes:
        try:
            return store().get(self._key(self.gathers, peer))
        except dist.DistStoreError as error:
            raise make_late_error([peer], store().timeout.total_seconds()) from error

    def symmetric_group(self) -> str:
        # a group without any backend, by whose store the ranks find each other's memory
        if self.group is None:
            self.group = dist.ProcessGroup(
                dist.PrefixStore(self.name, store()), self.rank, self.size
            )
            torch._C._distributed_c10d._register_process_group(self.name, self.group)
        return self.name

    def warm_up(self) -> None:
        """Connects to every rank now, which the first exchange would wait for."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        mine, theirs = (torch.zeros(self.size, dtype=torch.uint8, device="cuda") for _ in range(2))
        self.exchange(
            [(mine[p : p + 1], p) for p in peers], [(theirs[p : p + 1], p) for p in peers]
        ).wait()
        torch.cuda.synchronize()

    def _draw_name(self) -> str:
        """A name that the ranks share and no other group has, for what they put into the store."""
        drawn = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8, device="cuda")
        shared = torch.empty_like(drawn)
        self.nccl.broadcast(_Bytes(drawn), _Bytes(shared), 0, self.comm)
        return bytes(shared.tolist()).hex()

    def _key(self, number: int, rank: int) -> str:
        return f"{self.name}/{number}/{rank}"


@functools.cache
def bmtrain_transport(comm) -> BMTrainTransport:
    """The transport over `comm`, one for all calls. All its ranks make it at the same point."""
    return BMTrainTransport(comm)


def new_communicator(name: str, rank: int, size: int):
    """A communicator of `size` ranks, this one being `rank`, which find each other in the store by
    `name`.
    """
    from bmtrain import nccl

    if rank == 0:
        store().set(name, nccl.getUniqueId().hex())
    return nccl.commInitRank(bytes.fromhex(store().get(name).decode()), size, rank)


def initialized_bmtrain():
    """The module bmtrain if it is imported and initialized, else None."""
    bmtrain = sys.modules.get("bmtrain")
    return bmtrain if bmtrain and bmtrain.config["initialized"] else None


@functools.cache
def store() -> dist.Store:
    """The store of the launcher that MASTER_ADDR and MASTER_PORT name, or one that rank 0 keeps
    there.
    """
    from bmtrain import config

    found, _, _ = next(dist.rendezvous("env://", config["rank"], config["world_size"]))
    found.set_timeout(timedelta(seconds=transport.AGREEMENT_TIMEOUT))
    return dist.PrefixStore("bmt_burst", found)
