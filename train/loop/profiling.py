"""Traces of some steps (--profile FIRST:LAST), and a table of where their time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from train.base import ranks

_ROWS = 12  # operators in the table
_WIDTH = 60  # characters of a name


class Profiler:
    """A profiler of a range of steps, as many as a run takes. `say` prints a table."""

    def __init__(
        self, steps: range, folder: Path, device: torch.device, say: Callable[[str], None]
    ):
        self._steps, self._folder, self._device, self._say = steps, folder, device, say
        self._profile: profile | None = None
        self._first = 0
        self._seconds: Counter[str] = Counter()  # of the profiled steps, by phase

    def begin(self, step: int) -> None:
        """Start to profile if `step`, which begins, is the first one of the range."""
        if step not in self._steps or self._profile:
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._first, self._profile = step, profile(activities=activities)
        self._seconds.clear()
        self._profile.start()

    def end(self, step: int, seconds: float, phases: Mapping[str, float]) -> None:
        """Note the seconds of `step`, which has ended, and of its phases."""
        if self._profile is not None:
            self._seconds.update({**phases, "other": seconds - sum(phases.values())})
            if step == self._steps[-1]:
                self.finish(step)

    def finish(self, step: int) -> None:
        """Write the trace of the steps up to `step`, if there is one, and print the table."""
        if self._profile is None:
            return
        done, self._profile = self._profile, None
        done.stop()
        name = f"steps_{self._first}-{step}"
        ranks.together(lambda: self._write(done, f"{name}_rank_{ranks.rank():05d}.json.gz"))
        count = step - self._first + 1
        heading = f"profile of steps {self._first} to {step} on rank 0, in ms a step; traces of "
        heading += f"all ranks: {self._folder}/{name}_rank_*.json.gz"
        operators = sum_operators(done.key_averages(), self._device.type == "cuda")
        phases = table("phase", self._seconds, count)
        self._say("\n".join([heading, *phases, "", *table("operator", operators, count)]))

    def _write(self, done: profile, name: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        done.export_chrome_trace(str(self._folder / name))


def sum_operators(events: Any, cuda: bool) -> Mapping[str, float]:
    """Return the seconds of each operator without those that it calls, or of each GPU kernel."""
    seconds: Counter[str] = Counter()
    for event in events:
        if event.is_user_annotation:
            continue
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if cuda and on_gpu:
            seconds[event.key] += event.self_device_time_total / 1e6
        elif not cuda:
            seconds[event.key] += event.self_cpu_time_total / 1e6
    return seconds


def table(heading: str, seconds: Mapping[str, float], steps: int) -> list[str]:
    """Return a table of names, ms a step and shares, the largest first."""
    whole = sum(seconds.values()) or 1.0
    rows = sorted(seconds.items(), key=lambda row: -row[1])
    shown, rest = rows[:_ROWS], rows[_ROWS:]
    if rest:
        shown.append((f"{len(rest)} others", sum(second for _, second in rest)))
    return [f"{heading:<{_WIDTH}}        ms   share"] + [
        f"{name[:_WIDTH]:<{_WIDTH}}{second * 1e3 / steps:>10.2f}{second / whole:>8.1%}"
        for name, second in shown
    ]
