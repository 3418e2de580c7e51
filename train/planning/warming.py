"""Compilation of the kernels of a run before its first step.

Processes begin once the run has opened its data, and end before it builds the model. Each compiles
a share of the kernels onto disk (train/planning/rehearsal.py), where all ranks of the host find
them. A process has a share because FlashAttention-4 compiles in Python, one kernel after the other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, NamedTuple

import torch

import bmt_burst
from bmt_burst import SequenceParallel
from bmt_burst.kernels import fa4
from bmt_burst.ranks.rings import make_rings
from bmt_burst.sequence.layout import count_chunks
from bmt_burst.transport.bmtrain import initialized_bmtrain
from models.config import CPMConfig
from models.mixers import find_lightning_flash
from train.base import ranks
from train.base.wording import counted
from train.data.mixture import parts
from train.data.source import Source, Stored
from train.loop.inputs import Inputs
from train.run.watchdog import Watchdog
from train.settings.config import TrainConfig
from train.settings.settings import DTYPES

from . import rehearsal as rehearsing
from .rehearsal import Rehearsal

_ROOT = Path(__file__).resolve().parents[2]
_MOST_PROCESSES = 16
_GIB_OF_PROCESS = 1.5  # of a GPU's memory that is free, at least
_MOST_SECONDS = 120.0
_PACKAGES = "torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl"
_SAMPLED_ROWS = 16  # of a source, whose documents are counted
_POLL_SECONDS = 0.05
_NOT_COMPILED = "kernels will be compiled in the steps that first need them"
_MANY_DOCUMENTS = 64  # of the rows of a rank, from which on a call may have hundreds of sequences


class Outcome(NamedTuple):
    """A rank's line for the log about its host's kernels, and whether it reports a failure."""

    line: str = ""
    failed: bool = False


_NOTHING = Outcome()


@dataclass
class Warming:
    """The compilation of the kernels that the ranks of this host need.

    processes  those that compile, each with the file that it writes to
    marks      files next to the kernels. They have the number of kernels once all are there
    outcome    the outcome, if no process compiles
    """

    outcome: Outcome = _NOTHING
    processes: Sequence[tuple[subprocess.Popen[str], IO[str]]] = ()
    marks: Sequence[Path] = ()
    began: float = field(default_factory=time.monotonic)

    def finish(self, watchdog: Watchdog) -> list[str]:
        """Wait until the kernels of all ranks are on disk. Return lines for the log. Every rank
        must call it.
        """
        outcome = self._wait(watchdog) if self.processes else self.outcome
        outcomes = ranks.gather(outcome)
        shown = [each for n, each in enumerate(outcomes) if each.line and (each.failed or not n)]
        return list(dict.fromkeys(each.line for each in shown))

    def _wait(self, watchdog: Watchdog) -> Outcome:
        """Wait for the processes. Leave marks if all of them succeeded."""
        ranks.say(f"compiling kernels by {counted(len(self.processes), 'process', 'processes')}")
        while any(process.poll() is None for process, _ in self.processes):
            watchdog.alive("compiling kernels")
            # the other ranks wait without a sign of life
            if time.monotonic() - self.began > min(_MOST_SECONDS, watchdog.timeout / 2):
                break
            time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        ends = [_end(process, output) for process, output in self.processes]
        if failures := [text for code, text in ends if code]:
            return Outcome(f"{_NOT_COMPILED}: {failures[0]}", failed=True)
        count = int(ends[0][1])
        try:
            for mark in self.marks:
                mark.write_text(f"{count}\n")
        except OSError as error:  # a full disk
            return Outcome(f"{_NOT_COMPILED}: {error}", failed=True)
        return Outcome(
            f"compiled {counted(count, 'kernel')} in {now - self.began:.1f} s; kept in "
            f"{_places(self.marks)}"
        )


def _end(process: subprocess.Popen[str], output: IO[str]) -> tuple[int, str]:
    """End a process, if it runs. Return its exit code and the last line that it wrote."""
    process.kill()
    code = process.wait()
    output.seek(0)
    lines = output.read().splitlines() or [f"exit code {code}"]
    output.close()
    return code, lines[-1]


def _places(marks: Sequence[Path]) -> str:
    return " and ".join(str(mark.parent) for mark in marks)


def warm(
    config: TrainConfig,
    inputs: Inputs,
    sp: SequenceParallel,
    rows: int,
    device: torch.device,
    watchdog: Watchdog,
) -> list[str]:
    """Compile what `start_warming` describes. Return lines for the log. Every rank must call it."""
    started = ranks.together(lambda: start_warming(config, inputs, sp, rows, device))
    return started.finish(watchdog)


def start_warming(
    config: TrainConfig, inputs: Inputs, sp: SequenceParallel, rows: int, device: torch.device
) -> Warming:
    """Start to compile the kernels that a run on GPUs will need, unless they are on disk. `rows`
    are the sequences that a rank computes at once.

    One rank of each host starts processes. Models with biases are left out.
    """
    model, leads = inputs.model, int(os.environ.get("LOCAL_RANK", 0)) == 0
    if device.type != "cuda" or not isinstance(model, CPMConfig):
        return Warming()
    rehearsing.settle_keys()
    if not leads:
        return Warming()
    rehearsal = make_rehearsal(config, model, inputs.training, sp, rows)
    try:
        folders = _find_folders(rehearsal.pick_kernel(device).name)
    except OSError as error:
        return Warming(Outcome(f"{_NOT_COMPILED}: {error}", failed=True))
    name = f"bmt_burst-{_digest(rehearsal, torch.cuda.get_device_name(device))}"
    marks = [folder / name for folder in folders]
    if count := min(map(_read_mark, marks)):
        return Warming(Outcome(f"found {counted(count, 'compiled kernel')} in {_places(marks)}"))
    return Warming(processes=_start_processes(rehearsal), marks=marks)


def make_rehearsal(
    config: TrainConfig, model: CPMConfig, data: Source, sp: SequenceParallel, rows: int
) -> Rehearsal:
    """Return the facts of a run that its kernels depend on."""
    most, chunk = _count_documents(data), config.tokens_of_chunk
    return Rehearsal(
        norms=_find_norms(model),
        gated=model.attention_gate or model.lightning_layers > 0,
        lightning=find_lightning_flash(config.flash) if model.lightning_layers else None,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_size=model.head_dim,
        dtype=str(DTYPES[config.dtype]).removeprefix("torch."),
        layout=config.layout,
        seq_len=config.seq_len,
        rows=rows,
        sp_size=sp.size,
        inner_size=make_rings(sp.process_group, sp.double_group).inner.size,
        windows=list(dict.fromkeys(model.windows)),
        sparse=model.infllm.to_dict() if model.infllm else None,
        documents=data.documents,
        many_documents=most is None or most * rows >= _MANY_DOCUMENTS,
        chunks=1 if chunk is None else count_chunks(config.seq_len, chunk),
        engine="bmtrain" if initialized_bmtrain() else "torch",
        **config.attention,
    )


def _find_norms(model: CPMConfig) -> list[int]:
    """Return the sizes of the vectors that a model's blocks normalize."""
    of_heads = [model.head_dim] if model.qk_norm or model.lightning_layers else []
    of_outputs = [model.num_heads * model.head_dim] if model.lightning_layers else []
    return list(dict.fromkeys((model.hidden_size, *of_heads, *of_outputs)))


