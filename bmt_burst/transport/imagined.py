"""A rank with imagined peers, for measurements and plans.

    ring = ImaginedRing(rank=3, size=8)
    burst_attn_func(q, k, v, causal=True, process_group=ring)

computes and takes memory as a real rank does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import LANES, Arrivals, Delivery, Messages, Puts, Ticket, Transport
from .messenger import Messenger


@dataclass(eq=False, kw_only=True)
class _Imagined(Delivery):
    """An imagined delivery. It keeps the sent tensors as long as a real one does."""

    sends: Puts
    recycled: bool = True

    def wait_for_sends(self) -> None:
        self.sends = ()

    def release(self) -> None:
        self.wait_for_sends()


class _SameMessages(Messenger):
    """Messages of `size` ranks that all send the same."""

    def __init__(self, size: int):
        self.size = size

    def _gather(self, message: bytes) -> list[bytes]:
        return [message] * self.size


class ImaginedRing(Transport):
    """A rank with imagined peers. They answer every message with the same one, and their deliveries
    have arrived at once with any content.

    As with copy engines, deliveries use slots that this rank keeps, `held_bytes`. All ranks must
    own equally many tokens, unless a Layout says how many.

    side  the side that rings send, "q" or "kv", or None if plans choose it
    """

    device_types = frozenset({"cpu", "cuda", "meta"})
    is_imagined = True

    def __init__(self, rank: int, size: int, side: str | None = None):
        self.rank, self.size, self.messenger, self.side = rank, size, _SameMessages(size), side
        self.slots: dict[str, list[Tensor]] = {}

    @property
    def held_bytes(self) -> int:
        return sum(slot.nbytes for slots in self.slots.values() for slot in slots)

    def exchange(self, sends: Messages, recvs: Messages) -> Ticket:
        return Ticket()

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:
        for lane, count in LANES.items():
            held = self.slots[lane][0].nbytes if lane in self.slots else 0
            if lane_bytes[lane] > held:
                shape = (lane_bytes[lane],)
                self.slots[lane] = [
                    torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(count)
                ]

    def deliver(
        self,
        lane: str,
        nbytes: int,
        sends: Puts,
        arrivals: Arrivals,
        device: torch.device,
        ready: Any = None,
    ) -> Delivery:
        slots = self.slots[lane]
        slots.append(slots.pop(0))
        return _Imagined(slots[0][:nbytes], sends=sends)
