r"""Pretrain a CPM, a CPM-Bee or a CPM-Ant on sequences that are cut over ranks.

    python train/pretrain.py --processes 2 --sp-size 2 --data data/stdlib/train \
        --val-data data/stdlib/val
    torchrun --nnodes 2 --nproc-per-node 8 ... train/pretrain.py --config run.toml
    python train/pretrain.py --processes 8 --stages stages.toml

See --help for all options. On Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 the run finishes
the step, saves a checkpoint, and every rank exits with code 0. --resume auto continues from there
with the same losses as an uninterrupted run. A second Ctrl-C ends the run at once, with code 130.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

# As a script, Python puts this folder first in the path. Put the repository there instead.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from train.base.signals import die_with_parent, has_launcher

    # early, since the parent may die while torch is imported
    die_with_parent(agent_dies=signal.SIGTERM)
    if not has_launcher():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that Ctrl-C prints no traceback

import torch
import torch.distributed as dist
from bmt_burst.strategies.machine import machine_line

from train.base import ranks
from train.base.files import printing
from train.base.lock import lock
from train.base.signals import StopSignal
from train.checkpoints import checkpoint
from train.checkpoints.weights import load_weights
from train.data.batches import Dealer, Work
from train.data.mixture import epochs, source_names, starting_over
from train.planning.dry_run import advise, dry_run
from train.registry import load
from train.run import ending, resume
from train.run.beside import read_beside
from train.run.building import make_engine, make_groups, make_saver
from train.run.clock import Clock
from train.run.config import TrainConfig
from train.run.description import describe_run
from train.run.distributed import init_distributed
from train.run.evaluations import Evaluations, EvaluationStopped
from train.run.inputs import check_same_data, keep_documents_apart, open_inputs
from train.run.kinds import ModelConfig
from train.run.launch import Restarts, launch
from train.run.losses import LossSums, mean_losses
from train.run.measure import count_work, measure_speed
from train.run.metrics import Metrics, NoMetrics
from train.run.output_folder import check_room, check_shared
from train.run.profiling import Profiler
from train.run.progress import Progress, Start
from train.run.replacement import replace_process
from train.run.same_tokenizer import check_folder, check_weights
from train.run.schedule import is_due, learning_rate
from train.run.stages import parse_run
from train.run.time_limit import TimeLimit
from train.run.wandb_run import WandbRun, check_installed
from train.run.watchdog import Watchdog


class Trainer:
    """One rank of a run."""

    def __init__(
        self, config: TrainConfig, device: torch.device, stop: StopSignal, watchdog: Watchdog
    ):
        self.config, self.device, self.stop, self.watchdog = config, device, stop, watchdog
        self.rank, self.root = dist.get_rank(), Path(config.output)
        ranks.together(lambda: check_installed(config.wandb))
        ranks.together(lambda: machine_line(device))  # a wrong file is refused now, not in a save
        watchdog.alive("opening files and making groups")
        opened = ranks.together(lambda: open_inputs(config, device))
        check_same_data(opened)
        self.lock = ranks.together(lambda: lock(self.root) if self.rank == 0 else None)
        if config.needs_shared_output:
            check_shared(self.root)
        ranks.together(lambda: watchdog.write_to(self.root / "stacks"))
        self.sp = ranks.together(lambda: make_groups(config, opened.training))
        self.batches: Dealer[Work] = ranks.together(
            lambda: load(opened.kind.batches)(config, opened.model, self.sp, device)
        )
        watchdog.alive("choosing a checkpoint")
        path = resume.choose_checkpoint(config)
        self.inputs = ranks.together(lambda: keep_documents_apart(opened, config, path))
        self.sources = source_names(self.inputs.training)
        watchdog.alive("building the model")
        self.engine = make_engine(config, self.inputs.model, self.sp, device)
        watchdog.alive("reading a checkpoint")
        start = ranks.together(lambda: self._load(path) if path else self._start())
        self.progress, self.model, self.longest_row = start.progress, start.model, start.longest_row
        self.beside = start.beside
        self.skips = self.batches.skips = start.skips
        self.saved_step = self.progress.step
        self.evaluations = Evaluations(
            config, self.inputs, self.engine, self.batches, self._before_evaluated_batch
        )
        self.clock = Clock(device)
        self.profiler = Profiler(config.profiled_steps, self.root / "profile", device)
        self.metrics = ranks.together(self._open_metrics)
        self.saver = make_saver(config, self.engine, self.inputs.tokenizer, watchdog)
        self.limit, self.save_wanted = TimeLimit(config.time_limit), False

    def _load(self, path: Path) -> Start:
        """Load the checkpoint `path` into the engine."""
        config, inputs, engine = self.config, self.inputs, self.engine
        saved, new_stage = checkpoint.Checkpoint(path), resume.begins_stage(config)
        resume.check_same(
            saved, inputs.model, inputs.training.identity, new_stage, inputs.tokenizer
        )
        check_folder(inputs.folder, path / checkpoint.TOKENIZER, path)
        so_far = {} if new_stage else saved.state
        progress = Progress(
            **{field.name: so_far.get(field.name, 0) for field in dataclasses.fields(Progress)}
        )
        model = resume.keep_length(inputs.model, saved.state)
        skips = resume.choose_skips(config, so_far, progress)
        resume.print_changes(
            saved.state, self._identity(model), config, progress.step + 1, inputs.tokenizer
        )
        engine.load(saved.read, saved.state["optimizer_steps"])
        if saved.state["config"]["dtype"] == config.dtype:
            engine.loss_scale = saved.state.get("loss_scale", engine.loss_scale)
            engine.steps_at_scale = saved.state.get("steps_at_scale", 0)
        if not new_stage:
            resume.keep_machine(saved.state, self.device)
        saved.restore_rng(self.rank)
        inputs.training.restore(so_far.get("reading", {}))
        longest_row = max(config.seq_len, resume.longest_row(saved.state))
        return Start(progress, model, longest_row, saved.state.get("beside"), skips)

    def _start(self) -> Start:
        """Load the weights of --init-from, if it is given."""
        config, inputs, beside = self.config, self.inputs, None
        if source := config.init_from:
            check_weights(
                inputs.folder,
                inputs.tokenizer,
                Path(source),
                config.allow_other_tokenizer,
                config.grow_vocabulary,
            )
            if Path(source).is_dir():
                beside = read_beside(Path(source), inputs.tokenizer, inputs.kind)
            load_weights(source, self.engine, config.expected_weights(), config.seed)
        return Start(Progress(), inputs.model, config.seq_len, beside)

    def _open_metrics(self) -> Metrics | NoMetrics:
        if self.rank:
            return NoMetrics()
        self.inputs.tokenizer.save(self.root / checkpoint.TOKENIZER)
        config, project = self.config, self.config.wandb
        wandb = WandbRun(project, self.root, self._identity(self.model)) if project else None
        return Metrics(self.root, self.progress.step, config.last_step, config.log_every, wandb)

    def run(self) -> bool:
        """Train to the last step, or until the run must stop. Return whether nothing is left to do.

        Raises FloatingPointError on every rank if the run ends with several skipped steps. A single
        skipped step may be due to the loss scale.
        """
        try:
            return self._train()
        except Exception as error:
            # what was copied before an error is still saved, unless it needs a rank that is gone
            if not ranks.lost_contact(error):
                self._save_despite(error)
            raise

    def _train(self) -> bool:
        """Do the work of `run`."""
        config, progress = self.config, self.progress
        described = config, self.model, self.engine, self.sp, self.inputs, self.batches
        self._say(describe_run(*described, progress.step))
        if self.skips.ranges:
            self._say(f"these sequences of the data are skipped: {self.skips}")
        if progress.step >= config.last_step:
            self._say(self._describe_end())
        stopping = self._is_stopping()
        if self.evaluations.is_missing(progress.step, self.metrics) and not stopping:
            stopping = not self._evaluate()
        while progress.step < config.last_step and not stopping:
            stopping = self._train_step()
            saves = self.save_wanted or is_due(progress.step, config.save_every)
            if self._is_last() or (saves and not progress.skips_in_a_row):
                self._save()
            if self.evaluations.is_due(progress.step) and not stopping:
                stopping = not self._evaluate()
            if saves and not stopping:  # it may have taken long
                stopping = self._is_stopping()
        if stopping or progress.step == config.stop_after:
            self._save()
        self._say_profile(self.profiler.finish(progress.step))
        self._wait_for_save()
        self.saver.close()
        self.metrics.close()
        if self._is_last() and progress.skips_in_a_row > 1:
            raise FloatingPointError(progress.describe_skips("the run ended", config.lr))
        missing = self.evaluations.is_missing(progress.step, self.metrics)
        return self._is_last() and not missing

    def _evaluate(self) -> bool:
        return self.evaluations.run(self.progress.step, self.metrics)

    def _is_last(self) -> bool:
        return self.progress.step >= self.config.steps

    def _describe_end(self) -> str:
        """Return why no step is left."""
        step, config = self.progress.step, self.config
        said = f"there is nothing to do: step {step} of {config.steps} is done"
        if step < config.steps:
            said += f", and --stop-after is {config.stop_after}"
        return said

    def _is_stopping(self) -> bool:
        """Whether the run must stop. Every rank must call this function."""
        return self._decide(*self.engine.sum(self._signs()))

    def _signs(self) -> list[float]:
        """Return whether this rank received a signal to stop, whether it is late for --time-limit,
        and whether it wants to know how long a save takes.
        """
        limit = self.limit
        writing = self.saver.is_writing
        wants_a_save = self.config.save and limit.wants_a_save and not writing
        return [float(self.stop.received), float(limit.is_late(writing)), float(wants_a_save)]

    def _decide(self, received: float, late: float, wants_a_save: float) -> bool:
        """Return whether the run must stop, given the numbers of ranks with each of the signs."""
        self.save_wanted = wants_a_save > 0
        if late and not received:
            self._say(self.limit.describe())
        return received + late > 0

    def _save(self) -> None:
        """Save this step, unless it is saved already or the run saves nothing."""
        step = self.progress.step
        if not self.config.save or step == self.saved_step:
            return
        self.watchdog.alive(f"saving step {step}")
        # while steps are skipped, an older checkpoint may be needed
        keep_last = None if self.progress.skips_in_a_row else self.config.keep_last
        self.saver.save(self._state(), self.engine.state(), keep_last)
        self.saved_step = step
        self._say_saved()
        self.metrics.draw()

    def _wait_for_save(self) -> None:
        self.watchdog.alive(f"waiting until step {self.saved_step} is saved")
        self.saver.wait()
        self._say_saved()

    def _save_despite(self, error: Exception) -> None:
        try:
            self._wait_for_save()
        except RuntimeError as problem:  # of the save, or of another rank
            self._say(f"{problem}, after: {error}")

    def _say_saved(self) -> None:
        for saved in self.saver.take_saved():
            self.limit.note_save(saved.seconds)
            self._say(str(saved))

    def _train_step(self) -> bool:
        """Do one step. Return whether the run must stop after it."""
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
            outcome = self._optimize(loss, lr)
        if "loss" in outcome:
            outcome |= mean_losses("loss", self.sources, of_sources, work.by_source)
        phases = self.clock.read()
        seconds = time.perf_counter() - began
        speed = measure_speed(config, self.model, self.sp, self.device, seconds, work.pairs)
        split = {f"{name}_s": seconds for name, seconds in phases.items()}
        read = {"samples": progress.samples, "tokens": progress.samples * config.seq_len}
        past = epochs(self.inputs.training, self.skips.end(progress.samples))
        if self.skips.ranges:
            past["data_skipped"] = self.skips.end(progress.samples) - progress.samples
        counts = {**work.counts, "balance": work.balance}
        self._record(**outcome, lr=lr, **read, **past, **counts, **speed, step_s=seconds, **split)
        self.metrics.progress(progress.step)
        self._say_profile(self.profiler.end(progress.step, seconds, phases))
        self.limit.end_step()
        self._say_saved()
        return stops

    def _say_profile(self, table: str | None) -> None:
        if table:
            self._say(table)

    def _take_samples(self) -> None:
        """Count the samples of a step. Say which sequences it skipped, and which sources start over
        for the first time.
        """
        step, before, skips = self.progress.step, self.progress.samples, self.skips
        after = self.progress.samples = before + self.config.batch_size
        for start, end in skips.passed(before, after):
            self._say(f"step {step}: skipped sequences {start}:{end} of the data")
        for name in starting_over(self.inputs.training, skips.end(before), skips.end(after)):
            self._say(f"step {step}: {name} starts over, in a new order")

    def _compute_gradients(
        self, micro_batches: Sequence[Work], targets: float
    ) -> tuple[float, bool, list[float]]:
        """Compute the gradients of the mean loss over `targets` targets of all ranks. Return that
        loss, whether the run must stop, and the summed losses of each source.
        """
        sums = LossSums(len(self.sources))
        for batch in micro_batches:
            self.watchdog.alive(f"step {self.progress.step + 1}")
            with self.clock.phase("forward"):
                loss, _ = batch.losses(self.engine.model)
            with self.clock.phase("backward"):
                self.engine.backward(loss.sum() / targets)
            sums.add(batch, loss)
        mine = sums.read()  # waits for the device
        received, late, wants_a_save, failures, total, *of_sources = self.engine.sum(
            [*self._signs(), float(self.saver.failed), *mine]
        )
        if failures:
            self.saver.raise_failure()
        return total / targets, self._decide(received, late, wants_a_save), of_sources

    def _optimize(self, loss: float, lr: float) -> dict[str, float]:
        """Do an optimizer step, unless loss or gradients are not finite. Return values for the
        record.

        Raises FloatingPointError on every rank if too many steps in a row were skipped.
        """
        try:
            if not math.isfinite(loss):
                self.engine.clear_gradients()
                raise FloatingPointError(f"the loss is {loss}")
            grad_norm = self.engine.step(lr, self.config.clip)
        except FloatingPointError as error:
            self.progress.skipped += 1
            self.progress.skips_in_a_row += 1
            self._say(
                f"step {self.progress.step}: skipped, {error}; {self.progress.skips_in_a_row} in "
                f"a row"
            )
            if self.progress.skips_in_a_row >= self.config.max_skips:
                raise FloatingPointError(
                    self.progress.describe_skips(str(error), self.config.lr)
                ) from error
            return {"skipped": self.progress.skipped}
        self.progress.skips_in_a_row = 0
        return {"loss": loss, "grad_norm": grad_norm}

    def _before_evaluated_batch(self, doing: str) -> None:
        """Give a sign of life. Raises EvaluationStopped on every rank if the run must stop."""
        self.watchdog.alive(f"evaluation after step {self.progress.step}, {doing}")
        self._say_saved()
        if self._is_stopping():
            raise EvaluationStopped

    def _state(self) -> dict[str, Any]:
        """Return the state of a checkpoint."""
        return {
            **dataclasses.asdict(self.progress),
            "optimizer_steps": self.engine.optimizer_steps,
            "loss_scale": self.engine.loss_scale,
            "steps_at_scale": self.engine.steps_at_scale,
            "longest_row": self.longest_row,
            "beside": self.beside,
            "machine": machine_line(self.device),
            "reading": self.inputs.training.state(self.skips.end(self.progress.samples)),
            "skip_data": list(self.skips.ranges),
            **self._identity(self.model),
        }

    def _identity(self, model: ModelConfig) -> dict[str, Any]:
        """Return the part of a checkpoint's state that identifies its run."""
        return {
            "data": self.inputs.training.identity,
            "model": model.to_dict(),
            "config": self.config.to_dict(),
        }

    def _record(self, **values: float) -> None:
        self.metrics.record(self.progress.step, **values)

    def _say(self, text: str) -> None:
        self.metrics.say(text)


