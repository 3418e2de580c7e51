"""Constants of a machine, by which "auto" predicts how long each strategy takes.

Constants are built in for some GPUs. `python -m bmt_burst.doctor --measure` measures those of
another machine, and writes them to the file that `measured_file` names. A measured file comes
before what is built in. The environment variable BMT_BURST_MACHINE names another file, which is
used on any GPU. All ranks of a call use rank 0's constants.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VARIABLE = "BMT_BURST_MACHINE"
BACKWARD = 2.5  # operations of a backward, relative to its forward


@dataclass(frozen=True)
class Rates:
    """The rates of a machine per second: operations, bytes between ranks of a host, and bytes
    between hosts.

    backward_operations  operations per second of a backward, if they differ
    call_keys            what a kernel call costs for each of its queries beside the visible pairs,
                         in keys: blocks that are partly visible, the sums of its results, and its
                         launch
    """

    operations: float = 600e12
    bytes: float = 300e9
    host_bytes: float = 40e9
    backward_operations: float | None = None
    call_keys: float = 0.0


_RATES = ("operations", "bytes", "host_bytes")  # that a file of constants must have

# Fitted to the rows of bmt_burst in bench/results/attention-*-nvidia-h200*.jsonl, with FA4. See
# tests/test_timeline.py for how near they are.
H200 = Rates(650e12, backward_operations=600e12, call_keys=500.0)


@dataclass(frozen=True)
class BiasedTimes:
    """The costs of a bias with a kernel, relative to the same kernel without one.

    by_distance, by_segments  the time of a pair with a row of its own that depends on its distance,
                              or on two segments: forward and backward. The backward also finds the
                              gradient of the table.
    calls                     the host time of any call of a problem with a bias
    """

    by_distance: tuple[float, float]
    by_segments: tuple[float, float]
    calls: int


# By kernel. FA4's are those of CPM-Bee at 64K tokens on one H200. A predicted forward and backward
# is 12 % too short there, and 2 % at 256K (bench/results/bias-1-nvidia-h200.jsonl).
BIASED_TIMES = {"fa4": BiasedTimes((1.4, 2.2), (2.0, 6.0), 4)}


@dataclass(frozen=True)
class HostWork:
    """The work that the host enqueues for a forward, a backward, or both.

    calls       kernel calls. With a bias each counts as `BiasedTimes.calls`.
    deliveries  deliveries, and copies from the memory into which one was received, together
    messages    copies of bytes that one of these consists of
    """

    calls: int = 0
    deliveries: int = 0
    messages: int = 0

    def __add__(self, other: HostWork) -> HostWork:
        return HostWork(
            self.calls + other.calls,
            self.deliveries + other.deliveries,
            self.messages + other.messages,
        )


@dataclass(frozen=True)
class Machine:
    """The constants of a machine.

    gpu               the name that torch gives the GPU
    kernel            the kernel that `rates` belong to
    step_seconds      host time of a forward and backward, beside what follows
    call_seconds      host time of a kernel's forward and its backward
    delivery_seconds  host time of a delivery
    message_seconds   host time of each message of a delivery
    """

    gpu: str
    kernel: str
    rates: Rates
    step_seconds: float
    call_seconds: float
    delivery_seconds: float
    message_seconds: float

    @functools.cached_property
    def line(self) -> str:
        """The constants as JSON."""
        return json.dumps(dataclasses.asdict(self))

    def host_seconds(self, work: HostWork) -> float:
        """Return the host time of a forward and backward, which together are `work`."""
        return (
            self.step_seconds
            + work.calls * self.call_seconds / 2
            + work.deliveries * self.delivery_seconds
            + work.messages * self.message_seconds
        )


# Host times are those of one H200's machine: bench/results/host-time-1-nvidia-h200.jsonl.
_H200 = Machine("NVIDIA H200", "fa4", H200, 1250e-6, 350e-6, 100e-6, 6e-6)
# An H100 SXM has the H200's processors and links.
_BUILT_IN = {m.gpu: m for m in (_H200, dataclasses.replace(_H200, gpu="NVIDIA H100 80GB HBM3"))}

_in_use: list[Machine | None] = []  # that of `use_machine`, if it was called


def use_machine(machine: Machine | None) -> None:
    """Use these constants on this rank from now on, or none: then "auto" predicts nothing.

    Call it on all ranks. A run that resumes calls it, because with other constants "auto" could
    take other strategies, and these compute other bits.
    """
    _in_use[:] = [machine]


def use_own_machine() -> None:
    """Use the constants of this rank's GPU again."""
    _in_use.clear()


def machine_of(device: torch.device) -> Machine | None:
    """Return the constants for a device, or None if there are none for it.

    Files and BMT_BURST_MACHINE are read once in a process. Raises ValueError if a file of constants
    cannot be read.
    """
    if _in_use:
        return _in_use[0]
    return _read_constants(device)


def machine_line(device: torch.device) -> str | None:
    """Return the `line` of the constants for a device, or None if there are none for it."""
    machine = machine_of(device)
    return machine.line if machine else None


def measured_file(gpu: str) -> Path:
    """Return the path of the constants that the doctor measures on a GPU of this name."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "bmt_burst" / f"{gpu.replace(' ', '-').replace('/', '-')}.json"


def parse_machine(text: str, source: str) -> Machine:
    """Return the constants in `line`. Raises ValueError that names the source if they are wrong.

    All numbers are read as floats: a whole number may be too large to divide by. The rates of
    `_RATES` have no defaults here, since those of another machine would be used silently.
    """
    expected = [f.name for f in dataclasses.fields(Machine)]
    try:
        fields = json.loads(text, parse_int=float)
        rates = Rates(**fields["rates"])
        if missing := [name for name in _RATES if name not in fields["rates"]]:
            raise ValueError(f"rates lack {missing}")
        machine = Machine(**{**fields, "rates": rates})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"expected {source} to have {expected} in JSON: {error}") from error
    for name, value in _numbers(machine):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"expected {name} of {source} to be a number, got {value!r}")
        if not (0 <= value < math.inf if name == "call_keys" else 0 < value < math.inf):
            raise ValueError(f"expected {name} of {source} to be positive, got {value}")
    if not (isinstance(machine.gpu, str) and isinstance(machine.kernel, str)):
        raise ValueError(f"expected gpu and kernel of {source} to be names")
    return machine


def _numbers(machine: Machine) -> list[tuple[str, Any]]:
    values = {**vars(machine.rates), **vars(machine)}
    values = {x: v for x, v in values.items() if x not in ("gpu", "kernel", "rates", "line")}
    if values["backward_operations"] is None:
        del values["backward_operations"]
    return list(values.items())


@functools.cache
def _read_constants(device: torch.device) -> Machine | None:
    if named := os.environ.get(VARIABLE):
        return _read(Path(named), f"{VARIABLE}={named}")
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_name(device)
    measured = measured_file(gpu)
    if not measured.exists():
        return _BUILT_IN.get(gpu)
    machine = _read(measured, str(measured))
    if machine.gpu != gpu:
        raise ValueError(f"expected {measured} to have the constants of {gpu}, got {machine.gpu}'s")
    return machine


def _read(path: Path, source: str) -> Machine:
    try:
        if path.exists() and not path.is_file():  # a pipe would block
            raise ValueError(f"expected {source} to be a file")
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {source}: {error}") from error
    return parse_machine(text, source)
