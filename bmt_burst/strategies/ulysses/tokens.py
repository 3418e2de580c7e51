"""The tokens of a host: which they are, and where they lie in memory."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...base.streams import current_stream, send_to_device
from ...sequence.layout import Layout, Run
from ...sequence.span import Span, length, shifted

# runs of a rank's positions; views of more take longer to make than kernels that sort
_MOST_JOINED_RUNS = 4


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
        steps = (run.step for run in itertools.chain.from_iterable(runs) if length(run.span) > 1)
        return all(step == 1 for step in steps) and max(map(len, runs)) <= _MOST_JOINED_RUNS

    @functools.cached_property
    def spans(self) -> list[list[tuple[Span, Span]]]:
        """For each rank, spans of its tokens, and their places in memory."""
        if not self.is_sorted:
            starts = itertools.accumulate(self.counts, initial=0)
            pairs = zip(self.counts, starts, strict=False)
            return [[((0, count), (at, at + count))] for count, at in pairs]
        whole = self.hosts.runs(self.host)
        firsts = [run.start for run in whole]

        def place(run: Run) -> tuple[Span, Span]:
            start, _, _, (at, _) = whole[bisect.bisect(firsts, run.start) - 1]
            return run.span, shifted(run.span, at + run.start - start - run.span[0])

        return [[*map(place, self.hosts.layout.runs(rank))] for rank in self.ranks]

    @functools.cached_property
    def order(self) -> list[tuple[int, Span]]:
        """All tokens in the order of memory: ranks, counted on this host, and spans of theirs."""
        found = [(at, rank, span) for rank, spans in enumerate(self.spans) for span, at in spans]
        return [(rank, span) for _, rank, span in sorted(found) if length(span)]

    def sort(self, x: Tensor) -> Tensor:
        """Return x (B, N, ...) with tokens in the order of their positions, from that of memory."""
        return x if self.is_sorted else x.index_select(1, self._orders(x.device)[0])

    def unsort(self, x: Tensor) -> Tensor:
        """Return x (B, N, ...) with tokens in the order of memory, from that of their positions."""
        return x if self.is_sorted else x.index_select(1, self._orders(x.device)[1])

    def _orders(self, device: torch.device) -> tuple[Tensor, Tensor]:
        hosts = self.hosts
        return _orders(hosts.layout, hosts.inner, self.host, device, current_stream(device))


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