def main(argv: Sequence[str]) -> int:
    if "--dry-run" in argv:
        return dry_run(argv)
    config, stages = parse_run(argv)
    if (config.processes > 1 or config.restarts) and "RANK" not in os.environ:
        root = Path(config.output)
        outlook = stages.outlook if stages else partial(checkpoint.outlook, root)
        restarts = Restarts(config.restarts, None if stages else root)
        return launch([__file__, *argv], config.processes, outlook, restarts)
    # reuse compiled kernels in the next run
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    watchdog = Watchdog(ranks.rank(), config.timeout)
    stop = StopSignal(ending.acknowledge, lambda: ending.end_now(watchdog))
    try:
        watchdog.alive("waiting for the other ranks to join")
        device = init_distributed(config)
        if stages:
            stages.check(device)
            watchdog.program = stages.program
        later = [stage.config for stage in stages.later] if stages else []
        trainer = Trainer(config, device, stop, watchdog)
        check_room(trainer.engine, trainer.progress.step, config, *later)
        finished = _train(trainer)
        stopping = stop.received or trainer.limit.is_late()
        variables = stages.leave(finished, stopping) if stages else None
        watchdog.alive("leaving the other ranks")
        dist.destroy_process_group()
    except Exception as error:
        code = ending.explain(error, watchdog, watchdog.program, partial(advise, config))
        if code is None:
            raise
        return code
    finally:
        watchdog.close()
    if variables is not None:
        replace_process([__file__, *argv], variables, stop)
    return 0


def _train(trainer: Trainer) -> bool:
    """Train on this rank to the last step, or until the run must stop. Return whether nothing is
    left to do.
    """
    config = trainer.config
    finished = trainer.run()
    if trainer.rank == 0 and not finished:
        step, how = trainer.progress.step, "to resume, run the same command with --resume auto"
        if config.stop_after is not None and step >= config.stop_after:
            how += " and without --stop-after, or with a later step"
        with printing():
            print(f"stopped after step {step}; {how if config.save else 'nothing was saved'}")
    return finished


if __name__ == "__main__":
    try:
        ending.leave(main(sys.argv[1:]))
    except SystemExit as given:  # argparse has printed the reason
        ending.leave(given.code if isinstance(given.code, int) else 1)
    except BaseException:  # noqa: BLE001 - every process ends by `leave`
        traceback.print_exc()
        ending.leave(1)
