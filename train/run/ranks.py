"""Agreement between the ranks of a run, also where there is only one and no torch.distributed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

Result = TypeVar("Result")

LOST_CONTACT = 4  # exit code of a rank that ends since another one is gone
_GONE = re.compile(
    "Connection (closed|reset|refused) by|Broken pipe|Socket closed|remote process exited"
    "|rank [0-9]+( or [0-9]+)* of the group (has ended|gave up|did not make this call)"
)


class RankError(RuntimeError):
    """Something failed on a rank, and every rank knows."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any) -> list[Any]:
    """`value` of every rank, in rank order."""
    values = [None] * world_size()
    if len(values) == 1:
        return [value]
    dist.all_gather_object(values, value)
    return values


def together(work: Callable[[], Result], raising: type[Exception] | None = None) -> Result:
    """Does `work` on every rank and returns this rank's result.

    If it fails on any rank for a reason that lies in files or settings, raises `raising` (default:
    RankError) on every rank, with the reason and the rank. `work` itself must not need the other
    ranks to fail with it.
    """
    result, problem = None, None
    try:
        result = work()
    except (ValueError, OSError, SafetensorError, RankError) as error:
        problem = str(error) or type(error).__name__
    for number, theirs in enumerate(gather(problem)):
        if theirs is not None:
            raise (raising or RankError)(f"rank {number}: {theirs}" if world_size() > 1 else theirs)
    return result


def lost_contact(error: Exception) -> bool:
    """Whether it is what gloo, NCCL or the attention say when a peer is gone."""
    return isinstance(error, (RuntimeError, TimeoutError)) and bool(_GONE.search(str(error)))
