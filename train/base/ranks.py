"""Agreement between the ranks of a run, also where there is only one and no torch.distributed."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from bmt_burst.errors import RankFailed, RankGone
from train.base.files import printing
from train.base.wording import show_options

Result = TypeVar("Result")
Group = dist.ProcessGroup | None

_SHOWN = 3  # ranks that an error names
LOST_CONTACT = 4  # exit code of a rank that ends because another one is gone
# torch has no class for a peer that gloo or NCCL lost. gloo's errors name its source file, NCCL's
# their code.
_LOST_PEER = ("gloo/transport", "ncclRemoteError")


class RankError(RuntimeError):
    """A failure on one rank, raised on every rank."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def check_environment() -> None:
    """Raise ValueError if the variables of this rank are wrong: it would wait for others."""
    for name, count in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        for variable in (name, count):
            if not (value := os.environ.get(variable, "0")).isdecimal():
                raise ValueError(
                    f"expected a number in the environment variable {variable}, got {value!r}"
                )
        own, size = os.environ.get(name), os.environ.get(count)
        if own and size and int(own) >= int(size):
            raise ValueError(f"expected {name} below {count}, which is {size}, got {own}")
    needed = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if "RANK" in os.environ and (missing := [name for name in needed if name not in os.environ]):
        raise ValueError(
            f"RANK is set without {', '.join(missing)}: set them for each rank as well, or start "
            "the ranks with torchrun or --processes"
        )


def gather(value: Any, group: Group = None) -> list[Any]:
    """Return `value` of every rank. A thread needs a `group` of its own, with all ranks."""
    values = [None] * world_size()
    if len(values) == 1:
        return [value]
    dist.all_gather_object(values, value, group=group)
    return values


def together(
    work: Callable[[], Result], raising: type[RankError] = RankError, group: Group = None
) -> Result:
    """Do `work` on every rank, and return this rank's result.

    If it fails on one rank, every rank raises `raising` with the reason and the rank. A rank that
    fails must not leave others waiting inside `work`. `group` is that of `gather`.
    """
    results: list[Result] = []
    problem: str | None = None
    try:
        results.append(work())
    except (ValueError, OSError, SafetensorError, RankError) as error:
        problem = str(error) or type(error).__name__
    for number, reason in enumerate(gather(problem, group)):
        if reason is not None:
            where = f"rank {number}: " if world_size() > 1 else ""
            raise raising(where + reason)
    [result] = results
    return result


def on_first(
    work: Callable[[], None], raising: type[RankError] = RankError, group: Group = None
) -> None:
    """Do `work` on rank 0 while the others wait. Every rank raises `raising` if it fails."""
    together(lambda: work() if rank() == 0 else None, raising, group)


def check_same(options: Mapping[str, Any], advice: str = "give all ranks the same options") -> None:
    """Raise RankError on every rank if a rank has other options, by name, than rank 0."""
    (_, first), *others = gather((socket.gethostname(), options))
    expected: dict[str, Any] = {}
    got: list[str] = []
    for number, (host, theirs) in enumerate(others, start=1):
        names = [x for x in {**first, **theirs} if theirs.get(x) != first.get(x)]
        if names and len(got) < _SHOWN:
            expected |= {name: first.get(name) for name in names}
            options = {name: theirs.get(name) for name in names}
            got.append(f"{show_options(options)} on rank {number} of {host}")
    if got:
        raise RankError(
            f"expected {show_options(expected)} on all ranks, as on rank 0, got {', '.join(got)}: "
            f"{advice}"
        )


def say(text: str) -> None:
    """Print a line, on rank 0."""
    if rank() == 0:
        with printing():
            print(text, flush=True)


def warn(text: str) -> None:
    """Print a line to stderr, on rank 0."""
    if rank() == 0:
        print(text, file=sys.stderr)


def lost_contact(error: Exception) -> bool:
    """Whether attention, torch's store, gloo or NCCL report that another rank failed or is gone."""
    if isinstance(error, RankFailed | RankGone):
        return True
    if isinstance(error, dist.DistNetworkError):
        return dist.is_initialized()
    return isinstance(error, RuntimeError) and any(name in str(error) for name in _LOST_PEER)
