"""The evaluations of a run: its loss on --val-data, and the tasks of --eval-tasks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import cast

from train.base import ranks
from train.base.wording import remark_few
from train.data.batches import Batches, Dealer, Work
from train.data.folder import Sequences
from train.data.shares import show_sources
from train.engine import Engine
from train.evaluation.tasks import METRICS, Grid, Subject, check_tasks, evaluate
from train.loop.inputs import Inputs
from train.loop.measure import measure_losses
from train.loop.metrics import Metrics, NoMetrics
from train.loop.progress import is_due
from train.settings.config import TrainConfig


class EvaluationStopped(Exception):
    """A run must stop during an evaluation."""


class Evaluations:
    """The evaluations of a run. `alive` is called before each micro-batch, and may stop them."""

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        engine: Engine,
        batches: Dealer[Work],
        alive: Callable[[str], None],
    ):
        self._config, self._inputs = config, inputs
        self._engine, self._batches, self._alive = engine, batches, alive
        self._subject = Subject(
            engine,
            lambda length: cast(Batches, batches),  # only rows of --seq-len are made
            inputs.tokenizer,
            inputs.training.identity.get("bos"),
            {config.seq_len: cast(dict[str, Sequences], inputs.validation)},
            alive,
        )
        self._grid = Grid((config.seq_len,), seed=config.seed)
        ranks.together(lambda: check_tasks(config.evaluation_tasks, self._subject, self._grid))

    @property
    def names(self) -> list[str]:
        """The names of the numbers that an evaluation records."""
        names = ["val_loss"] if self._inputs.validation else []
        return names + [METRICS[task] for task in self._config.evaluation_tasks]

    def is_due(self, step: int) -> bool:
        """Whether the run is evaluated after `step`."""
        config = self._config
        return bool(self.names) and (step >= config.steps or is_due(step, config.eval_every))

    def is_missing(self, step: int, metrics: Metrics | NoMetrics) -> bool:
        """Whether `step` was saved but not evaluated, because the run ended in between."""
        if not step or not self.is_due(step):
            return False
        recorded = all(metrics.has(step, name) for name in self.names)
        return not ranks.gather(recorded)[0]

    def run(self, step: int, metrics: Metrics | NoMetrics) -> bool:
        """Record an evaluation after `step`. Return False if the run must stop meanwhile."""
        try:
            if self._inputs.validation:
                self._measure_loss(step, metrics)
            for task in self._config.evaluation_tasks:
                self._do_task(task, step, metrics)
        except EvaluationStopped:
            metrics.say(f"step {step}: evaluation stopped")
            return False
        return True

    def _measure_loss(self, step: int, metrics: Metrics | NoMetrics) -> None:
        """Record the mean token loss over evenly spaced sequences, of all sources and of each."""
        began, sources = time.perf_counter(), self._inputs.validation
        metrics.say(f"step {step}: evaluating on {show_sources(self._config.val_data)}")
        alive = partial(self._alive, "validation loss")
        found, targets = measure_losses(sources, self._batches, self._engine, alive)
        metrics.record(step, **found)
        mean, *others = (
            f"{name} {value:.4f}{remark_few(targets[name])}" for name, value in found.items()
        )
        losses = ", ".join([mean.replace("val_loss", "validation loss"), *others])
        metrics.say(f"step {step}: {losses}, in {time.perf_counter() - began:.1f} s")

    def _do_task(self, task: str, step: int, metrics: Metrics | NoMetrics) -> None:
        """Record the number of a task of --eval-tasks."""
        began, name = time.perf_counter(), METRICS[task]
        result = evaluate(task, self._subject, self._grid)
        value, by_source = result.value, result.by_source
        found = {name: value, **{f"{name}/{source}": x for source, x in by_source.items()}}
        metrics.record(step, **found)
        seconds = time.perf_counter() - began
        metrics.say(f"step {step}: {name} {value:.4f}{result.remark}, in {seconds:.1f} s")
