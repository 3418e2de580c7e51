"""One rank of a run: it takes steps, and evaluates and saves between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from train.base import ranks
from train.base.folders import lock
from train.base.signals import StopSignal
from train.checkpoints.checkpoint import TOKENIZER
from train.data.batches import Dealer, Work
from train.data.mixture import epochs, source_names, starting_over
from train.loop import resume
from train.loop.building import Kept, make_engine, make_groups
from train.loop.evaluations import Evaluations, EvaluationStopped
from train.loop.inputs import check_same_data, keep_documents_apart, open_inputs
from train.loop.measure import Clock, LossSums, StepWork, count_work, mean_losses, measure_speed
from train.loop.metrics import Metrics, NoMetrics
from train.loop.profiling import Profiler
from train.loop.progress import is_due, learning_rate, optimize
from train.loop.saves import Saves, Stopping, TimeLimit
from train.loop.state import begin, describe_identity, describe_run, make_state
from train.loop.wandb_run import WandbRun, check_installed
from train.registry import load
from train.run.output_folder import check_shared
from train.run.watchdog import Watchdog
from train.settings.config import TrainConfig
from train.settings.facts import parse_steps
from train.settings.kinds import kind_of


class Trainer:
    """One rank of a run.

    fit_memory  returns what is kept from forward to backward, by default what the config says
    warm        compiles kernels before the model is built, and returns lines for the log
    """

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        stop: StopSignal,
        watchdog: Watchdog,
        fit_memory: Callable[[TrainConfig, torch.device], Kept] | None = None,
        warm: Callable[..., list[str]] | None = None,
    ):
        self.config, self.device, self.watchdog = config, device, watchdog
        self.rank, self.root = dist.get_rank(), Path(config.output)
        ranks.together(lambda: check_installed(config.wandb))
        watchdog.alive("opening files and making groups")
        opened = ranks.together(lambda: open_inputs(config, device))
        check_same_data(opened)
        self.lock = ranks.together(lambda: lock(self.root) if self.rank == 0 else None)
        if config.save or config.resume != "never":
            check_shared(self.root)
        ranks.together(lambda: watchdog.write_to(self.root / "stacks"))
        self.sp = ranks.together(lambda: make_groups(config, opened.training))
        self.batches: Dealer[Work] = ranks.together(
            lambda: load(kind_of(opened.model).batches)(config, opened.model, self.sp, device)
        )
        watchdog.alive("choosing a checkpoint")
        path = resume.choose_checkpoint(config)
        self.inputs = ranks.together(lambda: keep_documents_apart(opened, config, path))
        self.sources = source_names(self.inputs.training)
        # before the model takes memory, since each process that compiles needs some
        rows = self.batches.micro_batch_size
        run = config, self.inputs, self.sp, rows, device, watchdog
        self.compiled = warm(*run) if warm else []
        watchdog.alive("building the model")
        kept = fit_memory(config, device) if fit_memory else None
        self.engine = make_engine(config, self.inputs.model, self.sp, device, kept)
        watchdog.alive("reading a checkpoint")
        self.start = ranks.together(lambda: begin(config, self.inputs, self.engine, path))
        self.progress, self.skips = self.start.progress, self.start.skips
        self.batches.skips = self.skips
        self.evaluations = Evaluations(
            config, self.inputs, self.engine, self.batches, self._before_evaluated_batch
        )
        self.clock = Clock(device)
        self.metrics = ranks.together(self._open_metrics)
        self.limit = TimeLimit(config.time_limit)
        saved = config, self.engine, self.inputs.tokenizer, self.progress.step
        self.saves = Saves(*saved, self.limit, watchdog, self.metrics)
        self.stopping = Stopping(stop, config.save, self.saves, self.engine)
        profiled = parse_steps(config.profile, config.steps) if config.profile else range(0)
        self.profiler = Profiler(profiled, self.root / "profile", device, self.metrics.say)

    def _open_metrics(self) -> Metrics | NoMetrics:
        if self.rank:
            return NoMetrics()
        self.inputs.tokenizer.save(self.root / TOKENIZER)
        config, project = self.config, self.config.wandb
        identity = describe_identity(config, self.inputs, self.start.model)
        wandb = WandbRun(project, self.root, identity) if project else None
        return Metrics(self.root, self.progress.step, config.last_step, config.log_every, wandb)

    def run(self) -> bool:
        """Train to the last step, or until the run must stop. Return whether nothing is left to do.
        Raises FloatingPointError on every rank if the last steps were skipped, unless only one.
        """
        try:
            return self._train()
        except Exception as error:
            # what was copied before an error is still saved, unless that needs a rank that is gone
            if not ranks.lost_contact(error):
                self.saves.wait_despite(error)
            raise

    def _train(self) -> bool:
        """Do the work of `run`."""
        config, progress = self.config, self.progress
        described = describe_run(config, self.inputs, self.engine, self.batches, progress.step)
        self.metrics.say(described)
        for line in self.compiled:
            self.metrics.say(line)
        if self.skips.ranges:
            self.metrics.say(f"these sequences of the data are skipped: {self.skips}")
        if progress.step >= config.last_step:
            ends = f", and --stop-after is {config.stop_after}" if not self._is_last() else ""
            done = f"step {progress.step} of {config.steps} is done{ends}"
            self.metrics.say(f"there is nothing to do: {done}")
        stopping = self.stopping.decide()
        if self.evaluations.is_missing(progress.step, self.metrics) and not stopping:
            stopping = not self.evaluations.run(progress.step, self.metrics)
        while progress.step < config.last_step and not stopping:
            stopping = self._train_step()
            self.watchdog.quiet()
            saves = self.stopping.save_wanted or is_due(progress.step, config.save_every)
            if self._is_last() or (saves and not progress.skips_in_a_row):
                self._save()
            if self.evaluations.is_due(progress.step) and not stopping:
                stopping = not self.evaluations.run(progress.step, self.metrics)
            if saves and not stopping:  # the save may have taken long
                stopping = self.stopping.decide()
        if stopping or progress.step == config.stop_after:
            self._save()
        self.profiler.finish(progress.step)
        self.saves.close()
        self.metrics.close()
        if self._is_last() and progress.skips_in_a_row > 1:
            raise FloatingPointError(progress.describe_skips("the run ended", config.lr))
        missing = self.evaluations.is_missing(progress.step, self.metrics)
        return self._is_last() and not missing

    def _is_last(self) -> bool:
        return self.progress.step >= self.config.steps

    def _save(self) -> None:
        """Save this step, unless it is saved already or the run saves nothing."""
        progress, config = self.progress, self.config
        if config.save and progress.step != self.saves.step:
            # while steps are skipped, an older checkpoint may be needed
            keep_last = None if progress.skips_in_a_row else config.keep_last
            state = make_state(config, self.inputs, self.engine, self.start)
            self.saves.save(state, self.engine.state(), keep_last)

    def _train_step(self) -> bool:
        """Take one step. Return whether the run must stop after it."""
        began, config, progress = time.perf_counter(), self.config, self.progress
        self.limit.begin_step()
        self.watchdog.alive(f"reading for step {progress.step + 1}")
        self.profiler.begin(progress.step + 1)
        with self.clock.phase("data"):
            last = progress.step + 1 == config.last_step
            micro_batches = self.batches.of_step(self.inputs.training, progress.samples, last)
            work = count_work(micro_batches, self.sp, self.engine, len(self.sources))
        loss, stops, of_sources = self._compute_gradients(micro_batches, max(work.targets, 1))
        progress.step += 1
        self._take_samples()
        lr = learning_rate(progress.step, config)
        with self.clock.phase("optimizer"):
            outcome = optimize(self.engine, progress, config, loss, lr, self.metrics.say)
        if "loss" in outcome:
            outcome |= mean_losses("loss", self.sources, of_sources, work.by_source)
        phases = self.clock.read()
        seconds = time.perf_counter() - began
        self._record_step({**outcome, "lr": lr}, work, seconds, phases)
        self.profiler.end(progress.step)
        self.limit.end_step()
        self.saves.saver.poll()
        return stops

    def _compute_gradients(
        self, micro_batches: Sequence[Work], targets: float
    ) -> tuple[float, bool, list[float]]:
        """Return the mean loss, after its backward, whether to stop, and each source's losses."""
        sums = LossSums(len(self.sources))
        for batch in micro_batches:
            parts = batch.losses_by_part(self.engine.model)
            for number in range(1, batch.part_count + 1):
                self.watchdog.alive(f"step {self.progress.step + 1}")
                with self.clock.phase("forward"):
                    part = next(parts)
                if not part:
                    continue
                loss, _, *of_rows = part
                with self.clock.phase("backward"):
                    is_last = batch is micro_batches[-1] and number == batch.part_count
                    self.engine.backward(loss / targets, is_last)
                sums.add(batch, *(of_rows or [loss]))
            next(parts, None)  # chunks check the last backward
        mine = sums.read()  # waits for the device
        # one sum over the ranks also tells whether any of them must stop or failed to save
        failed = float(self.saves.saver.failed)
        stops, failures, total, *of_sources = self.stopping.decide_with([failed, *mine])
        if failures:
            self.saves.saver.raise_failure()
        return total / targets, bool(stops), of_sources

    def _take_samples(self) -> None:
        """Count a step's samples. Print skipped sequences, and sources that start over."""
        step, before, skips = self.progress.step, self.progress.samples, self.skips
        after = self.progress.samples = before + self.config.batch_size
        for start, end in skips.passed(before, after):
            self.metrics.say(f"step {step}: skipped sequences {start}:{end} of the data")
        for name in starting_over(self.inputs.training, skips.end(before), skips.end(after)):
            self.metrics.say(f"step {step}: {name} starts over, in a new order")

    def _record_step(
        self, outcome: dict[str, float], work: StepWork, seconds: float, phases: dict[str, float]
    ) -> None:
        """Record the numbers of a step, and print some of them."""
        config, progress = self.config, self.progress
        end = self.skips.end(progress.samples)
        skipped = {"data_skipped": end - progress.samples} if self.skips.ranges else {}
        self.metrics.record(
            progress.step,
            **outcome,
            samples=progress.samples,
            tokens=progress.samples * config.seq_len,
            **epochs(self.inputs.training, end),
            **skipped,
            **work.counts,
            balance=work.balance,
            **measure_speed(config, self.start.model, self.sp, self.device, seconds, work.pairs),
            step_s=seconds,
            **{f"{name}_s": spent for name, spent in phases.items()},
        )
        self.metrics.progress(progress.step)

    def _before_evaluated_batch(self, doing: str) -> None:
        """Give a sign of life. Raises EvaluationStopped on every rank if the run must stop."""
        self.watchdog.alive(f"evaluation after step {self.progress.step}, {doing}")
        self.saves.saver.poll()
        if self.stopping.decide():
            raise EvaluationStopped
