"""Compilation of kernels before a model's first step, by several processes of each host.

    def steps(rank: int) -> None:  # in a module, since other processes import it
        sp = imagine_ranks(rank, 8)
        for ends in sample_documents(65536, 8):
            ...  # take a step of a model with few layers, with documents that end there

    settle_keys()  # in each process of the run, before its first step
    for progress in compile_kernels(steps, [(0,), (7,)], tokens=1 << 16):
        print(progress)

Steps run in other processes, which launch none of this package's kernels and note how to compile
them. So values mean nothing. Triton's and FlashAttention-4's kernels are then compiled onto disk,
where the run finds them.

One process imports what the others need, and forks them. The imports take seconds, in which a run
may do other things: it starts a `Compiler` before them, and passes it to `compile_kernels`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import itertools
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .kernels import fa2, fa4, installed, torch_ops
from .merging.merge import empty_lse
from .merging.parts import lies_in
from .ranks.rings import Rings
from .ranks.sequence_parallel import SequenceParallel
from .sparse import InfLLMV2
from .transport import ALONE, Transport
from .transport.imagined import ImaginedRing

KERNELS = (  # the modules of all Triton kernels of a step without biases
    "bmt_burst.merging.fused",
    "bmt_burst.kernels.triton_blocks",
    "bmt_burst.blocks.tiles",
    "bmt_burst.blocks.triton_far",
    "bmt_burst.sparse.triton_choice",
    "bmt_burst.sparse.triton_decoding",
    "bmt_burst.fused.triton_passes",
    "bmt_burst.lightning.triton_blocks",
    "bmt_burst.kernels.triton_few_queries",
)
_PACKAGES = "torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl"
_PLAIN_KERNELS = torch_ops.AtenKernel, torch_ops.CudnnKernel, torch_ops.CpuKernel
_POLL_SECONDS = 0.05
# With this variable, torch.cuda.is_available() in the script of a run, which a Compiler imports,
# does not keep forked processes from using CUDA.
_NO_CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_MOST_PROCESSES, _GIB_OF_PROCESS = 16, 1.5  # of a GPU's memory that is free
_TOKENS, _MOST_TOKENS = 1 << 12, 1 << 15  # of a rank of an example, and with long windows
_FEW_QUERIES = 64  # of a chunk, in documents that begin in the chunk before it

Job = Callable[[], Any]


@dataclass(frozen=True)
class Progress:
    """The progress of `compile_kernels`. Its str is a line for a log.

    count    the kernels that the steps need, as far as is known
    seconds  since it began, 0 if all were on disk
    folders  where the kernels are
    """

    count: int
    seconds: float
    folders: tuple[Path, ...]

    def __str__(self) -> str:
        kernels = f"{self.count} kernel{'s' if self.count != 1 else ''}"
        places = " and ".join(map(str, self.folders))
        if not self.seconds:
            return f"found {kernels} in {places}"
        return f"compiled {kernels} in {self.seconds:.1f} s; kept in {places}"


class Compiler:
    """A process that imports what compiles kernels, and forks others for one `compile_kernels`.

    modules  modules with other Triton kernels of steps

    Forked processes have imported everything, and may use CUDA. Leaving the context ends them all.
    It also imports the run's script, which must guard its work by `__name__ == "__main__"`.
    """

    def __init__(self, *modules: str):
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._messages, others = context.Pipe()
        facts = others, torch.cuda.get_device_capability(), modules
        self._process = context.Process(target=_serve, args=facts)
        with contextlib.ExitStack() as stack:
            if _NO_CUDA_CHECK not in os.environ:
                os.environ[_NO_CUDA_CHECK] = "1"
                stack.callback(os.environ.pop, _NO_CUDA_CHECK)
            # The processes inherit a mask: Ctrl-C stops the run after a step, and would print a
            # traceback of each import. The tracker's start, which Process.start waits for, would
            # reset the mask.
            resource_tracker.ensure_running()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
            self._process.start()
        others.close()
        # an interpreter that ends would otherwise wait for the process
        self._end = util.Finalize(self, _end, (self._messages, self._process), exitpriority=1)

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, unless that was done."""
        self._end()

    def compile(self, *request: Any) -> Iterator[int]:
        """Do what `_compile_all` does with a request. Yield the number of kernels known so far."""
        count, done = 0, False
        self._reach(self._messages.send, request)
        while not done:
            if self._reach(self._messages.poll, _POLL_SECONDS):
                message = self._reach(self._messages.recv)
                if isinstance(message, Exception):
                    raise message
                count, done = message
            yield count

    def _reach(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the connection. Raises RuntimeError if the process has ended."""
        try:
            return function(*arguments)
        except (EOFError, ConnectionError) as error:
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"a process ended with exit code {code}") from error


def settle_keys(*modules: str) -> None:
    """Compute the names of all kernels on disk, also those of other `modules`. Each process of a
    run must call it before it launches a kernel.

    Triton hashes a kernel with those globals of its inner functions that it has seen before. So the
    names depend on the order in which a process computes them.
    """
    from triton import JITFunction

    for module in map(importlib.import_module, (*KERNELS, *modules)):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                _ = kernel.cache_key  # kept from now on


def find_folders() -> list[Path]:
    """Return the folders of compiled kernels. Raises OSError if one cannot be written, or if
    FlashAttention-4 is installed and keeps none.
    """
    from triton import knobs

    folders = [Path(knobs.cache.dir)]
    if installed("flash_attn.cute"):
        folders.append(fa4.cache_folder())
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    return folders


def imagine_ranks(
    rank: int, size: int, inner: int | None = None, side: str | None = None
) -> SequenceParallel:
    """Return this rank's place among imagined ranks, which own as many tokens as this one.

    inner  the ranks of a host, by default all
    side   the side that rings send, "q" or "kv", or None if plans choose it
    """
    inner = inner or size
    if size == 1:
        return SequenceParallel()
    within: Transport = ImaginedRing(rank % inner, inner, side) if inner > 1 else ALONE
    if inner == size:
        return SequenceParallel(rank, size, process_group=within)
    double = Rings(within, ImaginedRing(rank // inner, size // inner, side), double=True)
    double.history.is_grid = True  # as imagined
    return SequenceParallel(
        rank, size, process_group=None, double_group=(double.inner, double.outer)
    )


def sample_documents(
    seq_len: int,
    size: int = 1,
    *,
    chunks: int = 1,
    window: int | None = None,
    sparse: InfLLMV2 | None = None,
) -> list[list[int]]:
    """Return the ends of documents of sequences, from one document to hundreds, as examples of all
    kinds. All have as many tokens, which may be fewer than the `seq_len` of a run.

    size     the ranks of a sequence
    chunks   the chunks of a sequence. Documents end near their borders
    window   the window of some layers
    sparse   the sparse attention of some layers. Some examples have a document that is long enough
             for queries to choose blocks
    """
    ranges = 2 * size * chunks  # zigzag has two in a shard
    # as in the run, a window may end inside of a range
    bands = window or 0, sparse.window_size if sparse else 0
    least = [max(2 * x, min(ranges * x * 3 // 2, _MOST_TOKENS * size)) for x in bands]
    longest = sparse.shortest_document if sparse else 0
    tokens = min(seq_len, max(_TOKENS * size, *least, longest * 5 // 2))
    tokens = -(-tokens // ranges) * ranges
    chance, firsts, found = random.Random(0), sorted({0, min(longest, tokens)}), [[0, tokens]]
    for first, count in itertools.product(firsts, (2, 5)):
        found.append(
            sorted({0, *(first + (tokens - first) * i // count for i in range(count + 1))})
        )
    for first, count in itertools.product(firsts, (3, 9, 40)):
        ends = sorted({0, first})
        while ends[-1] < tokens:
            length = 1 + int(chance.expovariate(count / tokens))
            ends.append(min(tokens, ends[-1] + length))
        found.append(ends)
    for first in firsts:
        found.append(sorted({0, *range(first or 4, tokens, 4), tokens}))
    borders = range(tokens // chunks, tokens, tokens // chunks)
    for before in (_FEW_QUERIES, borders[0] // size) if borders else ():
        near = {border + x for border in borders for x in (-before, _FEW_QUERIES)}
        found.append([0, *sorted(near & {*range(1, tokens)}), tokens])
    return found


def compile_kernels(
    steps: Callable[..., None],
    arguments: Sequence[tuple[Any, ...]],
    tokens: int,
    gpus: int = 1,
    modules: Sequence[str] = (),
    limit: float = math.inf,
    compiler: Compiler | None = None,
) -> Iterator[Progress]:
    """Compile the kernels of some steps, unless they are on disk. Yield what was done so far, until
    all are there: only once if they are on disk.

    steps      a function of a module, called with each of `arguments` on one of the first GPUs
    arguments  facts that have all of their values in their repr
    tokens     the most tokens of a sequence of the run, which may be longer than those of steps
    gpus       how many of this host's GPUs to use
    modules    modules or packages with other Triton kernels of steps, or on whose code these depend
    limit      the most seconds, after which TimeoutError is raised
    compiler   one that was started with these modules, by default a new one. It is ended

    Raises RuntimeError for an error of a process, and OSError as `find_folders`. It ends its
    processes.
    """
    began, folders = time.monotonic(), tuple(find_folders())
    marks = [folder / _name_mark(steps, arguments, tokens, modules) for folder in folders]
    if all(mark.exists() and mark.stat().st_size for mark in marks):
        if compiler:
            compiler.close()  # it may still import, which takes a core
        yield Progress(int(marks[0].read_text()), 0.0, folders)
        return
    free, _ = torch.cuda.mem_get_info()
    room = int(gpus * free / 2**30 / _GIB_OF_PROCESS)
    processes = max(min(len(os.sched_getaffinity(0)), _MOST_PROCESSES, room), 1)
    count = 0
    with compiler or Compiler(*modules) as compiler:
        for count in compiler.compile(processes, gpus, steps, arguments, tokens):
            progress = Progress(count, time.monotonic() - began, folders)
            yield progress
            if progress.seconds > limit:
                raise TimeoutError(f"{progress.count} kernels took more than {limit:.0f} s")
    for mark in marks:
        mark.write_text(f"{count}\n")
    yield Progress(count, time.monotonic() - began, folders)


def _name_mark(
    steps: Callable[..., None],
    arguments: Sequence[tuple[Any, ...]],
    tokens: int,
    modules: Sequence[str],
) -> str:
    """Return the name of a file next to the kernels, by all that they are compiled from."""
    facts = [f"{steps.__module__}.{steps.__qualname__}", repr((arguments, tokens))]
    facts += [torch.cuda.get_device_name(), sys.version]
    facts += sorted(
        f"{x.name} {x.version}" for x in metadata.distributions() if x.name in _PACKAGES
    )
    found = hashlib.sha256("\n".join(facts).encode())
    for name in ("bmt_burst", *modules):
        file = Path(str(importlib.import_module(name).__file__))
        package = file.parent.rglob("*.py") if file.name == "__init__.py" else [file]
        for each in sorted(package):
            found.update(each.read_bytes())
    return f"bmt_burst-{found.hexdigest()[:16]}"


def _end(connection: Connection, process: multiprocessing.process.BaseProcess) -> None:
    """End the process of a Compiler, and those that it forked."""
    connection.close()
    assert process.pid is not None, "it was started"
    with contextlib.suppress(ProcessLookupError):  # without a group, it has forked nothing
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _serve(connection: Connection, capability: tuple[int, int], modules: Sequence[str]) -> None:
    """Be the process of a Compiler: import, and do what the first message asks for."""
    os.setpgrp()  # a group, which Compiler ends
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    torch.set_num_threads(1)
    threading.Thread(target=_follow_run, daemon=True).start()
    try:
        # FlashAttention-4 asks for these when it is imported. Where torch answers them, it
        # initializes CUDA, and forked processes cannot use it.
        with _replacing(
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "get_device_capability", lambda *_: capability),
        ):
            _attempt(settle_keys, *modules)
            fa4.Fa4Kernel().broken()
        _compile_all(connection, *connection.recv())
    except Exception as error:  # noqa: BLE001 - raised in the process of the run
        connection.send(error)
        connection.recv()  # the run has ended this process once it has read the error


def _follow_run() -> None:
    """End this process, and those that it forked, when the run is gone."""
    run = multiprocessing.parent_process()
    assert run is not None, "it started this process"
    run.join()
    os.killpg(0, signal.SIGKILL)


def _compile_all(
    connection: Connection,
    processes: int,
    gpus: int,
    steps: Callable[..., None],
    arguments: Sequence[tuple[Any, ...]],
    tokens: int,
) -> None:
    """Compile the kernels of steps in forked processes. Send (the number known so far, False) again
    and again, which fails if the run has ended, and (the number, True) at the end.

    The run ends the pool, since a pool whose process was killed may wait for ever.
    """
    jobs: dict[Hashable, Any] = {}
    pool = multiprocessing.get_context("fork").Pool(processes, _begin, (connection, gpus))
    workers = multiprocessing.active_children()
    noting = [pool.apply_async(_attempt, (_note, steps, x, tokens)) for x in arguments]
    while noting or not all(job.ready() for job in jobs.values()):
        for noted in [x for x in noting if x.ready()]:
            noting.remove(noted)
            new = {key: job for key, job in noted.get().items() if key not in jobs}
            # what takes longest first: FlashAttention-4's backwards, its forwards, Triton's
            for key in sorted(new, key=str):
                jobs[key] = pool.apply_async(_attempt, (new[key],))
        for worker in workers:  # a pool would wait for the job of one that was killed
            if worker.exitcode is not None:
                raise RuntimeError(f"a process ended with exit code {worker.exitcode}")
        connection.send((len(jobs), False))
        time.sleep(_POLL_SECONDS)
    for job in jobs.values():
        job.get()
    connection.send((len(jobs), True))


def _begin(connection: Connection, gpus: int) -> None:
    """Begin a forked process."""
    connection.close()  # it ends with the process that forked this one
    if torch.cuda.is_available():
        torch.cuda.set_device(os.getpid() % gpus)


def _attempt(job: Callable[..., Any], *arguments: Any) -> Any:
    """Do a job, and raise its errors as RuntimeError: a pool waits forever for an error that cannot
    be made again from its `args`.
    """
    try:
        return job(*arguments)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _note(steps: Callable[..., None], arguments: Sequence[Any], tokens: int) -> dict[Hashable, Job]:
    with note_kernels(tokens) as found:
        steps(*arguments)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # ranks need the memory
    return found


@contextlib.contextmanager
def note_kernels(tokens: int) -> Iterator[dict[Hashable, Job]]:
    """Launch no kernels of attention, nor others of this package, inside. Yield a dict that gets a
    function for each that can be compiled. `tokens` are the most tokens of a sequence of the run.
    """
    from triton import knobs

    from .merging import fused
    from .sparse import triton_choice

    found: dict[Hashable, Job] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        function, data = fn.jit_function, compile["specialization_data"]
        found[data] = functools.partial(_compile, function.module, function.__name__, data)
        return True  # do not go on

    def note_call(kernel: fa4.Fa4Kernel, way: str, q: Tensor, k: Tensor, *of_call: Any) -> None:
        key = way, q.shape[2] // k.shape[2], kernel.variant(of_call[0], len(q))
        facts = way, q.shape, k.shape, q.dtype, q.device.type, *of_call
        found.setdefault(key, functools.partial(_call, *facts))

    def skip_forward(_: Any, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q, memory_format=torch.contiguous_format), empty_lse(q)

    def skip_backward(_: Any, dout: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
        return tuple(map(like, inputs[:3]))

    def forward(kernel, q, k, v, call, spec):
        note_call(kernel, "forward", q, k, call, spec)
        return skip_forward(kernel, q)

    def backward(kernel, dout, q, k, v, out, lse, delta, call, spec):
        note_call(kernel, "backward" if delta is None else "by delta", q, k, call, spec)
        return skip_backward(kernel, dout, q, k, v)

    sum_gradients, merge_outputs = _in_all_ways(fused.sum_gradients, fused.merge_outputs)
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (knobs.runtime, "jit_cache_hook", note),
        (fa4.Fa4Kernel, "forward", forward),
        (fa4.Fa4Kernel, "backward", backward),
        # nothing of others is kept on disk, and cuDNN takes long for each new length of a document
        (fa2.Fa2Kernel, "forward", skip_forward),
        (fa2.Fa2Kernel, "backward", skip_backward),
        *((x, "block_forward", skip_forward) for x in _PLAIN_KERNELS),
        *((x, "block_backward", skip_backward) for x in _PLAIN_KERNELS),
        (fused, "sum_gradients", sum_gradients),
        (fused, "merge_outputs", merge_outputs),
        (triton_choice, "take_largest", _of_all(triton_choice.take_largest, tokens)),
        # 0 is a valid number of anything, as no kernel writes to memory
        (torch, "empty", _filled(torch.empty)),
        (torch, "empty_like", _filled(torch.empty_like)),
        (Tensor, "new_empty", _filled(Tensor.new_empty)),
    )
    with _replacing(*replaced):
        yield found


@contextlib.contextmanager
def _replacing(*replaced: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes by other values: (object, name, value)."""
    with contextlib.ExitStack() as stack:
        for place, name, value in replaced:
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, value)
        yield


