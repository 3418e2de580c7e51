"""The common parts of all benchmarks: a rank's device, measurements on it, and rows."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from bench.implementations import Unavailable
from bmt_burst.transport.sockets import host_name

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
_SERIES_MS = 200.0  # of measured calls; as many precede them
_MOST_CALLS = 50


class Machine:
    """This rank's device, and measurements on it."""

    def __init__(self):
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cpu")
        if self.cuda:  # ranks may share a GPU, to compute errors only
            number = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
            self.device = torch.device("cuda", number)
            torch.cuda.set_device(self.device)
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        # without torchrun, this process is the only rank
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0}
        world = {**alone, "world_size": 1} if alone else {}
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo", **world)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.name = torch.cuda.get_device_name() if self.cuda else cpu_name()
        hosts: list = [None] * self.size
        dist.all_gather_object(hosts, host_name())
        self.hosts = len(set(hosts))
        self.at = ""  # what is being measured
        self.began = time.monotonic()

    def report(self, what: str) -> None:
        """Tell the user about progress."""
        if self.rank == 0:
            seconds = time.monotonic() - self.began
            print(f"[{seconds:.0f} s] {self.at}: {what}", file=sys.stderr, flush=True)

    def once_ms(self, work: Callable[[], object]) -> float:
        """Measure one call of `work` on the slowest rank, in ms. It must not be the first call."""
        return self.slowest(self._series_ms(work, 0, 1))

    def time_ms(self, work: Callable[[], object], once: float) -> float:
        """Measure the mean milliseconds of a series of calls on the slowest rank.

        One call takes about `once` milliseconds. If this is as long as a series, the call is
        measured alone, right after others.
        """
        calls = min(max(int(_SERIES_MS / once), 1), _MOST_CALLS) if self.cuda else 1
        return self.slowest(self._series_ms(work, calls if once < _SERIES_MS else 0, calls))

    def take_turns(
        self, works: Mapping[str, Callable[[], object]], once: Mapping[str, float], rounds: int
    ) -> dict[str, list[float]]:
        """Measure all works in each round, in one order and then in the other. `once` has about how
        many milliseconds a call of each takes.
        """
        found: dict[str, list[float]] = {name: [] for name in works}
        for number in range(rounds):
            for name in works if number % 2 else reversed(list(works)):
                found[name].append(self.time_ms(works[name], once[name]))
        return found

    def _series_ms(self, work: Callable[[], object], warm_up: int, calls: int) -> float:
        """Measure the mean milliseconds of calls after a warm-up. All ranks begin together."""
        self.settle()
        for _ in range(warm_up):
            work()
        start = self._now()
        for _ in range(calls):
            work()
        stop = self._now()
        if not self.cuda:
            return (stop - start) * 1e3 / calls
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / calls

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def attempt(self, work: Callable[[], object]) -> str | None:
        """Call `work`. Return why it failed, if it failed on all ranks.

        Raises RuntimeError if it failed on some ranks only.
        """
        failure = None
        try:
            work()
        except Exception as caught:  # noqa: BLE001 - peers raise any error; the row has it
            reason = str(caught).partition("\n")[0]
            failure = (
                reason if isinstance(caught, Unavailable) else f"{type(caught).__name__}: {reason}"
            )
        failures: list = [None] * self.size
        dist.all_gather_object(failures, failure)
        if len({failure and failure.partition(":")[0] for failure in failures}) > 1:
            raise RuntimeError(f"failures by rank: {failures}")
        if failures[0] and self.cuda:
            torch.cuda.empty_cache()
        return failures[0]

    def settle(self) -> None:
        """Wait until all ranks are here and their GPUs are idle."""
        if self.cuda:
            torch.cuda.synchronize()
        self.slowest(0.0)

    def slowest(self, value: float) -> float:
        """Return the largest value of all ranks."""
        worst = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return float(worst)

    def extra_gib(self, work: Callable[[], object], held: int) -> float | None:
        """Measure the peak memory of `work` beyond what was allocated before it.

        `held` bytes, which torch does not count, are added.
        """
        if not self.cuda:
            return None
        self.settle()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return self.slowest((torch.cuda.max_memory_allocated() - before + held) / GIB)

    def record(self, rows: Iterable[dict], file: Path) -> NoReturn:
        """Record rows, and end this process: with 1 if there was an error."""
        try:
            good = record(rows, file, self.name, self.rank)
        except BaseException:  # noqa: BLE001 - Ctrl-C too
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # streams may wait for ranks that have ended
        dist.destroy_process_group()
        sys.stdout.flush()
        # In torch 2.13 a gloo thread may abort a process that shuts down.
        os._exit(not good)


def cpu_name() -> str:
    return platform.processor() or "CPU"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        found["cudnn"] = str(torch.backends.cudnn.version())
    installed = {package.name: package.version for package in distributions()}
    packages = ("triton", "flash-attn-4", "flash-attn", "ring-flash-attn", "fla-core")
    return found | {name: installed[name] for name in packages if name in installed}


def commit() -> str:
    if "BENCH_COMMIT" in os.environ:
        return os.environ["BENCH_COMMIT"]
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() or "unknown"


def origin(gpu_name: str) -> dict[str, Any]:
    """Return the GPU, versions and commit, which every row has."""
    return {"gpu_name": gpu_name, "versions": versions(), "commit": commit()}


def record(rows: Iterable[dict], file: Path, gpu_name: str, rank: int = 0) -> bool:
    """Append rows with their origin to a file, and print them, on rank 0.

    Return whether no row has an error.
    """
    common, good = origin(gpu_name), True
    for row in rows:
        good &= "error" not in row
        if rank == 0:
            text = json.dumps(row | common, separators=(",", ":"))
            with open(file, "a") as lines:
                lines.write(text + "\n")
            short = json.loads(json.dumps(row), parse_float=lambda number: round(float(number), 5))
            print(" ".join(f"{key}={value}" for key, value in short.items()), flush=True)
    return good


def pretrain(gpus: int, options: dict[str, Any], more: Iterable[str]) -> list[str]:
    """Return the command that runs train/pretrain.py on some GPUs.

    options  values by the names of the options, with "_" for "-"; without those that are None
    """
    pairs = [
        ("--" + name.replace("_", "-"), str(x)) for name, x in options.items() if x is not None
    ]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    script = str(ROOT / "train/pretrain.py")
    return [sys.executable, *launcher, script, *(word for pair in pairs for word in pair), *more]
