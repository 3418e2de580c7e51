"""The saves of a run, its --time-limit (docs/slurm.md), and the decision to stop or to save now.

The limit counts from the start of the process that started the ranks. The ranks stop together as
soon as one has less time left than it needs, by measured steps and saves.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from train.base.signals import StopSignal, has_agent, has_launcher
from train.checkpoints.saver import Saved, Saver, make_background
from train.data.tokenizer import Tokenizer
from train.engine import Engine, Shard
from train.loop.metrics import Metrics, NoMetrics
from train.run.watchdog import Watchdog
from train.settings.config import TrainConfig
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


class Saves:
    """The saves of a run. `step` is the last one that was saved, or with which the run began. The
    watchdog's last words say where to resume.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        step: int,
        limit: TimeLimit,
        watchdog: Watchdog,
        metrics: Metrics | NoMetrics,
    ):
        self.step, self.limit, self._watchdog, self.metrics = step, limit, watchdog, metrics
        background, is_due = None, 0 < config.save_every < config.last_step
        if config.save and config.save_in_background and is_due:
            background = make_background(engine.state(), engine.device)
        tell = partial(setattr, watchdog, "last_words")
        self.saver = Saver(Path(config.output), tokenizer, tell, self._note, background)

    def save(self, state: dict[str, Any], shards: dict[str, Shard], keep_last: int | None) -> None:
        """Save the step of `state`. The shards may change afterwards."""
        self._watchdog.alive(f"saving step {state['step']}")
        self.saver.save(state, shards, keep_last)
        self.step = state["step"]
        self.metrics.draw()

    def _note(self, saved: Saved) -> None:
        """Print that a checkpoint has become whole, and note its seconds."""
        self.limit.note_save(saved.seconds)
        self.metrics.say(str(saved))

    def wait(self) -> None:
        self._watchdog.alive(f"waiting until step {self.step} is saved")
        self.saver.wait()

    def wait_despite(self, error: Exception) -> None:
        try:
            self.wait()
        except RuntimeError as problem:  # of the save, or of another rank
            self.metrics.say(f"{problem}, after: {error}")

    def close(self) -> None:
        """Wait until the last save is whole, and free its memory."""
        self.wait()
        self.saver.close()


class Stopping:
    """The decision of a run to stop. Every rank must call its methods."""

    def __init__(self, stop: StopSignal, does_save: bool, saves: Saves, engine: Engine):
        self._stop, self._does_save, self._saves, self._engine = stop, does_save, saves, engine
        self.save_wanted = False  # by a rank that does not know how long a save takes

    def decide(self) -> bool:
        """Return whether the run must stop."""
        return bool(self.decide_with([])[0])

    def decide_with(self, values: Sequence[float]) -> list[float]:
        """Return whether to stop, and the sums of `values` over all ranks, by one exchange."""
        limit, writing = self._saves.limit, self._saves.saver.is_writing
        wants_a_save = self._does_save and limit.wants_a_save and not writing
        signs = self._stop.received, limit.is_late(writing), wants_a_save
        received, late, wanted, *sums = self._engine.sum([*map(float, signs), *values])
        self.save_wanted = wanted > 0
        if late and not received:
            self._saves.metrics.say(limit.describe())
        return [received + late, *sums]