def _count_documents(data: Source) -> int | None:
    """Return the most documents of some rows, or None if rows cannot be read in any order."""
    most = 0
    for source in parts(data).values() if data.documents else ():
        if not isinstance(source, Stored):
            return None
        for i in range(min(_SAMPLED_ROWS, len(source))):
            row = source.read(i * len(source) // _SAMPLED_ROWS)
            most = max(most, len(row.documents) - 1)
    return most


def _find_folders(kernel: str) -> list[Path]:
    """Return where compiled kernels are kept. Raises OSError if that is not possible."""
    from triton import knobs

    folders = [Path(knobs.cache.dir)]
    if kernel == "fa4":
        folders.append(fa4.cache_folder())
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    return folders


def _digest(rehearsal: Rehearsal, gpu: str) -> str:
    """Return a name for the kernels of a run, by all that they are compiled from."""
    facts = [json.dumps(dataclasses.asdict(rehearsal), sort_keys=True), gpu, sys.version]
    facts += [_version(package) for package in _PACKAGES]
    found = hashlib.sha256("\n".join(facts).encode())
    library = sorted(Path(bmt_burst.__file__).parent.rglob("*.py"))
    for file in (*library, Path(rehearsing.__file__), _ROOT / "train/engine/triton_adamw.py"):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _start_processes(rehearsal: Rehearsal) -> list[tuple[subprocess.Popen[str], IO[str]]]:
    """Start the processes. Return each with the file that it writes to."""
    free, _ = torch.cuda.mem_get_info()
    room = int(int(os.environ.get("LOCAL_WORLD_SIZE", 1)) * free / 2**30 / _GIB_OF_PROCESS)
    count = max(min(len(os.sched_getaffinity(0)), _MOST_PROCESSES, room), 1)
    facts = json.dumps(dataclasses.asdict(rehearsal))
    paths = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "train.planning.rehearsal", facts]
    started: list[tuple[subprocess.Popen[str], IO[str]]] = []
    for share in range(count):
        output = tempfile.TemporaryFile("w+")
        process = subprocess.Popen(
            [*command, str(share), str(count), str(os.getpid())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,  # Ctrl-C stops the run after its step
        )
        started.append((process, output))
    return started


def _read_mark(mark: Path) -> int:
    """Return the number of kernels that a mark says are on disk, 0 without one."""
    try:
        return int(mark.read_text())
    except (OSError, ValueError):  # a mark that is being written
        return 0
