"""The base of transports between processes, whatever carries their tensors.

Their hosts exchange messages over sockets. GPUs of one host write to each other with copy engines.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from . import Arrivals, Delivery, Messages, Puts, Ticket, Transport
from .copy_engine import CopyEngines
from .cuda_stream import CudaDevice
from .messenger import DEFAULT_TIMEOUT
from .sockets import SocketMessenger, host_name
from .watch import Watch

logger = logging.getLogger("bmt_burst")

EngineUse = Literal["auto", "always", "never"]

_REASON = 400  # characters of a reason that ranks send each other


@dataclass
class ExchangeTicket(Ticket):
    """An exchange under way. `waits` has a function that waits, for some seconds, for each part."""

    waits: list[Callable[..., object]]
    messages: tuple[Messages, ...]  # kept alive until it is over

    def wait(self, *seconds: float) -> None:
        # After a failure, the next call begins with the part that failed: gloo would wait forever
        # for an earlier one, which is over.
        while self.waits:
            self.waits[0](*seconds)
            del self.waits[0]
        self.messages = ()


class ProcessTransport(Transport):
    """A transport between processes.

    engine_use     whether deliveries between GPUs use copy engines. "auto": if all ranks are on one
                   host and can access each other's memory. "always": raise an error if they cannot.
                   "never": deliveries are exchanges.
    own_timeout    seconds of the group's own timeout
    asked_timeout  seconds that `set_timeout` was called with, in place of the group's own, or None
    """

    own_timeout: float = DEFAULT_TIMEOUT

    def __init__(self, store: dist.Store, engine_use: EngineUse = "auto"):
        self.engine_use = engine_use
        self.asked_timeout: float | None = None
        ranks = self.rank, self.size
        self.messenger: SocketMessenger = SocketMessenger(*ranks, store, self.own_timeout)
        self.copy_engines: CopyEngines | None = None

    @property
    def held_bytes(self) -> int:
        return self.copy_engines.arena.numel() if self.copy_engines else 0

    @abstractmethod
    def symmetric_group(self) -> Any:
        """Return the ranks as torch's symmetric memory takes them. All ranks call it."""

    def set_timeout(self, seconds: float | None) -> None:
        self.asked_timeout = seconds
        self.messenger.timeout = self.own_timeout if seconds is None else seconds

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:
        """Prepare for deliveries. Raises RuntimeError on every rank if a rank cannot use copy
        engines although `engine_use` is "always".
        """
        if device.type != "cuda" or self.size == 1 or self.engine_use == "never":
            return
        engines = self.copy_engines or CopyEngines(
            CudaDevice(self.rank, self.size, self.symmetric_group)
        )
        if engines.fits(lane_bytes):
            return
        hosts = sorted({name.decode() for name in self.messenger.gather(host_name())})
        apart = len(hosts) > 1
        reason = f"the ranks are on several hosts, {hosts}" if apart else ""
        for step in engines.growth(lane_bytes):
            reason = reason or self._first_failure(step)
        self.copy_engines = None if reason else engines
        if reason and self.engine_use == "always":
            raise RuntimeError(f"copy engines cannot be used: {reason}")
        if reason:
            self.engine_use = "never"
            level = logging.INFO if apart else logging.WARNING  # NCCL is slower
            logger.log(level, "deliveries use NCCL: copy engines cannot be used: %s", reason)
            return
        logger.info("deliveries use GPUs' copy engines")
        self.start_watch()

    def start_watch(self) -> None:
        """Begin to watch the other ranks, for work that nothing else ends if a rank is gone."""
        if not self.watch:
            self.watch = Watch(self.messenger)

    def mark(self, device: torch.device) -> torch.cuda.Event | None:
        if self.copy_engines and device.type == "cuda":
            return self.copy_engines.device.current().record()
        return None

    def deliver(
        self,
        lane: str,
        nbytes: int,
        sends: Puts,
        arrivals: Arrivals,
        device: torch.device,
        ready: torch.cuda.Event | None = None,
    ) -> Delivery:
        if self.copy_engines and device.type == "cuda":
            delivery = self.copy_engines.deliver(lane, nbytes, sends, arrivals, ready)
        else:
            delivery = super().deliver(lane, nbytes, sends, arrivals, device)
        self.begun += 1  # not if there was no memory to receive into
        return delivery

    def _first_failure(self, attempt: Callable[[], None]) -> str:
        """Attempt something on every rank. Return the first rank's failure or "", on all ranks."""
        failure = ""
        try:
            attempt()
        except Exception as caught:  # noqa: BLE001 - every rank must learn of it, whatever it is
            failure = f"{type(caught).__name__}: {caught}"
        replies = self.messenger.gather(failure.encode("ascii", "replace")[:_REASON])
        failures = (f"rank {r}: {reply.decode()}" for r, reply in enumerate(replies) if reply)
        return next(failures, "")
