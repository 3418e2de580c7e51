"""Calls of flash-attn-4's compiled kernels without its Python functions.

These functions check their arguments, and look for each kernel by a key of all that it depends on.
That takes the host 0.2 ms for a forward and 0.4 ms for a backward. A program of `fa4_programs`
calls the same kernels in a fraction of that. It is used only after this:

- The package has the version that the programs were read from, and the GPU is a Hopper.
- The first call of a kind goes through the package's function, and its compiled kernels are
  recorded. They, and all their arguments, must be those of the program.
- The program then computes the same call, in memory filled with NaN. Its results must be equal, bit
  for bit where the kernel's are. The GPU compares them, once for each set of kernels.

The host waits for no GPU. It reads the result of the comparison in a later call, if it is there.
Until then, and in all other cases, the package's functions compute. The reason is logged once.

Two calls are of one kind if the package would call the same kernels, with scratch of shapes that
follow from the sizes. Of packed tokens, sizes are no part of the kind.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..spec import Spec
from .fa4_programs import (
    AFTER,
    BACKWARD,
    BEFORE,
    FORWARD,
    MOST_SEQUENCES,
    VERSION,
    BackwardProgram,
    ForwardProgram,
    Options,
    Recorded,
)

logger = logging.getLogger("bmt_burst")

Program = ForwardProgram | BackwardProgram
Tensors = tuple[Tensor, ...]

# Larger calls take the GPU longer than the host. The comparison doubles the memory of results.
_MOST_ENTRIES = 1 << 26

# The package copies tensors that are not aligned like this.
_ALIGNMENT = 16

# Kinds that are kept. A process that exceeds it records the oldest ones again.
_MOST_KINDS = 1024

# Calls of a set of kernels that may be compared until one has a clear result.
_TRIES = 8

# Relative to the largest entry: two units in the last place of bf16. The sums of a backward are
# fp32 and differ only in their order, so that results differ where they round to another neighbour.
_TOLERANCE = 2.0**-6

_DIFFERENT, _EQUAL, _UNCLEAR = range(3)


class Trial:
    """The comparison of a program with the package's function. It is shared by kinds with the same
    kernels.

    trusted  whether they gave the same results
    """

    def __init__(self) -> None:
        self.trusted = False
        self._tries = _TRIES
        self._answer: Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    @property
    def open(self) -> bool:
        """Whether another call must be compared."""
        return not self.trusted and self._answer is None and self._tries > 0

    def begin(self) -> None:
        """Count a comparison."""
        self._tries -= 1

    def ask(self, answer: Tensor) -> None:
        """Take the result of a comparison, which the GPU may not have computed yet."""
        here = answer.to("cpu", non_blocking=True)
        if answer.is_cuda:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(answer.device))
            self._ready = ready
        self._answer = here  # last, as other threads look at it

    def poll(self) -> bool:
        """Return whether the program is trusted. The host does not wait."""
        answer = self._answer
        if answer is None or (
            self._ready is not None and (_capturing() or not self._ready.query())
        ):
            return self.trusted
        self._answer, found = None, int(answer)
        if found == _DIFFERENT:
            self._tries = 0
            _stop("its kernels gave other results when they were called directly")
        elif found == _EQUAL:
            self.trusted = True
        elif not self._tries:
            _say(f"no clear comparison in {_TRIES} calls, whose results were 0 or not finite")
        return self.trusted


@dataclass(frozen=True)
class Kind:
    """A kind of calls. Without a program, the package's function computes them."""

    program: Program | None = None
    trial: Trial | None = None


_kinds: dict[tuple[Any, ...], Kind] = {}
_trials: dict[tuple[int, ...], tuple[tuple[Callable, ...], Trial]] = {}
_changing = threading.Lock()  # held by the thread that records or compares
_stopped: list[str] = []  # why no program is used any more


def forward(
    function: Callable, q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec
) -> Tensors:
    """Compute out and lse with the package's `function`, or as it would."""

    def call() -> Tensors:
        scores = _score_arguments(spec)
        return tuple(function(q, k, v, return_lse=True, **scores, **options.arguments())[:2])

    return _launch(ForwardProgram, function, call, (q, k, v), options, spec)


