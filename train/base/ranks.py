"""Agreement between the ranks of a run, also where there is only one and no torch.distributed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from bmt_burst.errors import RankFailed, RankGone
from train.base.files import printing

Result = TypeVar("Result")
Group = dist.ProcessGroup | None

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
