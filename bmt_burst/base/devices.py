"""Properties of devices."""

from __future__ import annotations

import functools

import torch


@functools.cache
def count_processors(device: torch.device, interpreted: int) -> int:
    """Return the multiprocessors of a GPU, or `interpreted` for Triton's interpreter on a CPU."""
    if device.type != "cuda":
        return interpreted
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
