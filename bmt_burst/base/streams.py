"""GPUs: CUDA streams, tables that are copied to them from host memory, and capture in a CUDA graph.

A graph replays the GPU's work, and nothing that the host does. Ranks agree on each call over the
host, deliveries count flags that the host numbers, and small tables are copied from host memory. A
replay would repeat old numbers and read memory that may hold something else by then.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

Stream = tuple[int, int, int]  # number, index of the device and type of the device
_CAPTURED = (
    "its mask, bias or layout needs tables that are copied from host memory, which a replay would "
    "read again. One rank alone can capture whole causal or full sequences"
)


def is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(doing: str, why: str) -> None:
    """Raise RuntimeError if the current stream captures a CUDA graph."""
    if is_capturing():
        raise RuntimeError(
            f"expected no capture of a CUDA graph around {doing}, got one: {why}. Capture the "
            "parts of the model between such calls"
        )


def current_stream(device: torch.device) -> Stream | None:
    """Return what identifies the current stream of a device, or None if it has no streams.

    torch.cuda.current_stream takes the host several times as long. Callers keep tables by stream.
    They may drop one before a graph is replayed, so this raises RuntimeError in a capture.
    """
    if device.type != "cuda":
        return None
    refuse_capture("attention with tables", _CAPTURED)
    stream: Stream = torch._C._cuda_getCurrentStream(device.index)
    return stream


def send_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, on its current stream. The host does not wait.

    Raises RuntimeError in a capture.
    """
    if device.type != "cuda":
        return x
    refuse_capture("attention with tables", _CAPTURED)
    return x.pin_memory().to(device, non_blocking=True)


class Flag:
    """A bool of a device that the host reads without waiting for it."""

    def __init__(self, value: Tensor):
        self._value, self._copied = value, None
        if value.is_cuda:
            self._value = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def is_set(self) -> bool | None:
        """Return the value, or None if the device has not computed it yet."""
        return bool(self._value) if self._copied is None or self._copied.query() else None


@functools.cache
def count_processors(device: torch.device, interpreted: int) -> int:
    """Return the multiprocessors of a GPU, or `interpreted` for Triton's interpreter on a CPU."""
    if device.type != "cuda":
        return interpreted
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
