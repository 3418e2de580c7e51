"""The tokens of a host: which they are, and where they lie in memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...base.streams import Stream, current_stream, send_to_device
from ...sequence.layout import Layout
from ...sequence.span import Span, in_turn, length, merged

# runs of a rank's positions; more of them are more messages than kernels that sort are worth
_MOST_RUNS = 4


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
        spans = list[Span]()
        for positions in itertools.chain.from_iterable(shards):
            if positions.step == 1:
                spans.append((positions.start, positions.stop))
            else:
                spans += [(position, position + 1) for position in positions]
        return [range(*span) for span in merged(spans)]


class HostTokens:
    """The tokens of a host as its ranks exchange them.

    They lie in the order of their positions, if that takes few messages. Otherwise they lie in the
    order of the ranks, and `sort` brings them into the order of their positions.

    counts     the number of tokens of each rank
    is_sorted  whether tokens lie in the order of their positions
    parts      (rank, span of its tokens, their place in memory), in the order of places
    """

    def __init__(self, hosts: HostLayout, host: int):
        self.hosts, self.host, layout = hosts, host, hosts.layout
        ranks = range(host * hosts.inner, (host + 1) * hosts.inner)
        self.counts = [layout.length(rank) for rank in ranks]
        self.total = sum(self.counts)
        runs = [layout.runs(rank) for rank in ranks]
        self.is_sorted = max(map(len, runs)) <= _MOST_RUNS and all(
            run.step == 1 or length(run.span) < 2 for run in itertools.chain(*runs)
        )
        parts = [(0, place, (0, count)) for place, count in enumerate(self.counts) if count]
        if self.is_sorted:
            by_rank = enumerate(runs)
            parts = sorted((run.start, place, run.span) for place, own in by_rank for run in own)
        places = in_turn(span for *_, span in parts)
        self.parts = [
            (place, span, at) for (_, place, span), (_, at) in zip(parts, places, strict=True)
        ]

    def sort(self, x: Tensor) -> Tensor:
        """Return x (B, N, ...) with tokens in the order of their positions, from that of memory."""
        return x if self.is_sorted else x.index_select(1, self._orders(x.device)[0])

    def unsort(self, x: Tensor) -> Tensor:
        """Return x (B, N, ...) with tokens in the order of memory, from that of their positions."""
        return x if self.is_sorted else x.index_select(1, self._orders(x.device)[1])

    def _orders(self, device: torch.device) -> Tensor:
        hosts = self.hosts
        return _orders(hosts.layout, hosts.inner, self.host, device, current_stream(device))


@functools.lru_cache(maxsize=4)  # large on GPUs where every step has a layout of its own
def _orders(
    layout: Layout, inner: int, host: int, device: torch.device, stream: Stream | None
) -> Tensor:
    """Return the indices that sort the tokens of a host's ranks, and those that undo it (2, N), for
    work on `stream`. The CPU does not wait for the GPU.
    """
    ranks = range(host * inner, (host + 1) * inner)
    order = torch.cat([layout.positions(rank) for rank in ranks]).argsort()
    return send_to_device(torch.stack((order, order.argsort())), device)
