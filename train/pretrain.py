r"""Pretrain a CPM, a CPM-Bee or a CPM-Ant on sequences that are cut over ranks.

    python train/pretrain.py --processes 2 --sp-size 2 --data data/stdlib/train \
        --val-data data/stdlib/val
    torchrun --nnodes 2 --nproc-per-node 8 ... train/pretrain.py --config run.toml

See --help for all options. On Ctrl-C, SIGTERM or SIGHUP the run finishes the step, saves a
checkpoint, and every rank exits with code 0. --resume auto continues from there with the same
losses as an uninterrupted run. A second Ctrl-C ends the run at once, with code 130.
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
from dataclasses import dataclass
from pathlib import Path

# As a script, Python puts this folder first in the path. Put the repository there instead.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from train.base.signals import die_with_parent, has_launcher

    die_with_parent()  # early, since the parent may die while torch is imported
    if not has_launcher():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that Ctrl-C prints no traceback

import torch
import torch.distributed as dist

from bmt_burst import SequenceParallel, init_sequence_parallel, kernels
from bmt_burst.loss import count_targets
from bmt_burst.ranks.rings import make_rings
from bmt_burst.spec import Spec
from bmt_burst.transport.bmtrain import initialized_bmtrain
from models.config import CPMConfig
from train.base import ranks
from train.base.files import printing
from train.base.lock import lock
from train.base.signals import StopSignal
from train.base.wording import counted
from train.checkpoints import checkpoint
from train.checkpoints.weights import load_weights
from train.data.batches import Data, Work
from train.data.tokenizer import load_tokenizer
from train.engine import Engine
from train.engine.common import AdamW
from train.registry import load
from train.run import ending, resume
from train.run.clock import Clock
from train.run.config import TrainConfig, parse_config
from train.run.distributed import init_distributed, rank_timeout
from train.run.flops import peak_tflops, step_flops
from train.run.kinds import kind_of
from train.run.launch import launch
from train.run.metrics import Metrics
from train.run.same_tokenizer import check_folder, check_weights
from train.run.schedule import learning_rate
from train.run.watchdog import Watchdog

_MOST_PADDING, _MUCH_PADDING = 0.5, 0.1  # share of padding that is refused, and reported
_CALMER = (
    "give a smaller --lr than {:g}; if the last good checkpoint still explodes, resume from an "
    "earlier one"
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Progress:
    """The progress of a run: steps, samples read, skipped steps (their loss or gradients were not
    finite), and skipped steps in a row up to now.
    """

    step: int = 0
    samples: int = 0
    skipped: int = 0
    skips_in_a_row: int = 0


class Trainer:
    """One rank of a run."""

    def __init__(
        self, config: TrainConfig, device: torch.device, stop: StopSignal, watchdog: Watchdog
    ):
        self.config, self.device, self.stop, self.watchdog = config, device, stop, watchdog
        self.rank, self.root = dist.get_rank(), Path(config.output)
        self.longest_row = config.seq_len
        watchdog.alive("opening files and making groups")
        ranks.together(self._check_and_open)
        ranks.together(lambda: watchdog.write_to(self.root / "stacks"))
        self.sp = ranks.together(self._make_groups)
        self.batches = ranks.together(
            lambda: load(self.kind.batches)(config, self.model_config, self.sp, device)
        )
        watchdog.alive("choosing a checkpoint")
        path = resume.choose_checkpoint(config)
        ranks.together(lambda: self._keep_documents_apart(path))
        watchdog.alive("building the model")
        self.engine = self._make_engine()
        watchdog.alive("reading a checkpoint")
        self.progress = ranks.together(lambda: self._load(path) if path else self._start())
        self.saved_step = self.progress.step
        self.clock = Clock(device)
        self.metrics = ranks.together(self._open_metrics)
        self._set_last_words()

    def _make_groups(self) -> SequenceParallel:
        config, world = self.config, dist.get_world_size()
        if world % config.sp_size:
            raise ValueError(
                f"--sp-size {config.sp_size} does not divide the world of {counted(world, 'rank')}"
            )
        sp = init_sequence_parallel(
            config.sp_size,
            layout="zigzag" if config.layout == "auto" else config.layout,
            # ulysses takes one group, on any hosts
            inner_size=1 if config.strategy == "ulysses" else config.inner_size,
            ulysses_size=config.ulysses_size,
            timeout=rank_timeout(config),
        )
        group_size = make_rings(sp.process_group, sp.double_group).inner.size
        config.check_strategy(group_size, self.train_data.example_scores)
        return sp

    def _make_engine(self) -> Engine:
        config = self.config
        common = {
            "build": lambda: load(self.kind.model)(
                self.model_config, self.sp, config.saving(), **config.attention
            ),
            "dtype": DTYPES[config.dtype],
            "seed": config.seed,
            "adamw": AdamW(betas=(config.beta1, config.beta2), weight_decay=config.weight_decay),
        }
        if initialized_bmtrain():
            from train.engine.bmtrain import BMTrainEngine

            return BMTrainEngine(**common, offload=config.offload_optimizer)
        # imported late: it takes seconds, which the launcher and refused runs need not spend
        from train.engine.torch import TorchEngine

        return TorchEngine(**common, device=self.device)

    def run(self) -> bool:
        """Train to the last step, or until told to stop. Return whether nothing is left to do.

        Raises FloatingPointError on every rank if the run ends with several skipped steps. A single
        skipped step may be due to the loss scale.
        """
        config, progress = self.config, self.progress
        self._say(self._description())
        if progress.step >= config.steps:
            self._say(f"there is nothing to do: step {progress.step} of {config.steps} is done")
        stopping = self._told_to_stop()
        if self._evaluation_missing() and not stopping:
            stopping = not self._evaluate()
        while progress.step < config.steps and not stopping:
            stopping = self._train_step()
            if self._is_last() or (
                _due(progress.step, config.save_every) and not progress.skips_in_a_row
            ):
                self._save()
            if self._evaluation_due() and not stopping:
                stopping = not self._evaluate()
        if stopping:
            self._save()
        if self.metrics:
            self.metrics.close()
        if self._is_last() and progress.skips_in_a_row > 1:
            raise FloatingPointError(self._skipped("the run ended"))
        return self._is_last() and not self._evaluation_missing()

    def _is_last(self) -> bool:
        return self.progress.step >= self.config.steps

    def _told_to_stop(self) -> bool:
        """Whether any rank was told to stop."""
        return self.engine.sum([float(self.stop.received)])[0] > 0

    def _save(self) -> None:
        """Save this step, unless it is saved already or the run saves nothing."""
        step = self.progress.step
        if not self.config.save or step == self.saved_step:
            return
        self.watchdog.alive(f"saving step {step}")
        # while steps are skipped, an older checkpoint may be needed
        keep_last = None if self.progress.skips_in_a_row else self.config.keep_last
        path = checkpoint.save(
            self.root, self._state(), self.engine.state(), keep_last, self.tokenizer
        )
        self.saved_step = step
        self._say(f"step {step}: saved {path}")
        self._set_last_words()
        if self.metrics:
            self.metrics.draw()

    def _set_last_words(self) -> None:
        self.watchdog.last_words = ranks.gather(
            checkpoint.outlook(self.root) if self.rank == 0 else ""
        )[0]

    def _train_step(self) -> bool:
        """Do one step. Return whether any rank was told to stop."""
        began, config, progress = time.perf_counter(), self.config, self.progress
        self.watchdog.alive(f"reading for step {progress.step + 1}")
        with self.clock.phase("data"):
            last = progress.step + 1 == config.steps
            micro_batches = self.batches.of_step(self.train_data, progress.samples, last)
            targets, pairs, work = self._count(micro_batches)
        losses = []
        for batch in micro_batches:
            self.watchdog.alive(f"step {progress.step + 1}")
            with self.clock.phase("forward"):
                loss, _ = batch.losses(self.engine.model)
            with self.clock.phase("backward"):
                self.engine.backward(loss / max(targets, 1))
            losses.append(loss.detach())
        loss, stops = self.engine.sum(
            [float(torch.stack(losses).double().sum()), float(self.stop.received)]
        )
        loss /= max(targets, 1)
        progress.step += 1
        progress.samples += config.batch_size
        lr = learning_rate(progress.step, config)
        with self.clock.phase("optimizer"):
            outcome = self._optimize(loss, lr)
        phases = self.clock.read()
        seconds = time.perf_counter() - began
        speed = self._speed(seconds, pairs)
        split = {f"{name}_s": seconds for name, seconds in phases.items()}
        read = {"samples": progress.samples, "tokens": progress.samples * config.seq_len}
        self._record(**outcome, lr=lr, **read, **work, **speed, step_s=seconds, **split)
        if self.metrics:
            self.metrics.progress(progress.step)
        return stops > 0

    def _count(self, micro_batches: Sequence[Work]) -> tuple[float, float, dict[str, float]]:
        """Return targets and visible pairs of a step, over all ranks, and its work for the record.

        The balance is the most work of a rank, in pairs, relative to the mean of all ranks. A group
        waits for its slowest rank in each micro-batch. At the end of the step all groups wait for
        the slowest group.
        """
        slowest = [0.0] * self.batches.dp_size
        names = list(micro_batches[0].counts)
        pairs, counts = 0, [0] * len(names)
        if self.sp.rank == 0:  # the other ranks of a group have the same numbers
            slowest[self.batches.dp_rank] = sum(max(batch.work) for batch in micro_batches)
            pairs = sum(sum(batch.work) for batch in micro_batches)
            counts = [sum(batch.counts[name] for batch in micro_batches) for name in names]
        mine = sum(int(count_targets(batch.labels)) for batch in micro_batches)
        targets, pairs, *sums = self.engine.sum([mine, pairs, *counts, *slowest])
        counts, slowest = map(int, sums[: len(names)]), sums[len(names) :]
        work = dict(zip(names, counts, strict=True))
        return targets, pairs, work | {"balance": max(slowest) * dist.get_world_size() / pairs}

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
                raise FloatingPointError(self._skipped(str(error))) from error
            return {"skipped": self.progress.skipped}
        self.progress.skips_in_a_row = 0
        return {"loss": loss, "grad_norm": grad_norm}

    def _skipped(self, what: str) -> str:
        skipped = counted(
            self.progress.skips_in_a_row, "step in a row was skipped", "steps in a row were skipped"
        )
        return f"step {self.progress.step}: {what}; {skipped}: {_CALMER.format(self.config.lr)}"

    def _speed(self, seconds: float, pairs: float) -> dict[str, float]:
        """Return tokens per second over all ranks, TFLOP/s and MFU of a rank, and peak memory."""
        config = self.config
        tokens = config.batch_size * config.seq_len
        tflops = (
            step_flops(self.model_config, tokens, pairs) / dist.get_world_size() / seconds / 1e12
        )
        values = {"tokens_per_s": tokens / seconds, "tflops_per_rank": tflops}
        if peak := peak_tflops(self.device, DTYPES[config.dtype]):
            values["mfu"] = tflops / peak
        if self.device.type == "cuda":
            # torch does not count the memory of the rings
            held = make_rings(self.sp.process_group, self.sp.double_group).inner.held_bytes
            values["peak_gib"] = (torch.cuda.max_memory_allocated() + held) / 2**30
        return values

    def _evaluation_due(self) -> bool:
        return self.val_data is not None and (
            self._is_last() or _due(self.progress.step, self.config.eval_every)
        )

    def _evaluation_missing(self) -> bool:
        """Whether the current step was saved but not evaluated, because the run ended in
        between.
        """
        if not self.progress.step or not self._evaluation_due():
            return False
        return not ranks.gather(self.metrics and self.metrics.has(self.progress.step, "val_loss"))[
            0
        ]

    @torch.no_grad()
    def _evaluate(self) -> bool:
        """Record the mean token loss over evenly spaced sequences. Return False if told to stop
        meanwhile.
        """
        began, step, batches = time.perf_counter(), self.progress.step, self.batches
        self._say(f"step {step}: evaluating on {self.config.val_data}")
        loss = targets = 0.0
        for batch in batches.of_evaluation(self.val_data):
            self.watchdog.alive(f"evaluation after step {step}")
            if self._told_to_stop():
                self._say(f"step {step}: evaluation stopped")
                return False
            batch_loss, batch_targets = batch.losses(self.engine.model)
            loss, targets = loss + float(batch_loss), targets + float(batch_targets)
        loss, targets = self.engine.sum([loss, targets])
        mean = loss / targets if targets else math.nan
        self._record(val_loss=mean)
        self._say(
            f"step {step}: validation loss {mean:.4f}, in {time.perf_counter() - began:.1f} s"
        )
        return True

    def _check_and_open(self) -> None:
        """Do the part of the setup that needs no other rank: the model's shape, its kernel, and the
        data. Rank 0 also locks the output.
        """
        config = self.config
        self.model_config = config.model_config()
        self.kind = kind_of(self.model_config)
        self._check_length()
        self._check_kernel()
        self.train_data = self._open(config.data)
        self.val_data = self._open_validation(config.val_data) if config.val_data else None
        self.tokenizer = load_tokenizer(self.train_data.file.folder)
        self.lock = lock(self.root) if self.rank == 0 else None

    def _open_metrics(self) -> Metrics | None:
        if self.rank:
            return None
        self.tokenizer.save(self.root / checkpoint.TOKENIZER)
        return Metrics(self.root, self.progress.step, self.config.steps, self.config.log_every)

    def _open(self, folder: str) -> Data:
        data = load(self.kind.data).open(
            folder, self.model_config, self.config.seq_len, self.config.seed
        )
        if (kinds := data.file.index["vocab_size"]) > self.model_config.vocab_size:
            known = self.model_config.vocab_size
            raise ValueError(
                f"{folder} has {kinds} kinds of tokens, but --model {self.config.model} has only "
                f"{known}"
            )
        return data

    def _open_validation(self, folder: str) -> Data:
        """Open validation data. Raises ValueError if its tokenizer is not the training data's. Warn
        if both are one folder.
        """
        data, trained = self._open(folder), self.train_data.file.folder
        if data.file.folder.samefile(trained) and self.rank == 0:
            same = f"--val-data and --data are the same folder, {trained}"
            print(f"{same}: the validation loss will be measured on training text", file=sys.stderr)
        check_folder(trained, data.file.folder, data.file.folder)
        return data

    def _keep_documents_apart(self, path: Path | None) -> None:
        """Choose whether documents are kept apart, and their begin token. `path` is the checkpoint
        to resume from.

        Raises ValueError if the starts of documents are not known, if the begin token is unknown,
        or if most positions would be padding.
        """
        file = self.train_data.file
        apart = resume.choose_documents(self.config, path, file.documents is not None)
        bos = resume.choose_begin_token(self.config, path, apart, file, self.tokenizer)
        self.train_data = self.train_data.keep_documents_apart(apart, bos)
        if self.val_data:
            self.val_data = self.val_data.keep_documents_apart(apart, bos)
        self._check_padding()

    def _check_padding(self) -> None:
        """Raise ValueError if most of the training positions are padding. Warn if many are."""
        padding, text = self.train_data.padding, self.config.data
        tokens = len(self.train_data.file.tokens)
        said = f"{padding:.0%} of the positions of {text} ({tokens:,} tokens) are padding"
        if padding > _MOST_PADDING:
            raise ValueError(
                f"{said} at --seq-len {self.config.seq_len}: give more text or a shorter one"
            )
        if padding > _MUCH_PADDING and self.rank == 0:
            print(f"{said} at --seq-len {self.config.seq_len}", file=sys.stderr)

    def _check_length(self) -> None:
        """Warn if rows are longer than the sequences that the model was made for."""
        model, seq_len = self.model_config, self.config.seq_len
        longest = model.longest_sequence if isinstance(model, CPMConfig) else None
        if longest and seq_len > longest and self.rank == 0:
            print(
                f"--seq-len {seq_len:,} is beyond the {longest:,} tokens that the model was made "
                "for: see --rope-theta and --rope-scaling",
                file=sys.stderr,
            )

    def _check_kernel(self) -> None:
        """Raise ValueError if --flash names a kernel that cannot compute this model's heads
        here.
        """
        model, like = self.model_config, {"dtype": DTYPES[self.config.dtype], "device": self.device}
        q = torch.empty(1, 1, model.num_heads, model.head_dim, **like)
        k = torch.empty(1, 1, model.num_kv_heads, model.head_dim, **like)
        try:
            kernels.pick(
                self.config.flash, q, k, Spec(model.head_dim**-0.5, self.config.deterministic)
            )
        except ValueError as error:
            raise ValueError(f"--flash {self.config.flash}: {error}") from error

    def _load(self, path: Path) -> Progress:
        saved, new_stage = checkpoint.Checkpoint(path), resume.begins_stage(self.config)
        resume.check_same(
            saved, self.model_config, self.train_data.identity, new_stage, self.tokenizer
        )
        check_folder(self.train_data.file.folder, path / checkpoint.TOKENIZER, path)
        counted = {} if new_stage else saved.state
        progress = Progress(
            **{field.name: counted.get(field.name, 0) for field in dataclasses.fields(Progress)}
        )
        self.model_config = resume.keep_length(self.model_config, saved.state)
        self.longest_row = max(self.longest_row, resume.longest_row(saved.state))
        resume.print_changes(
            saved.state, self._identity(), self.config, progress.step + 1, self.tokenizer
        )
        self.engine.load(saved.read, saved.state["optimizer_steps"])
        if saved.state["config"]["dtype"] == self.config.dtype:
            self.engine.loss_scale = saved.state.get("loss_scale", self.engine.loss_scale)
            self.engine.steps_at_scale = saved.state.get("steps_at_scale", 0)
        saved.restore_rng(self.rank)
        return progress

    def _start(self) -> Progress:
        if source := self.config.init_from:
            allowed = self.config.allow_other_tokenizer
            check_weights(self.train_data.file.folder, self.tokenizer, Path(source), allowed)
            load_weights(source, self.engine, self.config.model)
        return Progress()

    def _state(self) -> dict:
        return {
            **dataclasses.asdict(self.progress),
            "optimizer_steps": self.engine.optimizer_steps,
            "loss_scale": self.engine.loss_scale,
            "steps_at_scale": self.engine.steps_at_scale,
            "longest_row": self.longest_row,
            **self._identity(),
        }

    def _identity(self) -> dict:
        """Return the part of a checkpoint's state that identifies its run."""
        return {
            "data": self.train_data.identity,
            "model": self.model_config.to_dict(),
            "config": self.config.to_dict(),
        }

    def _description(self) -> str:
        c, resumed = (
            self.config,
            f", resumed after step {self.progress.step}" if self.progress.step else "",
        )
        if resume.begins_stage(c):
            resumed = f", a new stage from {c.resume}"
        val = f"; validation: {self.batches.describe(self.val_data)}" if self.val_data else ""
        name, size = c.init_from or c.model, self.model_config.num_parameters
        strategy = c.attention["strategy"]
        parallel = (
            f"{self.batches.dp_size} data parallel x "
            f"{counted(self.sp.size, 'sequence parallel rank')}"
        )
        return (
            f"{name}: {size:,} parameters, {c.dtype} on {self.device.type}, "
            f"{type(self.engine).__name__}; "
            f"{parallel}{'' if strategy == 'auto' else f', strategy {strategy}'}; "
            f"{counted(c.batch_size, 'sequence')} of {counted(c.seq_len, 'token')} a step; "
            f"{counted(len(self.train_data), 'sequence')} an epoch, "
            f"{self.batches.describe(self.train_data)}{val}{resumed}"
        )

    def _record(self, **values: float) -> None:
        if self.metrics:
            self.metrics.record(self.progress.step, **values)

    def _say(self, text: str) -> None:
        if self.metrics:
            self.metrics.say(text)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def main(argv: Sequence[str]) -> int:
    config = parse_config(argv)
    if config.processes > 1 and "RANK" not in os.environ:
        return launch([__file__, *argv], config.processes, Path(config.output))
    # reuse compiled kernels in the next run
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    watchdog = Watchdog(ranks.rank(), config.timeout)
    stop = StopSignal(ending.acknowledge, lambda: ending.end_now(watchdog))
    try:
        watchdog.alive("waiting for the other ranks to join")
        trainer = Trainer(config, init_distributed(config), stop, watchdog)
        finished = trainer.run()
        if trainer.rank == 0 and not finished:
            how = (
                "to resume, run the same command with --resume auto"
                if config.save
                else "nothing was saved"
            )
            with printing():
                print(f"stopped after step {trainer.progress.step}; {how}")
        watchdog.alive("leaving the other ranks")
        dist.destroy_process_group()
        return 0
    except Exception as error:
        code = ending.explain(error, watchdog)
        if code is None:
            raise
        return code
    finally:
        watchdog.close()


if __name__ == "__main__":
    try:
        ending.leave(main(sys.argv[1:]))
    except SystemExit as given:  # argparse has printed the reason
        ending.leave(given.code if isinstance(given.code, int) else 1)
    except BaseException:  # noqa: BLE001 - every process ends by `leave`
        traceback.print_exc()
        ending.leave(1)
