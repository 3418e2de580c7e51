"""Saves during a run. Training stops only while shards are copied to host memory (HostCopy).

A thread of each rank writes the copy, and agrees with those of other ranks, by a process group of
their own, on what checkpoint.write does next. So a checkpoint may become whole within a step.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.base import ranks
from train.checkpoints import checkpoint
from train.checkpoints.checkpoint import CheckpointError
from train.checkpoints.rank_file import HostCopy, RankFile, available_memory
from train.data.tokenizer import Tokenizer
from train.engine import Shard

_SHARE = 0.5  # of the available host memory, which the copies of all ranks of a host may take
_PATIENCE = timedelta(days=1)  # for other ranks; whether they live is noticed between steps


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint, with the seconds until it was, and those for which training stopped."""

    step: int
    path: Path
    stopped: float
    seconds: float

    def __str__(self) -> str:
        took = f"{self.seconds:.1f} s"
        if self.stopped < self.seconds:
            took += f", training stopped for {self.stopped:.2f} s"
        return f"step {self.step}: saved {self.path} in {took}"


class Saver:
    """Saves the checkpoints of a run under `root`, one after the other.

    tell        called with checkpoint.outlook now, and by any thread when a checkpoint is whole
    note        called with each Saved, by `save`, `wait` and `poll`
    background  a Background, or None if training waits until a checkpoint is whole

    Every rank must call `save`, `wait` and `raise_failure`.
    """

    def __init__(
        self,
        root: Path,
        tokenizer: Tokenizer,
        tell: Callable[[str], None],
        note: Callable[[Saved], None],
        background: Background | None,
    ):
        self.root, self._tokenizer, self._tell, self._note = root, tokenizer, tell, note
        self._background = background
        self._writing: Future[Saved] | None = None
        self._tell_outlook()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is written in the background, or was since the last `poll`."""
        return self._writing is not None

    @property
    def failed(self) -> bool:
        """Whether this rank knows that saving failed."""
        futures = [self._writing, self._background and self._background.copy]
        return any(f and f.done() and f.exception() for f in futures)

    def raise_failure(self) -> None:
        """Raise the CheckpointError of a save that `failed` on any rank."""
        if self._background:
            ranks.together(self._background.copy.result, CheckpointError)
        self.wait()

    def save(self, state: dict[str, Any], shards: dict[str, Shard], keep_last: int | None) -> None:
        """Save after the last save is whole. `wait` and `raise_failure` raise errors of writing."""
        began = time.monotonic()
        self.wait()
        checkpoint.check_finite(self.root, state, shards)
        file = RankFile.of(shards)
        if self._background is None:
            self._note(self._write(state, file.write, keep_last, began))
            return
        copy = self._background.copy.result
        ranks.together(lambda: copy().fill(file), CheckpointError)
        stopped = time.monotonic() - began
        state = json.loads(json.dumps(state))  # the run's own may change
        self._writing = self._background.pool.submit(
            self._write, state, copy().write, keep_last, began, stopped, self._background.group
        )

    def _write(
        self,
        state: dict[str, Any],
        write_file: Callable[[Path], dict[str, Any]],
        keep_last: int | None,
        began: float,
        stopped: float | None = None,
        group: ranks.Group = None,
    ) -> Saved:
        path = checkpoint.write(self.root, state, write_file, keep_last, self._tokenizer, group)
        self._tell_outlook(group)
        seconds = time.monotonic() - began
        return Saved(state["step"], path, seconds if stopped is None else stopped, seconds)

    def _tell_outlook(self, group: ranks.Group = None) -> None:
        words = checkpoint.outlook(self.root) if ranks.rank() == 0 else ""
        self._tell(ranks.gather(words, group)[0])

    def poll(self) -> None:
        """Note the last save if it has become whole."""
        if self._writing and self._writing.done() and not self._writing.exception():
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is whole. Raises CheckpointError on every rank if it fails."""
        writing, self._writing = self._writing, None
        if writing:
            self._note(writing.result())

    def close(self) -> None:
        """Free the memory, after `wait`."""
        if self._background:
            self._background.close()


class Background:
    """A rank's means to save while it trains: memory for its file, a thread, and a group of all
    threads. The thread allocates and pins the memory, so `copy` is available after some seconds.
    """

    def __init__(self, size: int, device: torch.device):
        self.group: ranks.Group = None
        if ranks.world_size() > 1:
            made: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)  # torch's types differ
            self.group = made
        self.pool = ThreadPoolExecutor(1, "saving")
        self.copy: Future[HostCopy] = self.pool.submit(self._make_copy, size, device)

    def _make_copy(self, size: int, device: torch.device) -> HostCopy:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        return HostCopy(size, device)

    def close(self) -> None:
        self.pool.shutdown()
        self.copy.result().close()
        if self.group is not None:
            dist.destroy_process_group(self.group)


def make_background(shards: dict[str, Shard], device: torch.device) -> Background | None:
    """Return the means to save `shards` in the background. Print why if there are none."""
    if sys.platform != "linux":
        return None
    size = RankFile.of(shards).size
    if problem := _shortage(size):
        ranks.warn(f"saving stops training until a checkpoint is whole: {problem}")
        return None
    return Background(size, device)


def _shortage(size: int) -> str | None:
    """Return why the copies of some host do not fit into its memory, or None if they fit."""
    copies: defaultdict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for host, bytes_of_rank, available in ranks.gather(
        (socket.gethostname(), size, available_memory())
    ):
        copies[host] += bytes_of_rank
        free[host] = min(available, free.get(host, available))
    for host, wanted in copies.items():
        if wanted > _SHARE * free[host]:
            return (
                f"a copy of weights and optimizer on {host} takes {wanted / 2**30:.1f} GiB, more "
                f"than half of its {free[host] / 2**30:.1f} GiB of free host memory"
            )
    return None
