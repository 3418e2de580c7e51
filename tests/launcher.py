"""Ranks as processes: functions on ranks, scripts as under torchrun, and the process that ranks are
forked from.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
GPUS = torch.cuda.device_count()
_PRELOADED = ["tests.preload"]
# Ranks that NCCL can make here: it wants a GPU for each, but for recent versions with this set.
RANKS = max(GPUS, 4) if GPUS and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else GPUS


def needs_ranks(count: int):
    """Return a mark that skips a test where NCCL cannot make so many ranks."""
    return pytest.mark.skipif(
        count > RANKS, reason=f"needs NVIDIA GPUs, {count} or more; this machine has {GPUS}"
    )


@contextmanager
def world_of_one() -> Iterator[None]:
    """Make a torch.distributed world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(size: int, work: Callable, *args, backend: str = "gloo") -> list:
    """Run `work(rank, *args)` in `size` joined processes. Return the results, or raise the first
    failure.

    `work` must be a module's function. With backend "nccl" each process has a GPU, or they share
    GPUs.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(_PRELOADED)
        arguments = size, folder, backend, work, args
        mp.start_processes(
            _rank_main, arguments, size, start_method="spawn" if GPUS else "forkserver"
        )
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def run_in_turn(size: int, *works: Callable) -> list[list]:
    """Run several works on the same processes, as by `run_ranks`. Return the results of each."""
    return [list(results) for results in zip(*run_ranks(size, _do_in_turn, works), strict=True)]


def _do_in_turn(rank: int, works: Sequence[Callable]) -> list:
    return [work(rank) for work in works]


def run_threads(*works: Callable, seconds: float = 200.0) -> list:
    """Run each work in a thread of its own. Return their results, or raise the first error.

    Threads that still run after `seconds` fail the test, and do not keep the process alive.
    """
    results, errors = [None] * len(works), []

    def run(number: int, work: Callable) -> None:
        try:
            results[number] = work()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=x, daemon=True) for x in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


def torchrun(size: int, *command, python: Sequence[str] = (), timeout: float = 600, **options):
    """Run a script with its arguments on `size` ranks under torchrun.

    `python` are flags of the interpreter.
    """
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {size} --no-python".split()
    place = []
    # a rank is to find as many ranks on its host as there are GPUs, and take one that is there
    if 0 < GPUS < size:
        here = f"LOCAL_RANK=$((LOCAL_RANK % {GPUS})) LOCAL_WORLD_SIZE={GPUS}"
        place = ["bash", "-c", f'{here} exec "$@"', "rank"]
    line = [sys.executable, *launcher, *place, sys.executable, *python, *map(str, command)]
    return subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=timeout, **options
    )


def run_script(
    size: int | None,
    script: Path | str,
    *arguments,
    timeout: float = 600,
    environments: Sequence[dict[str, str]] = (),
    draws: bool = False,
) -> tuple[int, str]:
    """Run a script on CPUs as `torchrun` does, with ranks that are forked from a process which has
    imported torch once.

    Without a size it is one process without ranks, as of `python script`. Ranks may have
    environments of their own. A run draws its curves only if it `draws`, since that takes longer
    than its steps. Returns the exit code of the rank that failed first, or 0, and what
    all ranks wrote to both of their streams. If a rank failed, the last line tells how each ended.

    Ranks that wait for a failed one are killed after GRACE seconds, in which they may fail too.
    """
    context = forkserver()
    with tempfile.NamedTemporaryFile(mode="r", errors="replace") as output:
        line = [str(ROOT / script), *map(str, arguments)]
        # In this process, so that no other one can take its port.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        places = [_places(rank, size, store.port) for rank in range(size)] if size else [{}]
        places = [
            there | more
            for there, more in itertools.zip_longest(places, environments, fillvalue={})
        ]
        ranks = [
            context.Process(target=_script_main, args=(line, output.name, there, draws))
            for there in places
        ]
        for rank in ranks:
            rank.start()
        failed = _join_all(ranks, timeout)
        if failed is None:
            return 0, output.read()
        endings = ", ".join(f"rank {i} with {rank.exitcode}" for i, rank in enumerate(ranks))
        return failed.exitcode, f"{output.read()}\nrun_script: ended {endings}\n"


GRACE = 60.0


def _join_all(ranks: Sequence[mp.Process], timeout: float) -> mp.Process | None:
    """Wait for all ranks and return the one that failed first, or None.

    Kills those that still run after `timeout` seconds, or GRACE seconds after the first failure.
    """
    running, failed, end = list(ranks), None, time.monotonic() + timeout
    while running and (left := end - time.monotonic()) > 0:
        connection.wait([rank.sentinel for rank in running], left)
        for rank in [rank for rank in running if rank.exitcode is not None]:
            running.remove(rank)
            if rank.exitcode and failed is None:
                failed, end = rank, min(end, time.monotonic() + GRACE)
    for rank in running:
        rank.kill()
        rank.join()
    return failed or next((rank for rank in running if rank.exitcode), None)


def fork_the_forkserver() -> None:
    """Start the forkserver as a fork of this process, which has imported what ranks need.

    A forkserver is a new process otherwise, which takes seconds to import the same again.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    importlib.import_module(*_PRELOADED)
    spawn, util.spawnv_passfds = util.spawnv_passfds, _fork
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _fork(_path: object, args: Sequence[str | bytes], passed: Sequence[int]) -> int:
    """Fork a process that has only the files that are passed, and run `python -c`'s argument."""
    pid = os.fork()
    if pid:
        return pid
    try:
        # Files of this process, such as those of its loggers, then write nowhere. If they were only
        # closed, they would write to whatever is opened next.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in map(int, os.listdir("/dev/fd")):
            if descriptor not in {0, 1, 2, nowhere, *passed}:
                os.dup2(nowhere, descriptor, inheritable=False)
        faulthandler.disable()
        sys.stdin = open(os.devnull)  # noqa: SIM115
        sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", 1) for descriptor in (1, 2))
        exec(os.fsdecode(args[-1]), {})
    except Exception:
        traceback.print_exc()
        raise
    finally:
        os._exit(0)


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Return a context for processes that are forked from one which has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _places(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment that a launcher gives a rank."""
    places = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
        # As under torchrun, rank 0 uses the store on this port and makes none.
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in places.items()}


def draw_no_curves() -> None:
    """Let runs of this process draw none, which takes longer than their steps."""
    importlib.import_module("train.loop.metrics").plot_losses = lambda records, file: None


def _script_main(line: list[str], file: str, places: dict[str, str], draws: bool) -> None:
    if not draws:
        draw_no_curves()
    output = os.open(file, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(places)
    run_as_main(line)


def run_as_main(line: list[str]) -> None:
    """Run a script with its arguments in this process, as Python does."""
    # tensors are tiny: several would wait for each other where other processes run too
    torch.set_num_threads(1)
    os.chdir(ROOT)
    sys.argv = line
    sys.path.insert(0, str(Path(line[0]).parent))
    runpy.run_path(line[0], run_name="__main__")


def _rank_main(
    rank: int, size: int, folder: str, backend: str, work: Callable, args: tuple
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % GPUS)
    store = dist.FileStore(f"{folder}/store", size)
    # Else a rank whose work is short closes its connections while others still make theirs.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        torch.save(work(rank, *args), f"{folder}/{rank}.pt")
    except BaseException:
        traceback.print_exc()
        raise
    dist.destroy_process_group()
    # torch 2.13: a gloo thread that drops a tensor while the interpreter shuts down aborts the
    # process
    os._exit(0)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, by their ids."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_ended(pids: list[int]) -> None:
    """Wait for less time than ranks wait for each other."""
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before it was read
        return False