def _filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `make`, whose tensors are filled with 0."""
    return lambda *args, **named: make(*args, **named).zero_()


def _compile(module: str, name: str, data: str) -> None:
    """Compile a kernel of Triton, and the C code that launches it."""
    function = getattr(importlib.import_module(module), name)
    _ = function.preload(data).run  # the first access makes what launches it


def _call(way: str, q_shape: Any, k_shape: Any, dtype: Any, device: str, *of_call: Any) -> None:
    """Compute a call of FlashAttention-4, of zeros."""
    q, k = (torch.zeros(shape, dtype=dtype, device=device) for shape in (q_shape, k_shape))
    kernel, lse = fa4.Fa4Kernel(), empty_lse(q).zero_()
    if way == "forward":
        kernel.forward(q, k, k, *of_call)
    elif way == "backward":
        kernel.backward(q, q, k, k, q, lse, None, *of_call)
    else:
        kernel.backward(q, q, k, k, None, lse, lse, *of_call)


def _in_all_ways(*merges: Callable[..., None]) -> list[Callable[..., None]]:
    """Return functions of `merging.fused`. Over several ranks, with the first call of each kind
    they also add up other numbers of parts, of some tokens each, in place or not: masks may ask for
    any of them. A rank alone adds up near and far blocks, and none in place.
    """
    known, waiting, in_place = set[Hashable](), list[Callable[[], None]](), set[bool]()

    def call(merge: Callable[..., None], total: Tensor, *rest: Any) -> None:
        merge(total, *rest)
        *lse, parts = rest
        (heads, size), dtypes = total.shape[2:], (parts[0][1].dtype, parts[-1][1].dtype)
        if (key := (merge, heads, size, total.dtype, dtypes)) not in known:
            known.add(key)
            into, earlier = total.new_empty(2, 1, 16, heads, size)
            rows = [lse[0].new_empty(1, heads, 16) for _ in lse]
            waiting.append(functools.partial(_merge_all, merge, into, earlier, dtypes, rows))
        if in_place or lies_in(parts[0], total):
            in_place.add(True)
            while waiting:
                waiting.pop()()

    return [functools.partial(call, merge) for merge in merges]


def _merge_all(
    merge: Callable[..., None],
    into: Tensor,
    earlier: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
    rows: list[Tensor],
) -> None:
    """Add up parts in all ways. `dtypes` are those of a call's first and last part."""
    other = earlier.to(dtypes[-1])
    firsts = [into, *(earlier.to(dtype) for dtype in {into.dtype, *dtypes})]
    for first, count, spans in itertools.product(firsts, (2, 4, 8), ([(0, 8)], [(0, 4), (8, 12)])):
        merge(into, *rows, [([(0, 16)], first, *rows), *[(spans, other, *rows)] * (count - 1)])


def _of_all(take: Callable[..., None], tokens: int) -> Callable[..., None]:
    """Return `take_largest`, which also takes from the blocks of all lengths up to `tokens`."""

    def call(scores: Tensor, of_last: Tensor, places: Tensor, chosen: Tensor, sparse: Any) -> None:
        take(scores, of_last, places, chosen, sparse)
        groups, blocks = len(scores), sparse.most_blocks + 1
        while blocks < 2 * (tokens // sparse.block_size + 1):
            rows = scores.new_empty(groups, 1, blocks)
            take(rows, rows, places[:1], chosen.new_empty(1, groups, sparse.most_blocks), sparse)
            blocks *= 2

    return call
