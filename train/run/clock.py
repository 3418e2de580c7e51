"""A clock that splits the time of a step into phases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Seconds by phase. On GPUs events measure them, and nothing waits until `read`."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._mark()
        with torch.profiler.record_function(name):
            yield
        self._marks[name].append((start, self._mark()))

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        if self._cuda:
            torch.cuda.synchronize()
        seconds = {
            name: sum(self._seconds(*pair) for pair in pairs) for name, pairs in self._marks.items()
        }
        self._marks.clear()
        return seconds

    def _mark(self) -> Any:
        """Return the present time: seconds, or a CUDA event."""
        if not self._cuda:
            return time.perf_counter()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def _seconds(self, start: Any, stop: Any) -> float:
        return start.elapsed_time(stop) / 1e3 if self._cuda else stop - start
