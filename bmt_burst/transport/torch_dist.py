"""A transport over a process group of torch.distributed, with gloo, NCCL or copy engines."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import constants

from ..errors import RankGone
from . import Messages, Ticket, as_bytes
from .messenger import make_late_error
from .processes import EngineUse, ExchangeTicket, ProcessTransport

_BACKENDS = (("cpu", "gloo"), ("cuda", "nccl"))
_NOTHING = 1 << 30  # a tag that no message has
_ENDING = 2.0  # seconds for an exchange that began on both of its ranks


@contextlib.contextmanager
def _name_peer(peer: int, seconds: float) -> Iterator[None]:
    """Raise RankLate if torch waits for this rank in vain, RankGone if it fails earlier."""
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if time.monotonic() - began >= seconds:
            raise make_late_error([peer], seconds) from error
        raise RankGone(f"rank {peer} of the group has ended or failed: {error}") from error


def _lose(seconds: float) -> None:
    """Fail: an interrupt came while an exchange began, and nobody can wait for all of its parts."""
    raise RuntimeError("an exchange was interrupted while it began")


class TorchTransport(ProcessTransport):
    """The ranks of a process group with gloo or NCCL, which it does not keep alive."""

    def __init__(self, group: dist.ProcessGroup, engine_use: EngineUse = "auto"):
        self._group = weakref.ref(group)
        self.rank, self.size = group.rank(), group.size()
        store = dist.distributed_c10d._get_process_group_store(group)
        super().__init__(dist.PrefixStore("bmt_burst", store), engine_use)
        backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
        self.device_types = frozenset(x for x, backend in _BACKENDS if backends.get(x) == backend)
        if not self.device_types:
            raise ValueError(f"expected a group with gloo on CPUs or NCCL on GPUs, got {backends}")
        timeouts = [backend.options._timeout for backend in self._backends()]
        self.own_timeout = max(timeouts).total_seconds()
        self.set_timeout(None)
        self.connected = False  # over NCCL
        self._under_way = list[ExchangeTicket]()  # over gloo

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return group

    def _backends(self) -> list[Any]:
        return [self.group._get_backend(torch.device(device)) for device in self.device_types]

    @property
    def has_default_timeout(self) -> bool:
        defaults = constants.default_pg_timeout, constants.default_pg_nccl_timeout
        return timedelta(seconds=self.own_timeout) in defaults

    def set_group_timeout(self, seconds: float) -> None:
        """Make `seconds` the group's own timeout, for torch's later operations too. The world's
        group keeps its own, since the program uses it for other things.
        """
        if self.group is not world_group():
            for backend in self._backends():
                backend._set_default_timeout(timedelta(seconds=seconds))
            self.own_timeout = seconds
        self.set_timeout(seconds)

    def exchange(self, sends: Messages, recvs: Messages) -> Ticket:
        starts = [(dist.isend, *each) for each in sends] + [(dist.irecv, *each) for each in recvs]
        if any(tensor.device.type == "cpu" for _, tensor, _ in starts):
            exchange = ExchangeTicket([_lose], (sends, recvs))
            self._under_way = [*(each for each in self._under_way if each.waits), exchange]
            exchange.waits = [self._start_over_gloo(*each) for each in starts]
            return exchange
        group = self.group
        ops = [dist.P2POp(op, as_bytes(x), group=group, group_peer=peer) for op, x, peer in starts]
        works = dist.batch_isend_irecv(ops) if ops else []
        return ExchangeTicket([work.wait for work in works], (sends, recvs))

    def end_exchanges(self) -> bool:
        try:
            for exchange in self._under_way:
                exchange.wait(_ENDING)
        except RuntimeError:
            return False
        return True

    def gather_equal(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return super().gather_equal(x)
        found = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(found, x, group=self.group)
        return found

    def _start_over_gloo(
        self, start: Callable[..., dist.Work | None], x: Tensor, peer: int
    ) -> Callable[..., object]:
        """Start to send or receive x. Return what waits for it, for the timeout or some seconds."""
        seconds = self.messenger.timeout
        with _name_peer(peer, seconds):
            work = start(as_bytes(x), None, self.group, 0, peer)
        assert work is not None, "this rank is in its group"

        def wait(seconds: float = seconds) -> None:
            # Python raises an interrupt when work.wait has returned. Then gloo would wait in vain
            # for a work that is over. One that failed fails again at once.
            if work.is_completed() and work.is_success():
                return
            with _name_peer(peer, seconds):
                work.wait(timedelta(seconds=seconds))

        return wait

    def connect(self, device: torch.device) -> None:
        """Let NCCL make its communicator, in which it waits for all ranks of the group."""
        if device.type == "cuda" and self.size > 1 and not (self.copy_engines or self.connected):
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
            self.connected = True

    def symmetric_group(self) -> dist.ProcessGroup:
        return self.group

    def disconnect(self) -> None:
        if "cpu" not in self.device_types:
            return
        nothing, peer = torch.empty(1, dtype=torch.uint8), (self.rank + 1) % self.size
        # gloo closes all connections of a group after one wait that takes too long
        with contextlib.suppress(RuntimeError):
            work = dist.irecv(nothing, group=self.group, group_src=peer, tag=_NOTHING)
            assert work is not None, "this rank is in its group"
            work.wait(timedelta(milliseconds=1))


def world_group() -> dist.ProcessGroup:
    """Return the group of all ranks, once torch.distributed is initialised."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    return group


_transports = weakref.WeakKeyDictionary[dist.ProcessGroup, TorchTransport]()
# Two threads that each made a transport would not notice each other in a call.
_finding = threading.Lock()


def torch_transport(group: dist.ProcessGroup) -> TorchTransport:
    """Return the only transport over `group`, which lasts as long as the group exists."""
    with _finding:
        if group not in _transports:
            _transports[group] = TorchTransport(group)
        return _transports[group]
