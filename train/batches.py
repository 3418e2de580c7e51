"""Which sequences a rank reads, and its part of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from bmt_burst import Layout, SequenceParallel
from train.config import TrainConfig
from train.data import Sequences

_LARGEST_DEFAULT = 8  # sequences


class Batches:
    """Micro-batches of this rank: whole sequences of its data parallel group, cut over its sequence parallel ranks.

    A micro-batch is tokens and labels, (micro-batch size, S_local) int64, on `device`. `positions` (S_local,) are those
    of its columns in the whole sequence. Raises ValueError for sizes that do not fit the ranks.
    """

    def __init__(self, config: TrainConfig, sp: SequenceParallel, device: torch.device):
        self.config, self.sp, self.device = config, sp, device
        self.dp_rank, self.dp_size = dist.get_rank() // sp.size, dist.get_world_size() // sp.size
        self.micro_batch_size = _micro_batch_size(config, self.dp_size)
        Layout(config.layout, config.seq_len, sp.size)
        self.positions = sp.positions(config.seq_len, device)

    def of_step(self, data: Sequences, first: int) -> list[tuple[Tensor, Tensor]]:
        """The micro-batches of a step whose first sample in the run is `first`.

        The samples of a step are dealt to the groups in one order that does not depend on how many groups there are.
        """
        size, share = self.micro_batch_size, self.config.batch_size // self.dp_size
        first += self.dp_rank * share
        return [
            self._read(data, [data.order(sample) for sample in range(start, start + size)])
            for start in range(first, first + share, size)
        ]

    def of_evaluation(self, data: Sequences) -> Iterator[tuple[Tensor, Tensor]]:
        """Micro-batches of evenly spaced sequences; equally many on every rank, since all must take part."""
        size = self.micro_batch_size
        count = min(self.config.eval_sequences, len(data))
        chosen: list[int | None] = [i * len(data) // count for i in range(count)]
        chosen += [None] * (-count % (size * self.dp_size))
        for start in range(self.dp_rank * size, len(chosen), size * self.dp_size):
            yield self._read(data, chosen[start : start + size])

    def _read(self, data: Sequences, indices: list[int | None]) -> tuple[Tensor, Tensor]:
        tokens, labels = data.batch(indices)
        return self.sp.shard(tokens).to(self.device), self.sp.shard(labels).to(self.device)


def _micro_batch_size(config: TrainConfig, dp_size: int) -> int:
    """As configured, or the largest default that divides a data parallel group's share of the batch."""
    share, rest = divmod(config.batch_size, dp_size)
    size = config.micro_batch_size
    if rest:
        fitting = [n for n in (config.batch_size - rest, config.batch_size - rest + dp_size) if n]
        raise ValueError(
            f"batch_size={config.batch_size} does not divide by {dp_size} data parallel groups: "
            f"give --batch-size {' or '.join(map(str, fitting))}"
        )
    if size and share % size:
        raise ValueError(
            f"batch_size={config.batch_size} is not a multiple of micro_batch_size={size} "
            f"times {dp_size} data parallel groups: leave --micro-batch-size out, or give one that divides {share}"
        )
    return size or max(n for n in range(1, _LARGEST_DEFAULT + 1) if share % n == 0)
