"""The end of a run before its --time-limit, with time to save (docs/slurm.md).

The limit counts from the start of the process that started the ranks. The ranks stop together as
soon as one has less time left than it needs, by measured steps and saves.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from pathlib import Path

from train.base.signals import has_agent, has_launcher
from train.settings.facts import parse_duration

_KEPT = 16  # steps and saves of which the longest counts
_STEPS = 2  # the rest of one, and another one, until the ranks decide again
_SLOWER = 1.25  # the next save, relative to the longest one
_LEAVING = 5.0  # seconds in which the ranks leave each other and their processes end


def running_time() -> float:
    """Return the seconds since the launcher of this rank, or this process, was started."""
    pid = os.getppid() if has_agent() or has_launcher() else os.getpid()
    # the command's name, in parentheses, may have spaces
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


class TimeLimit:
    """The --time-limit of a run, or none. `save_s` has the seconds of the longest recent save."""

    def __init__(self, text: str | None):
        self.text, self.save_s = text, 0.0
        self._end = math.inf
        if text is not None:
            self._end = time.monotonic() + parse_duration(text) - running_time()
            self._half = self._end - parse_duration(text) / 2
        self._steps, self._saves = (deque[float](maxlen=_KEPT) for _ in range(2))
        self._step_began: float | None = None

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def begin_step(self) -> None:
        self._step_began = time.monotonic()

    def end_step(self) -> None:
        assert self._step_began is not None
        self._steps.append(time.monotonic() - self._step_began)
        self._step_began = None

    def note_save(self, seconds: float) -> None:
        self._saves.append(seconds)
        self.save_s = max(self._saves)

    def is_late(self, writing: bool = False) -> bool:
        """Whether to stop now, to save in time. A save that is `writing` also takes time."""
        if self.text is None:
            return False
        now = 0.0 if self._step_began is None else time.monotonic() - self._step_began
        step = max(now, *self._steps, 0.0)
        saves = (1 + writing) * self.save_s
        return self.left < _STEPS * step + _SLOWER * saves + _LEAVING

    @property
    def wants_a_save(self) -> bool:
        """Whether half of the time is over, and it is not known yet how long a save takes."""
        return self.text is not None and not self._saves and time.monotonic() > self._half

    def describe(self) -> str:
        """Return why the run stops."""
        save = f"a save takes {self.save_s:.0f} s" if self._saves else "no save was measured"
        return f"stopping: {max(self.left, 0.0):.0f} s of --time-limit {self.text} are left, {save}"
