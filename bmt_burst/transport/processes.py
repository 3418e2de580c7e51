"""What transports between processes have in common, whatever carries their tensors: quick messages,
quick deliveries.

Ranks of one host exchange messages through memory that they share, and their GPUs deliveries by
copy engines.
"""

from __future__ import annotations

import logging
import os
import platform
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from . import MESSAGE_BYTES, Arrival, Delivery, Put, Transport
from .copy_engine import CopyEngines, CudaStream, Device
from .host_memory import HostMemory, open_host_memory
from .watch import Watch

logger = logging.getLogger("bmt_burst")

_REASON = 400  # characters of a reason that ranks tell each other
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProcessTransport(Transport):
    """A transport between processes.

    patience      seconds that ranks of one host wait for each other's messages, where
                  AGREEMENT_TIMEOUT is less
    copy_engines  whether deliveries between GPUs go by their copy engines: False never, True or an
                  error, None where all ranks are on one host and can reach each other's memory;
                  else they are exchanges
    """

    patience: float = 0.0

    def __init__(self, copy_engines: bool | None = None):
        self.wants_copy_engines = copy_engines
        # shared by these ranks; False if they are on several hosts
        self.host_memory: HostMemory | bool | None = None
        self.copy_engines: CopyEngines | None = None
        self.watch: Watch | None = None  # over deliveries by copy engines
        self.left = False

    @property
    def broken(self) -> bool:
        return self.left or bool(self.host_memory and self.host_memory.broken)

    @abstractmethod
    def _gather_remotely(self, message: bytes) -> list[bytes]:
        """As `gather`, wherever the ranks are."""

    @abstractmethod
    def symmetric_group(self) -> dist.ProcessGroup | str:
        """These ranks, as torch's symmetric memory knows them. All ranks call it."""

    def _gather(self, message: bytes) -> list[bytes]:
        """Others may have read the message of a rank that is interrupted while it waits for theirs:
        so it leaves.
        """
        if self.left and not self.host_memory:
            raise RuntimeError(
                f"rank {self.rank} of the group, this one, gave up; its group is of no use any more"
            )
        try:
            return self._gather_anywhere(message)
        except BaseException as error:
            # where ranks that were late hear of it
            waited = isinstance(error, TimeoutError) and self.host_memory
            if not waited and not self.broken:
                self.leave(f"waiting for the others: {type(error).__name__}".encode())
            raise

    def _gather_anywhere(self, message: bytes) -> list[bytes]:
        if self.host_memory is None:  # sought at the first call
            arguments = self.rank, self.size, MESSAGE_BYTES, self._gather_remotely, self.patience
            self.host_memory = open_host_memory(*arguments) or False
        if self.host_memory:
            return self.host_memory.gather(message)
        return self._gather_remotely(message)

    def give_up(self, words: bytes) -> RuntimeError | None:
        reason = self.host_memory.give_up(words) if self.host_memory else None
        if not self.host_memory or self.host_memory.broken:
            self.leave(words)
        return reason

    def find_lost_rank(self) -> RuntimeError | None:
        return self.host_memory.find_lost_rank() if self.host_memory else None

    def leave(self, words: bytes) -> None:
        self.left = True
        if self.host_memory:
            self.host_memory.leave(words)
        self.disconnect()

    def disconnect(self) -> None:
        """Lets ranks that wait for bytes from this one fail."""

    def note_enqueued(self, doing: str) -> None:
        if self.watch:
            self.watch.note_enqueued(doing)

    @property
    def held_bytes(self) -> int:
        return self.copy_engines.arena_bytes if self.copy_engines else 0

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:
        """Raises RuntimeError on every rank if copy engines were asked for by name and a rank
        cannot use them.
        """
        if device.type != "cuda" or self.size == 1 or self.wants_copy_engines is False:
            return
        engines = self.copy_engines or CopyEngines(self.rank, self.size, self._device())
        if engines.fits(lane_bytes):
            return
        apart, failure = self._several_hosts(), None
        for step in [] if apart else engines.growth(lane_bytes):
            failure = failure or self._first_failure(step)
        reason = apart or failure
        self.copy_engines = None if reason else engines
        if self.copy_engines and self.host_memory and not self.watch:
            self.watch = Watch(self.find_lost_rank, torch.cuda.Event)
        if reason and self.wants_copy_engines:
            raise RuntimeError(f"copy engines cannot be used: {reason}")
        if reason:
            self.wants_copy_engines = False
        if failure:
            logger.warning(
                "deliveries go over NCCL, which is slower: copy engines cannot be used: %s", failure
            )
        else:
            logger.info(
                "deliveries go %s", f"over NCCL: {apart}" if apart else "by the GPUs' copy engines"
            )

    def deliver(
        self,
        lane: str,
        nbytes: int,
        sends: Sequence[Put],
        arrivals: Sequence[Arrival],
        device: torch.device,
    ) -> Delivery:
        if self.copy_engines and device.type == "cuda":
            return self.copy_engines.deliver(lane, nbytes, sends, arrivals)
        return super().deliver(lane, nbytes, sends, arrivals, device)

    def _device(self) -> Device:
        """This rank's current GPU."""
        memory = torch._C._distributed_c10d._SymmetricMemory
        here = torch.device("cuda", torch.cuda.current_device())

        def allocate(nbytes: int) -> Tensor:
            return memory.empty_strided_p2p((nbytes,), (1,), torch.uint8, here)

        def connect(mine: Tensor) -> list[Tensor]:
            from torch.distributed._symmetric_memory import rendezvous

            handle = rendezvous(mine, self.symmetric_group())
            everyone = [
                handle.get_buffer(peer, tuple(mine.shape), torch.uint8) for peer in range(self.size)
            ]
            everyone[self.rank] = mine
            return everyone

        return Device(
            CudaStream,
            lambda: CudaStream(torch.cuda.current_stream()),
            torch.cuda.synchronize,
            allocate,
            connect,
        )

    def _several_hosts(self) -> str | None:
        """A reason if the ranks are on several hosts."""
        hosts = sorted({name.decode() for name in self.gather(host_name())})
        return f"the ranks are on several hosts, {hosts}" if len(hosts) > 1 else None

    def _first_failure(self, attempt: Callable[[], None]) -> str | None:
        """Attempts on every rank; the first rank's failure, alike on all, once all have tried."""
        failure = ""
        try:
            attempt()
        except Exception as caught:  # noqa: BLE001 - every rank must come to know, whatever it is
            failure = f"{type(caught).__name__}: {caught}"
        replies = self.gather(failure.encode("ascii", "replace")[:_REASON])
        return next(
            (f"rank {rank}: {reply.decode()}" for rank, reply in enumerate(replies) if reply), None
        )


def host_name() -> bytes:
    """This machine's name, as NCCL tells hosts apart; at most 300 bytes."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    name = os.environ.get("NCCL_HOSTID") or f"{platform.node()[:200]} {boot}"
    return name.encode("ascii", "replace")[:300]
