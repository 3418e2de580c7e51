"""Checks of --output before the first step: that all hosts share it, and that its disk has room.

A save would fail otherwise, after hours. Its files are those of all ranks, in one folder.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from train.base import ranks
from train.base.files import writing
from train.checkpoints import checkpoint
from train.checkpoints.rank_file import RankFile
from train.engine import Engine
from train.run.config import TrainConfig

_PATIENCE = 10.0  # seconds until a file that one host wrote must be there for the others
_TICK = 0.1
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def check_shared(root: Path) -> None:
    """Check that every rank sees the same folder `root`, and can write files to a folder of rank 0
    in it, as a save does. Every rank must call this function.

    Raises RankError on every rank otherwise.
    """
    host = socket.gethostname()
    # the name of a save that was given up, which the next save removes
    token, name = ranks.gather((secrets.token_hex(8), f".step_check_{secrets.token_hex(4)}"))[0]
    folder = root / name
    try:
        ranks.together(lambda: _leave_token(folder, token) if ranks.rank() == 0 else None)
        first = ranks.gather(f"rank 0 on {host}")[0]
        ranks.together(lambda: _answer(folder, token, f"{host} does not see", first))
        ranks.together(lambda: _read_answers(folder) if ranks.rank() == 0 else None)
    finally:
        if ranks.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _leave_token(folder: Path, token: str) -> None:
    folder.mkdir()
    with writing(folder / "token"):
        (folder / "token").write_text(token)


def _answer(folder: Path, token: str, problem: str, first: str) -> None:
    """Wait until the token is there, and write a file beside it."""
    deadline, found = time.monotonic() + _PATIENCE, None
    while found != token:
        with suppress(FileNotFoundError):
            found = (folder / "token").read_text()
        if found != token and time.monotonic() > deadline:
            raise ValueError(
                f"{problem} in {folder.parent.absolute()} what {first} wrote there: checkpoints "
                "need one --output on a file system that all hosts share. With disks of their own, "
                "train on one host, or with --no-save, which leaves curves only"
            )
        time.sleep(0 if found == token else _TICK)
    answer = folder / f"rank_{ranks.rank():05d}"
    with writing(answer):
        answer.write_text(token)


def _read_answers(folder: Path) -> None:
    """Raise ValueError unless rank 0 sees the files of all ranks."""
    expected = {f"rank_{rank:05d}" for rank in range(ranks.world_size())}
    deadline = time.monotonic() + _PATIENCE
    while missing := sorted(expected - {file.name for file in folder.iterdir()}):
        if time.monotonic() > deadline:
            raise ValueError(
                f"expected files of all ranks in {folder.parent.absolute()}, but those of "
                f"{', '.join(missing)} are not there"
            )
        time.sleep(_TICK)


def check_room(engine: Engine, step: int, config: TrainConfig, *later: TrainConfig) -> None:
    """Check that disks have room for the checkpoints that a run keeps after `step`, and for those
    of all `later` stages. Every rank must call this function.

    A save removes the oldest checkpoint only when a newer one is whole. If there is no room, it
    removes those first that it would not keep, except the last good one. So two are needed, or
    --keep-last if that is more. Raises RankError on every rank if there is less room.
    """
    size = sum(ranks.gather(RankFile.of(engine.state()).size))
    wanted = [(config, count_saves(config, step)), *((x, count_saves(x, 0)) for x in later)]
    ranks.together(lambda: _check_room(size, wanted) if ranks.rank() == 0 else None)


def _check_room(size: int, wanted: Sequence[tuple[TrainConfig, int]]) -> None:
    """Raise ValueError if the disk of an output has no room for checkpoints of `size` bytes. For
    each output, `wanted` has the number of saves that are due.
    """
    needs: Counter[int] = Counter()  # checkpoints on each device, and bytes that they may take
    room: Counter[int] = Counter()
    for config, saves in wanted:
        root = Path(config.output)
        there = checkpoint.listed(root)
        place = root if root.exists() else root.parent
        device = place.stat().st_dev
        if device not in room:
            room[device] = shutil.disk_usage(place).free
        # files of a save that was killed are removed by the next one
        room[device] += sum(map(checkpoint.count_bytes, [*there, *root.glob(".step_*")]))
        needs[device] += min(max(config.keep_last, 2), len(there) + saves)
        if saves and room[device] < needs[device] * size:
            raise ValueError(
                f"{place.absolute()} has no room for the checkpoints of this run: "
                f"{needs[device]} of {_show_bytes(size)} need "
                f"{_show_bytes(needs[device] * size)}, and {_show_bytes(room[device])} are free or "
                f"used by older ones; --keep-last is "
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
