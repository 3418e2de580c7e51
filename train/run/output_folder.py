"""Checks before the first step, since a save fails later: hosts share --output, which has room."""

from __future__ import annotations

import secrets
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from socket import gethostname

from train.base import ranks
from train.base.files import writing
from train.checkpoints import checkpoint
from train.checkpoints.rank_file import RankFile
from train.engine import Engine
from train.settings.config import TrainConfig

_PATIENCE = 10.0  # seconds until a file that one host wrote must be visible to the others
_TICK = 0.1
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def check_shared(root: Path) -> None:
    """Raise RankError on every rank unless each rank sees a file of every rank under `root`."""
    # the name of a save that was given up, which the next save removes
    folder = root / ranks.gather(f".step_check_{secrets.token_hex(8)}")[0]
    files = [f"rank {rank} on {host}" for rank, host in enumerate(ranks.gather(gethostname()))]
    try:
        ranks.together(lambda: _leave_file(folder / files[ranks.rank()]))
        ranks.together(lambda: _wait_for_files(folder, files))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _leave_file(file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    with writing(file):
        file.touch()


def _wait_for_files(folder: Path, files: Sequence[str]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while missing := sorted(set(files) - {file.name for file in folder.iterdir()}):
        if time.monotonic() > deadline:
            raise ValueError(
                f"{gethostname()} does not see in {folder.parent.absolute()} what {missing[0]} "
                "wrote there: checkpoints need one --output on a file system that all hosts share. "
                "With disks of their own, train on one host, or with --no-save, which leaves "
                "curves only"
            )
        time.sleep(_TICK)


def check_room(engine: Engine, step: int, config: TrainConfig, *later: TrainConfig) -> None:
    """Check that disks have room for the checkpoints of a run after `step` and of `later` stages.

    A save removes the oldest checkpoint when the new one is whole, so the disk needs room for two,
    or for --keep-last if that is more. Raises RankError on every rank if there is less.
    """
    size = sum(ranks.gather(RankFile.of(engine.state()).size))
    wanted = [(config, count_saves(config, step)), *((x, count_saves(x, 0)) for x in later)]
    ranks.on_first(lambda: _check_room(size, wanted))


def _check_room(size: int, wanted: Sequence[tuple[TrainConfig, int]]) -> None:
    """Raise ValueError if a disk has no room for the checkpoints of each output that are due."""
    needs: Counter[int] = Counter()  # checkpoints on each device
    room: Counter[int] = Counter()  # bytes on it that they may take
    for config, saves in wanted:
        root = Path(config.output)
        there = checkpoint.listed(root)
        place = root if root.exists() else root.parent
        device = place.stat().st_dev
        if device not in room:
            room[device] = shutil.disk_usage(place).free
        # the next save removes files of one that was killed
        room[device] += sum(map(checkpoint.count_bytes, [*there, *root.glob(".step_*")]))
        needs[device] += min(max(config.keep_last, 2), len(there) + saves)
        if saves and room[device] < needs[device] * size:
            raise ValueError(
                f"{place.absolute()} has no room for the checkpoints of this run: {needs[device]} "
                f"of {_show_bytes(size)} need {_show_bytes(needs[device] * size)}, and "
                f"{_show_bytes(room[device])} are free or used by older ones; --keep-last is "
                f"{config.keep_last}, and a save needs 2 at least, since the one before stays "
                "until the new one is whole"
            )


def _show_bytes(size: int) -> str:
    """Return a size in the largest unit in which it is at least 1."""
    power = min(max(size.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{size / 1024**power:.4g} {_UNITS[power]}"


def count_saves(config: TrainConfig, step: int) -> int:
    """Return the number of checkpoints that are due after `step`, up to the last step."""
    last, every = config.last_step, config.save_every
    if not config.save or step >= last:
        return 0
    return last // every - step // every + bool(last % every) if every else 1
