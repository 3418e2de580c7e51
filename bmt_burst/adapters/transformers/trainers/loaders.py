"""Data for groups of ranks: streams that are shared out, and loaders that keep one order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import _PYTORCH_DATALOADER_KWARGS, DataLoaderShard
from torch.utils.data import DataLoader, IterableDataset

_SET_BY_US = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}


class GroupStream(IterableDataset):
    """The part of a stream that one group reads: a batch of each round of batches.

    The rows of a last, incomplete round are shared out as accelerate's DataLoaderDispatcher does,
    so that all groups have equally many. Some groups then repeat rows of the first round.

    remainder  the number of rows in the last round if it was incomplete, else 0, once it was read
    """

    def __init__(self, dataset: Any, batch: int, index: int, count: int, drop_last: bool):
        self.dataset, self.batch, self.index, self.count = dataset, batch, index, count
        self.drop_last, self.remainder = drop_last, 0

    def __len__(self) -> int:
        """Return the rows of this group. Raises TypeError if the stream has no length."""
        rounds, rest = divmod(len(self.dataset), self.batch * self.count)
        last = 0 if self.drop_last else -(-rest // self.count)
        return rounds * self.batch + last

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.remainder, first = 0, None
        rows = iter(self.dataset)
        while joined := [*itertools.islice(rows, self.batch * self.count)]:
            first = first or joined[: self.count]
            share = self.batch
            if len(joined) < share * self.count:
                if self.drop_last:
                    return
                self.remainder, share = len(joined), -(-len(joined) // self.count)
                joined += [*itertools.islice(itertools.cycle(first), share * self.count)]
            yield from joined[self.index * share : (self.index + 1) * share]


def share_stream(loader: DataLoader, index: int, count: int, split_batches: bool) -> DataLoader:
    """Return a loader of this group's part of an IterableDataset."""
    batch = loader.batch_size
    if batch is None:
        raise ValueError(
            "expected a DataLoader with a batch_size over an IterableDataset, got batch_size=None: "
            "let the loader make the batches"
        )
    if split_batches:
        if batch % count:
            raise ValueError(
                f"split_batches: expected a batch size that {count} groups divide, got {batch}"
            )
        batch //= count
    stream = GroupStream(loader.dataset, batch, index, count, loader.drop_last)
    kept = {k: getattr(loader, k) for k in _PYTORCH_DATALOADER_KWARGS if k not in _SET_BY_US}
    if not loader.num_workers:
        kept.pop("prefetch_factor")
    return DataLoader(stream, batch_size=batch, drop_last=loader.drop_last, **kept)


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
    """Let all ranks draw the same order from a loader that accelerate does not shard: it then
    synchronises no generator.
    """
    sampler = loader.get_sampler()
    for owner in (sampler, loader.dataset):
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
            loader.synchronized_generator = generator
            loader.rng_types = [*(loader.rng_types or ()), "generator"]
    loader.rng_types = [*(loader.rng_types or ()), "torch"]
