"""Loaders that give all ranks of a group the same data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader


@dataclass(frozen=True)
class GroupState:
    """The state of processes for accelerate's DataLoaderDispatcher, which counts groups here.

    The ranks of the first group read a stream. All ranks then receive the batch of rank 0, and take
    the part of their group.
    """

    process_index: int
    num_processes: int
    device: torch.device


def seed_workers_by_group(loader: DataLoader, rank: int, index: int) -> None:
    """Let the workers of all ranks in a group draw the same numbers.

    Replaces the rank in transformers' seed_worker.
    """
    function: Any = loader.worker_init_fn
    if isinstance(function, functools.partial) and function.keywords.get("rank") == rank:
        loader.worker_init_fn = functools.partial(
            function.func, *function.args, **{**function.keywords, "rank": index}
        )


def keep_order(loader: DataLoaderShard) -> None:
    """Let all ranks draw one order, since accelerate synchronises no generator without shards."""
    for owner in (loader.get_sampler(), loader.dataset):
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
            loader.synchronized_generator = generator
            loader.rng_types = [*(loader.rng_types or ()), "generator"]
    loader.rng_types = [*(loader.rng_types or ()), "torch"]
