"""The tokens of a host: which they are, and where they lie in memory."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...base.streams import current_stream, send_to_device
from ...sequence.layout import Layout
from ...sequence.span import Span

# runs of a rank's positions; more messages take longer to enqueue than kernels that sort
_MOST_COPIED_RUNS = 4


class HostLayout(Layout):
    """The layout of tokens on hosts of `inner` ranks each. `layout` is that of the ranks.

    A host has its tokens in rising order.
    """

    name = "of hosts"

    def __init__(self, layout: Layout, inner: int):
        super().__init__(layout.seq_len, layout.size // inner)
        self.layout, self.inner = layout, inner

    def ranges(self, rank: int) -> Sequence[range]:
        if self.size == 1:
            return [range(self.seq_len)]
        shards = self.layout.shards[rank * self.inner : (rank + 1) * self.inner]
        ranges = sorted(itertools.chain.from_iterable(shards), key=lambda r: r.start)
        if any(r.step > 1 for r in ranges):
            ranges = [range(i, i + 1) for i in sorted(itertools.chain.from_iterable(ranges))]
        found: list[range] = []
        for r in ranges:
            if found and found[-1].stop == r.start:
                found[-1] = range(found[-1].start, r.stop)
            else:
                found.append(r)
        return found

    def places(self, rank: int) -> Tensor:
        """Return where the tokens of a rank lie among those of its host: (S,) int64."""
        positions = self.layout.positions(rank)
        if self.size == 1:
            return positions
        return torch.searchsorted(self.positions(rank // self.inner), positions)


class HostTokens:
    """The tokens of a host as its ranks exchange them.

    They lie in the order of their positions, if that takes few copies. Otherwise they lie in the
    order of the ranks, and `sort` brings them into the order of their positions.

    counts  the number of tokens of each rank
    """

    def __init__(self, hosts: HostLayout, host: int):
        self.hosts, self.host = hosts, host
        self.ranks = range(host * hosts.inner, (host + 1) * hosts.inner)
        self.counts = [hosts.layout.length(rank) for rank in self.ranks]
        self.total = sum(self.counts)

    @functools.cached_property
    def is_sorted(self) -> bool:
        """Whether tokens lie in the order of their positions."""
        runs = [self.hosts.layout.runs(rank) for rank in self.ranks]
        steps = (run.step for run in itertools.chain.from_iterable(runs) if run.length > 1)
        return all(step == 1 for step in steps) and max(map(len, runs)) <= _MOST_COPIED_RUNS

    @functools.cached_property
    def spans(self) -> list[list[tuple[Span, int]]]:
        """For each rank, spans of its tokens, and where each begins in memory."""
        if not self.is_sorted:
            starts = itertools.accumulate(self.counts, initial=0)
            return [[((0, count), at)] for count, at in zip(self.counts, starts, strict=False)]
        whole = self.hosts.runs(self.host)
        firsts = [run.start for run in whole]

        def place(position: int) -> int:
            run = whole[bisect.bisect(firsts, position) - 1]
            return run.offset + position - run.start

        return [
            [((run.offset, run.offset + run.length), place(run.start)) for run in runs]
            for runs in map(self.hosts.layout.runs, self.ranks)
        ]

    def sort(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return tensors (B, N, ...) with tokens in the order of their positions, from those in
        memory.
        """
        return tensors if self.is_sorted else self._permute(tensors, 0)

    def unsort(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return tensors (B, N, ...) as they lie in memory, from those in the order of their
        positions.
        """
        return tensors if self.is_sorted else self._permute(tensors, 1)

    def _permute(self, tensors: Sequence[Tensor], way: int) -> list[Tensor]:
        """Return tensors in the order of their positions (`way` 0) or of memory (1)."""
        if not tensors:
            return []
        device, hosts = tensors[0].device, self.hosts
        order = _orders(hosts.layout, hosts.inner, self.host, device, current_stream(device))[way]
        return [x.index_select(1, order) for x in tensors]


@functools.lru_cache(maxsize=4)  # large on GPUs where every step has a layout of its own
def _orders(
    layout: Layout, inner: int, host: int, device: torch.device, stream: torch.cuda.Stream | None
) -> tuple[Tensor, Tensor]:
    """Return the indices (N,) that sort the tokens of a host's ranks, and those that undo it, for
    work on `stream`. The CPU does not wait for the GPU.
    """
    hosts = HostLayout(layout, inner)
    places = torch.cat([hosts.places(rank) for rank in range(host * inner, (host + 1) * inner)])
    both = send_to_device(torch.stack((places.argsort(), places)), device)
    return both[0], both[1]
