"""The saves of a run, each reported when it is whole, and the decision to stop or to save now."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from train.base.signals import StopSignal
from train.checkpoints.saver import Saver, make_background
from train.data.tokenizer import Tokenizer
from train.engine import Engine, Shard
from train.loop.metrics import Metrics, NoMetrics
from train.loop.time_limit import TimeLimit
from train.run.watchdog import Watchdog
from train.settings.config import TrainConfig


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
        self.saver = Saver(Path(config.output), tokenizer, tell, background)

    def save(self, state: dict[str, Any], shards: dict[str, Shard], keep_last: int | None) -> None:
        """Save the step of `state`. The shards may change afterwards."""
        self._watchdog.alive(f"saving step {state['step']}")
        self.saver.save(state, shards, keep_last)
        self.step = state["step"]
        self.report()
        self.metrics.draw()

    def report(self) -> None:
        """Print which checkpoints have become whole, and note their seconds."""
        for saved in self.saver.take_saved():
            self.limit.note_save(saved.seconds)
            self.metrics.say(str(saved))

    def wait(self) -> None:
        self._watchdog.alive(f"waiting until step {self.step} is saved")
        self.saver.wait()
        self.report()

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
