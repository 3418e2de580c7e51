"""Stages of training, which a file describes (docs/checkpoints.md), one after the other.

The second stage is the folder OUTPUT/02-NAME. It begins at the last checkpoint of the first, as
with --resume CHECKPOINT --new-stage. The same command resumes in the last stage that has one.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from train.base import ranks
from train.base.wording import counted, flag, naming
from train.checkpoints import checkpoint
from train.data.batches import choose_micro_batch_size
from train.data.same_tokenizer import check_folder
from train.data.shares import first_folder
from train.loop.building import check_world
from train.loop.inputs import Inputs, check_same_data, keep_documents_apart, open_inputs
from train.loop.resume import changed_settings
from train.loop.wandb_run import check_installed
from train.run.distributed import choose_engine
from train.run.replacement import agree_on_store
from train.settings.config import TrainConfig
from train.settings.facts import ALL_STAGES, ONE_STAGE
from train.settings.options import make_config, parse_options, read_file, read_values
from train.settings.settings import FACTS, shared_options

STAGE = "BMT_BURST_STAGE"  # environment variable of a replaced process: the number of its stage
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FOLDER = re.compile(r"\d\d+-.+")


@dataclass(frozen=True)
class Stage:
    """One stage: its number from 1, its name, and its settings. Its `output` is its own folder."""

    number: int
    name: str
    config: TrainConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.output)

    @property
    def last_checkpoint(self) -> Path:
        """The checkpoint at which the next stage begins, also if --steps was lowered since."""
        last = checkpoint.folder(self.folder, self.config.steps)
        return max([last, *checkpoint.listed(self.folder)[:1]])


@dataclass(frozen=True)
class Stages:
    """The stages of a file, and the one that this process trains."""

    file: Path
    all: tuple[Stage, ...]
    current: Stage

    @property
    def config(self) -> TrainConfig:
        """The settings of the current stage, with the place where it begins."""
        config, number = self.current.config, self.current.number
        if _given_number() is None or number == 1:
            return dataclasses.replace(config, resume="auto")
        before = self.all[number - 2].last_checkpoint
        return dataclasses.replace(config, resume=str(before), new_stage=True)

    def opening(self, stage: Stage) -> TrainConfig:
        """Return the settings of a stage, with the folder of the checkpoints whose model it would
        have now: its own, else those of the last stage before it that has some.
        """
        begun = [each for each in self.all[: stage.number] if checkpoint.listed(each.folder)]
        if not begun or begun[-1] is stage:
            return stage.config
        return dataclasses.replace(stage.config, resume=str(begun[-1].folder), new_stage=True)

    @property
    def later(self) -> tuple[Stage, ...]:
        return self.all[self.current.number :]

    @property
    def shared(self) -> dict[str, Any]:
        """The options of all stages that must be equal on all ranks."""
        return {
            f"{option} (stage {stage.name})": value
            for stage in self.all
            for option, value in shared_options(stage.config.to_dict()).items()
        }

    def describe(self) -> str:
        """Return which stage this is, and which settings of finished stages have changed since."""
        number, name = self.current.number, self.current.name
        lines = [f"stage {number} of {len(self.all)}: {name}, in {self.current.folder}"]
        for stage in self.all[: number - 1]:
            if changed := _changes_since(stage):
                lines.append(f"stage {stage.name} is done; not applied to it: {changed}")
        return "\n".join(lines)

    def outlook(self) -> str:
        """Return the outlook of the run when it ends, as checkpoint.outlook does."""
        return checkpoint.outlook(_last_begun(self.all).folder)

    def leave(self, finished: bool, stopping: bool) -> dict[str, str] | None:
        """Return the variables of the process that trains the next stage, or None if there is none,
        if this one is not `finished`, or a rank is `stopping`. Every rank must call it.
        """
        if not finished or any(ranks.gather(stopping)):
            if finished:
                ranks.say(
                    f"stopped after stage {self.current.name}; to resume, run the same command"
                )
            return None
        if not self.later:
            ranks.say(f"all {counted(len(self.all), 'stage')} of {self.file} are done")
            return None
        return {**agree_on_store(), STAGE: str(self.later[0].number)}

    def check(self, device: torch.device) -> None:
        """Print which stage begins. Check the data and sizes of all that follow. Every rank must
        call it. Raises RankError, which names the stage, on every rank.
        """
        if len(set(ranks.gather(self.current.number))) > 1:
            raise ranks.RankError(
                f"ranks find checkpoints of different stages in {self.current.folder.parent}: "
                "expected one file system for all hosts"
            )
        ranks.say(self.describe())
        for inputs in ranks.together(lambda: [self._open(stage, device) for stage in self.later]):
            check_same_data(inputs)

    def _open(self, stage: Stage, device: torch.device) -> Inputs:
        """Open the inputs of a later stage. Errors and warnings name it. Raises ValueError."""
        config, warnings = self.opening(stage), io.StringIO()
        first = Path(first_folder(self.current.config.data))
        named = naming(f"stage {stage.name}", OSError, checkpoint.CheckpointError)
        with named, redirect_stderr(warnings):
            check_installed(config.wandb)
            choose_engine(config, device)
            check_world(config)
            choose_micro_batch_size(config, ranks.world_size() // config.sp_size)
            inputs = keep_documents_apart(open_inputs(config, device), config, None)
            check_folder(first, inputs.training.folder, inputs.training.folder)
        for line in warnings.getvalue().splitlines():
            print(f"stage {stage.name}: {line}", file=sys.stderr)
        return inputs


def parse_run(argv: Sequence[str] | None = None) -> tuple[TrainConfig, Stages | None]:
    """Return the configuration of a command line, or the one of its current stage."""
    parser, given = parse_options(argv)
    file = given.pop("stages", None)
    given.pop("dry_run", None)
    try:
        if file is None:
            return make_config(given), None
        stages = read_stages(Path(file), given)
        return stages.config, stages
    except (ValueError, TypeError, OSError, RecursionError) as error:
        parser.fail(error)


def read_stages(file: Path, given: Mapping[str, Any]) -> Stages:
    """Read the stages of `file`. Options `given` on the command line override theirs."""
    common = read_file(file, "--stages")
    tables = common.pop("stage", None)
    if not isinstance(tables, list) or not tables or not all(isinstance(x, dict) for x in tables):
        raise ValueError(f"{file}: expected a table [[stage]] for each stage")
    if "config" in given:
        raise ValueError("--config does not go with --stages, whose file has the options")
    common = read_values(common, str(file)) | dict(given)
    for name, value in common.items():
        reason = FACTS[name].no_stages
        if reason and (name, value) not in (("resume", "auto"), ("save", True)):
            raise ValueError(f"{flag(name)} does not go with --stages: {reason}")
    if misplaced := sorted(name for name in common if ONE_STAGE in FACTS[name].scope):
        raise ValueError(
            f"{flag(misplaced[0])} is for one stage: give it in its table [[stage]] of {file}"
        )
    if common.get("output") == "":
        raise ValueError("--output must not be empty")
    stages: list[Stage] = []
    for number, table in enumerate(tables, start=1):
        stage = _make_stage(file, number, table, common, given)
        if stage.name in (other.name for other in stages):
            raise ValueError(f"{file}: two stages are called {stage.name}")
        stages.append(stage)
    _check_folders(file, stages)
    number = _given_number() or _last_begun(stages).number
    if number > len(stages):
        raise ValueError(f"{file}: expected at least {number} stages as before, got {len(stages)}")
    return Stages(file, tuple(stages), stages[number - 1])


def _make_stage(
    file: Path,
    number: int,
    table: dict[str, Any],
    common: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Stage:
    name = table.pop("name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{file}: stage {number} needs a name of letters, digits, '.', '_' and '-', got "
            f"{name!r}"
        )
    where = f"{file}: stage {name}"
    own = read_values(table, where)
    if twice := sorted(own.keys() & given.keys()):
        raise ValueError(
            f"{where} sets {twice[0]}: leave out {flag(twice[0])}, which is for all stages"
        )
    facts = {name: FACTS[name] for name in sorted(own)}
    if misplaced := [n for n, x in facts.items() if ALL_STAGES in x.scope or x.no_stages]:
        raise ValueError(f"{where}: {misplaced[0]} is the same in all stages: put it at the top")
    root = Path(common.get("output", TrainConfig.output))
    values = {**common, **own, "output": str(root / f"{number:02d}-{name}"), "resume": "auto"}
    with naming(where):
        return Stage(number, name, TrainConfig(**values))


def _check_folders(file: Path, stages: Sequence[Stage]) -> None:
    """Raise ValueError if the output has checkpoints of stages that the file does not have."""
    root, known = stages[0].folder.parent, {stage.folder.name for stage in stages}
    others = [
        path.name
        for path in sorted(root.glob("*-*"))
        if _FOLDER.fullmatch(path.name) and path.name not in known and checkpoint.listed(path)
    ]
    if others:
        raise ValueError(
            f"{root} has checkpoints of {', '.join(others)}, which {file} does not have: expected "
            f"{', '.join(sorted(known))}; undo the change, or give another --output"
        )


def _last_begun(stages: Sequence[Stage]) -> Stage:
    """Return the last stage that has a checkpoint, else the first."""
    begun = [stage for stage in stages if checkpoint.listed(stage.folder)]
    return begun[-1] if begun else stages[0]


def _given_number() -> int | None:
    number = os.environ.get(STAGE)
    return None if number is None else int(number)


def _changes_since(stage: Stage) -> str:
    """Return which settings of a stage differ from those of its newest checkpoint."""
    for path in checkpoint.listed(stage.folder)[:1]:
        try:
            state = checkpoint.Checkpoint(path).state
        except checkpoint.CheckpointError as error:
            print(f"{path} is damaged: {error}", file=sys.stderr)
        else:
            return changed_settings(state, stage.config)
    return ""
