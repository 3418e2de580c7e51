"""The decision to stop a run, or to save now. All ranks make it together."""

from __future__ import annotations

from collections.abc import Sequence

from train.base.signals import StopSignal
from train.checkpoints.saver import Saver
from train.engine import Engine
from train.run.metrics import Metrics, NoMetrics
from train.run.time_limit import TimeLimit


class Stopping:
    """The decision of a run that `saves` or not. Every rank must call its methods."""

    def __init__(
        self,
        stop: StopSignal,
        limit: TimeLimit,
        saves: bool,
        saver: Saver,
        engine: Engine,
        metrics: Metrics | NoMetrics,
    ):
        self._stop, self._limit, self._saves = stop, limit, saves
        self._saver, self._engine, self._metrics = saver, engine, metrics
        self.save_wanted = False  # by a rank that does not know how long a save takes

    def decide(self) -> bool:
        """Return whether the run must stop."""
        return bool(self.decide_with([])[0])

    def decide_with(self, values: Sequence[float]) -> list[float]:
        """Return whether to stop, and the sums of `values` over all ranks, by one exchange."""
        limit, writing = self._limit, self._saver.is_writing
        wants_a_save = self._saves and limit.wants_a_save and not writing
        signs = self._stop.received, limit.is_late(writing), wants_a_save
        received, late, wanted, *sums = self._engine.sum([*map(float, signs), *values])
        self.save_wanted = wanted > 0
        if late and not received:
            self._metrics.say(limit.describe())
        return [received + late, *sums]