def backward(
    function: Callable,
    inputs: Sequence[Tensor],
    dlse: Tensor | None,
    options: Options,
    spec: Spec,
) -> Tensors:
    """Compute dq, dk and dv of (q, k, v, out, dout, lse) with the package's `function`, or as it
    would.

    dlse is the gradient of lse, or None for 0.
    """

    def call() -> Tensors:
        extra: dict[str, Any] = {} if dlse is None else {"dlse": dlse}
        extra |= {"deterministic": spec.deterministic, **_score_arguments(spec)}
        return tuple(function(*inputs, **extra, **options.arguments())[:3])

    return _launch(BackwardProgram, function, call, (*inputs, dlse), options, spec)


def _score_arguments(spec: Spec) -> dict[str, float]:
    """Return the arguments for the scale and the softcap."""
    scale = {"softmax_scale": spec.scale}
    return scale if spec.softcap is None else {**scale, "softcap": spec.softcap}


def _launch(
    program: type[Program],
    function: Callable,
    call: Callable[[], Tensors],
    inputs: tuple[Any, ...],
    options: Options,
    spec: Spec,
) -> Tensors:
    """Compute with a program if one is known and trusted, otherwise by `call`."""
    if not _fits(function, inputs, options):
        return call()
    key = _key(program, inputs, options, spec)
    kind = _kinds.get(key)
    if kind is None:
        return _begin(key, program, function, call, inputs, options, spec)
    if kind.program is None or kind.trial is None:
        return call()
    if kind.trial.trusted or kind.trial.poll():
        try:
            return kind.program.run(inputs, options, spec.scale, spec.deterministic)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - said, and then the package's function decides
            _stop(f"its kernels failed when they were called directly: {error!r}")
            return call()
    results = call()
    if kind.trial.open and not _capturing() and _changing.acquire(blocking=False):
        try:
            _compare_program(kind, inputs, options, spec, results)
        finally:
            _changing.release()
    return results


def _fits(function: Callable, inputs: tuple[Any, ...], options: Options) -> bool:
    """Return whether a program may compute a call."""
    q, k, v = inputs[:3]
    if _stopped or _refusal(function, q.device) is not None or v.shape != k.shape:
        return False
    if not (0 < q.numel() <= _MOST_ENTRIES and 0 < k.numel() <= _MOST_ENTRIES):
        return False
    if options.cu_seqlens_q is not None and len(options.cu_seqlens_q) - 1 > MOST_SEQUENCES:
        return False
    return all(x is None or (type(x) is Tensor and x.data_ptr() % _ALIGNMENT == 0) for x in inputs)


def _key(
    program: type[Program], inputs: tuple[Any, ...], options: Options, spec: Spec
) -> tuple[Any, ...]:
    """Return all that the kernels of a call, and the way they are called, depend on."""
    q, k = inputs[:2]
    packed = options.packed
    return (
        program,
        q.device,
        q.dtype,
        packed,
        q.shape[-2:] if packed else q.shape,
        k.shape[-2:] if packed else k.shape,
        options.causal,
        options.left is None,
        options.right is None,
        spec.softcap,
        spec.deterministic,
        *[None if x is None else _layout(x) for x in inputs],
    )


def _layout(x: Tensor) -> bool | tuple[int, ...]:
    """Return True for a contiguous tensor, otherwise its strides. The package's kernels have
    strides of 0 in their code.
    """
    strides = x.stride()
    return (x.is_contiguous() and 0 not in strides) or strides


@functools.cache
def _refusal(function: Callable, device: torch.device) -> str | None:
    """Return why no program may replace a function of the package on a device, or None."""
    if device.type != "cuda":
        return f"tensors are on {device}"
    reason = None
    if torch.cuda.get_device_capability(device) != (9, 0):
        reason = f"{torch.cuda.get_device_name(device)} is not of compute capability 9.0"
    elif (version := _version()) != VERSION:
        reason = f"this is version {version}"
    elif missing := [
        name for name in (FORWARD, BACKWARD, BEFORE, AFTER) if not _cache(function, name)
    ]:
        reason = f"{missing[0]} keeps no compiled kernels"
    if reason is not None:
        _say(f"their kernels are known of {VERSION} on Hopper, and {reason}")
    return reason


def _version() -> str | None:
    """Return the version of flash-attn-4, or None if it is not installed as a package."""
    try:
        return importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _say(reason: str) -> None:
    """Log once why the package's functions are called."""
    logger.info("flash-attn-4 is called by its Python functions: %s", reason)


def _stop(reason: str) -> None:
    """Use no program any more, and say why."""
    if not _stopped:
        logger.warning(
            "from now on flash-attn-4 is called by its Python functions, which takes the host "
            "longer: %s",
            reason,
        )
    _stopped.append(reason)


