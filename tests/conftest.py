"""What must be set before CUDA starts or Triton is imported, and in which order files are
tested.
"""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # "gw0" and so on

# Ranks that are processes may share a GPU, if torch's symmetric memory does not mind.
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def _order_gpus(worker: int) -> None:
    """Let this worker and the ranks that it starts see all GPUs, each worker another one as the
    first.
    """
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
        map(str, range(torch.cuda.device_count()))
    )
    if gpus:
        gpus = gpus.split(",")
        first = worker % len(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


if WORKER:
    _order_gpus(int(WORKER.removeprefix("gw")))


def _run_threads_on_one_core(worker: int) -> None:
    """Let the simulated ranks of this worker share a core.

    They share Python's lock, too. On two cores it moves from one to the other at each operation,
    which takes up to three times as long.
    """
    from bmt_burst.ranks import simulation

    run, cores = simulation._run, sorted(os.sched_getaffinity(0))
    core = {cores[worker % len(cores)]}

    def run_on_one(network, works):
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, core)
        try:
            return run(network, works)
        finally:
            os.sched_setaffinity(0, before)

    simulation._run = run_on_one


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # its kernels run in its interpreter
    # Tensors are tiny, ranks are threads or processes, and files are tested in parallel: more
    # threads would wait only.
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
    torch.set_num_threads(1)
    if WORKER and hasattr(os, "sched_setaffinity"):  # Linux has it
        _run_threads_on_one_core(int(WORKER.removeprefix("gw")))


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):  # Triton 3.6 to 3.9; others are slow
        from tests.interpreter import speed_up

        speed_up(interpreter)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Let each test have the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def alone(monkeypatch, one_process) -> None:
    """Be the only rank of a group. Its runs draw no curves, which takes longer than their steps."""
    monkeypatch.setattr("train.loop.metrics.plot_losses", lambda records, file: None)


@pytest.fixture
def settings(tmp_path, alone) -> dict:
    """Options of a small run of this process, see tests/runs.py."""
    from tests.runs import make_settings

    return make_settings(tmp_path)


@pytest.fixture
def memory() -> Iterator:
    """A file system of fsspec, for addresses that begin with memory://."""
    import fsspec

    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


@pytest.fixture
def umask() -> Iterator[None]:
    """Let new files be read by the group and written by the owner: modes 640, of folders 750."""
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.fixture
def modules_in_a_folder(tmp_path, monkeypatch) -> None:
    """Let transformers copy a folder's code, which it does before an import, into tmp_path."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", tmp_path / "modules")
    monkeypatch.syspath_prepend(tmp_path / "modules")


@pytest.fixture
def one_process() -> Iterator[None]:
    """Make a torch.distributed world of this process alone."""
    from tests.launcher import world_of_one

    with world_of_one():
        yield


@pytest.fixture
def find_overflows(monkeypatch) -> None:
    """Let Triton's interpreter, where it is used, fail at an integer that overflows."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        builder = interpreter.interpreter_builder
        checked = replace(builder.options, sanitize_overflow=True)
        monkeypatch.setattr(builder, "options", checked)


# as of what a script starts in the background: tests interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def let_processes_hang_up() -> None:
    """Let SIGHUP end the processes that this one starts, also where it ignores the signal itself,
    as under nohup.

    They would inherit that. They do not inherit a handler, so one that does nothing keeps this
    process alive.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def _processes_hang_up():
    """Workers of pytest-xdist inherit from a process that runs no tests, so each of them does it
    for itself.
    """
    let_processes_hang_up()


def pytest_unconfigure():
    gc.unfreeze()  # or Triton's classes would be reported as leaked


def pytest_collection_finish(session):
    """Start the process that ranks are forked from, while this one has only imported modules.

    What was imported stays, so that collections of garbage need not visit it.
    """
    gc.collect()
    gc.freeze()
    if WORKER and not torch.cuda.is_available() and "train.pretrain" in sys.modules:
        from tests.launcher import fork_the_forkserver

        fork_the_forkserver()


LONGEST = (  # files that take ten seconds or more, by how long they take
    *("trainers", "triton", "planning", "bench", "extensions", "pages", "interrupts", "cache"),
    *("transformers", "chunks", "strategies", "sala", "warming", "train", "bmtrain", "live_train"),
    *("model_center", "evaluate", "sparse_kernels", "compiled", "trainer", "ahead", "kernels"),
    *("new_tokens", "export", "generate", "generating", "tiled", "package", "fp8", "stream"),
    *("readme", "guards", "sparse", "lightning_kernels", "mixture", "profiling", "lightning"),
)


LONGEST_RANKS = (  # tests that start ranks on GPUs, by how long they take
    "test_ring_with_learned_scores_equals_dense",
    "test_enabled_models_equal_those_of_one_gpu",
    "test_ring_equals_dense",
    "test_a_compiled_model_of_several_ranks_takes_every_length",
)


def pytest_collection_modifyitems(items):
    """Put what takes longest first, so that workers end together."""
    files = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    ranks = {name: place for place, name in enumerate(LONGEST_RANKS)}

    def place(item) -> tuple[int, int]:
        name = item.originalname if item.get_closest_marker("ranks") else ""
        return ranks.get(name, len(ranks)), files.get(item.path.stem, len(files))

    items.sort(key=place)
