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

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

# As a script, Python puts this folder first in the path. Put the repository there instead.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from train.base.signals import begin_script

    begin_script(agent_dies=signal.SIGTERM)

import torch
import torch.distributed as dist

from bmt_burst import ahead
from models.config import CPMConfig
from train.base import ranks
from train.base.signals import StopSignal
from train.checkpoints import checkpoint
from train.loop.stages import Stages, parse_run
from train.loop.trainer import Trainer
from train.planning.dry_run import advise, dry_run, fit_memory
from train.planning.warming import MODULES, warm
from train.run import ending
from train.run.distributed import choose_device, init_distributed
from train.run.launch import launch
from train.run.output_folder import check_room
from train.run.replacement import replace_process
from train.run.watchdog import Watchdog
from train.settings.config import TrainConfig


def main(argv: Sequence[str]) -> int:
    if "--dry-run" in argv:
        return dry_run(argv)
    config, stages = parse_run(argv)
    if (config.processes > 1 or config.restarts) and "RANK" not in os.environ:
        root = Path(config.output)
        outlook = stages.outlook if stages else partial(checkpoint.outlook, root)
        command, own = [__file__, *argv], None if stages else root
        return launch(command, config.processes, outlook, config.restarts, own)
    watchdog = Watchdog(ranks.rank(), config.timeout)
    stop = StopSignal(ending.acknowledge, lambda: ending.end_now(watchdog))
    work = partial(_run_rank, argv, config, stages, stop, watchdog)
    return ending.run_rank(work, watchdog, partial(advise, config))


def _run_rank(
    argv: Sequence[str],
    config: TrainConfig,
    stages: Stages | None,
    stop: StopSignal,
    watchdog: Watchdog,
) -> None:
    """Train on this rank. After a stage that is not the last, replace this process."""
    watchdog.alive("waiting for the other ranks to join")
    device, later = choose_device(config.device), list[TrainConfig]()
    # the compiler imports while this process joins the others and opens the data
    with _start_compiler(config, device) as compiler:
        init_distributed(config, stages.shared if stages else None)
        if stages:
            stages.check(device)
            watchdog.program = f"pretrain.py: stage {stages.current.name}"
            later = [stage.config for stage in stages.later]
        compiling = partial(warm, compiler=compiler)
        trainer = Trainer(config, device, stop, watchdog, fit_memory, compiling)
    check_room(trainer.engine, trainer.progress.step, config, *later)
    finished = trainer.run()
    if not finished:
        _print_stop(config, trainer.progress.step)
    stopping = stop.received or trainer.limit.is_late()
    variables = stages.leave(finished, stopping) if stages else None
    if variables is not None:
        watchdog.alive("leaving the other ranks")
        dist.destroy_process_group()
        watchdog.close()
        replace_process([__file__, *argv], variables, stop)


def _start_compiler(config: TrainConfig, device: torch.device) -> ahead.Compiler | nullcontext:
    """Return a process that begins to import, if `warm` will compile with it, otherwise nothing."""
    # the errors of inputs that all ranks open later
    with suppress(OSError, ValueError, checkpoint.CheckpointError):
        if device.index == 0 and isinstance(config.model_config(), CPMConfig):
            return ahead.Compiler(*MODULES)
    return nullcontext()


def _print_stop(config: TrainConfig, step: int) -> None:
    """Print how to resume a run that stopped early."""
    how = "to resume, run the same command with --resume auto"
    if config.stop_after is not None and step >= config.stop_after:
        how += " and without --stop-after, or with a later step"
    ranks.say(f"stopped after step {step}; {how if config.save else 'nothing was saved'}")


if __name__ == "__main__":
    ending.run_script(main)
