"""Traces of some steps (--profile FIRST:LAST), and torch's table of where their time went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from train.base import ranks

_ROWS = 20  # ranges, operators and kernels in the table
_WIDTH = 60  # characters of a name


class Profiler:
    """A profiler of a range of steps, as many as a run takes. `say` prints a table."""

    def __init__(
        self, steps: range, folder: Path, device: torch.device, say: Callable[[str], None]
    ):
        self._steps, self._folder, self._say = steps, folder, say
        self._on_gpu = device.type == "cuda"
        self._profile: profile | None = None
        self._first = 0

    def begin(self, step: int) -> None:
        """Start to profile if `step`, which begins, is the first one of the range."""
        if step not in self._steps or self._profile:
            return
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._on_gpu]
        self._first, self._profile = step, profile(activities=activities)
        self._profile.start()

    def end(self, step: int) -> None:
        """Finish after the last step of the range."""
        if self._profile and step == self._steps[-1]:
            self.finish(step)

    def finish(self, step: int) -> None:
        """Write the trace of the steps up to `step`, if there is one, and print the table."""
        if self._profile is None:
            return
        done, self._profile = self._profile, None
        done.stop()
        name = f"steps_{self._first}-{step}"
        ranks.together(lambda: self._write(done, f"{name}_rank_{ranks.rank():05d}.json.gz"))
        time = "self_cuda_time_total" if self._on_gpu else "self_cpu_time_total"
        table = done.key_averages().table(time, _ROWS, max_name_column_width=_WIDTH)
        self._say(
            f"profile of steps {self._first} to {step} on rank 0; traces of all ranks: "
            f"{self._folder}/{name}_rank_*.json.gz\n{table}"
        )

    def _write(self, done: profile, name: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        done.export_chrome_trace(str(self._folder / name))