def _capturing() -> bool:
    """Return whether a CUDA graph is captured, in which events cannot be asked."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _begin(
    key: tuple[Any, ...],
    program: type[Program],
    function: Callable,
    call: Callable[[], Tensors],
    inputs: tuple[Any, ...],
    options: Options,
    spec: Spec,
) -> Tensors:
    """Compute the first call of a kind by `call`, and find its program.

    A thread that finds another one at this computes only.
    """
    if _capturing() or not _changing.acquire(blocking=False):
        return call()
    try:
        calls: list[Recorded] = []
        with _recording(function, calls):
            results = call()
        kind = Kind()
        try:
            found = program.of(calls, inputs, results, options, spec.scale, spec.deterministic)
        except Exception as error:  # noqa: BLE001 - whatever the package has changed
            _say(f"their kernels are not called as expected: {error}")
        else:
            kernels = found.kernels
            _, trial = _trials.setdefault(tuple(map(id, kernels)), (kernels, Trial()))
            kind = Kind(found, trial)
            if trial.open:
                _compare_program(kind, inputs, options, spec, results)
        while len(_kinds) >= _MOST_KINDS:
            del _kinds[next(iter(_kinds))]
        _kinds[key] = kind
        return results
    finally:
        _changing.release()


def _compare_program(
    kind: Kind, inputs: tuple[Any, ...], options: Options, spec: Spec, results: Tensors
) -> None:
    """Compute a call by its program too, and let the GPU compare the results."""
    assert kind.program is not None and kind.trial is not None
    exact = isinstance(kind.program, ForwardProgram) or spec.deterministic
    kind.trial.begin()
    try:
        own = kind.program.run(inputs, options, spec.scale, spec.deterministic, poison=True)
        kind.trial.ask(_compare(own, results, exact))
    except torch.OutOfMemoryError:
        if not kind.trial.open:
            _say(f"memory was short in {_TRIES} calls that were to be compared")
    except Exception as error:  # noqa: BLE001 - said, and the package's results are there
        _stop(f"its kernels failed when they were called directly: {error!r}")


def _compare(found: Tensors, expected: Tensors, exact: bool) -> Tensor:
    """Return _EQUAL or _DIFFERENT, or _UNCLEAR if the expected results say nothing."""
    equal, clear = [], []
    for mine, other in zip(found, expected, strict=True):
        if exact:
            bits = torch.int16 if other.itemsize == 2 else torch.int32
            equal.append(mine.view(bits).eq(other.view(bits)).all())
            clear.append(~other.isnan().any())
        else:
            size = other.abs().amax().float()
            equal.append((mine - other).abs().amax().float() <= _TOLERANCE * size)
            clear.append(size.isfinite() & (size > 0))
    same, said = torch.stack(equal).all(), torch.stack(clear).all()
    return torch.where(said, same.to(torch.uint8), _UNCLEAR)


class _Recorder:
    """A function's cache of compiled kernels, which notes the kernels that one thread calls."""

    def __init__(self, cache: Any, owner: str, calls: list[Recorded]):
        self._cache, self._owner, self._calls = cache, owner, calls
        self._thread = threading.get_ident()

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, kernel: Callable) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: Any) -> Callable:
        kernel = self._cache[key]
        if threading.get_ident() != self._thread:
            return kernel

        def call(*arguments: Any) -> Any:
            self._calls.append(Recorded(self._owner, key, kernel, arguments))
            return kernel(*arguments)

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@contextlib.contextmanager
def _recording(function: Callable, calls: list[Recorded]) -> Iterator[None]:
    """Note the compiled kernels that this thread calls through the package's functions."""
    owners = {name: _owner(function, name) for name in (FORWARD, BACKWARD, BEFORE, AFTER)}
    caches = {name: owner.compile_cache for name, owner in owners.items()}
    for name, owner in owners.items():
        owner.compile_cache = _Recorder(caches[name], name, calls)
    try:
        yield
    finally:
        for name, owner in owners.items():
            owner.compile_cache = caches[name]


def _owner(function: Callable, name: str) -> Any:
    """Return the function `name` of the module of `function`, or None."""
    return getattr(sys.modules.get(function.__module__), name, None)


def _cache(function: Callable, name: str) -> bool:
    """Return whether a function of the package keeps its compiled kernels."""
    return hasattr(_owner(function, name), "compile_cache")
