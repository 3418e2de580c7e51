"""The memory of a layer that chooses blocks: keys and values, and sums that new tokens choose by.

Letters: B batch, C tokens of a rank in a chunk, S new tokens, T keys of a rank, H query heads, G kv
heads, D head size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..kernels.few_queries import attend_grouped
from ..memories.keys import KeyMemory
from ..memories.new_tokens import NewTokens
from ..memories.protocol import Turn
from ..merging.parts import Partials
from ..spec import Spec


class Sums(Protocol):
    """Sums of all keys so far, by which new tokens choose. Every rank adds each key once."""

    def extend(self, keys: Tensor) -> None:
        """Append the keys (B, S, G, D) of the next tokens."""

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows (N,) int64 of the batch."""


class BlockMemory(KeyMemory):
    """Keys and values of a layer. Chunks choose by the kept keys, as whole sequences do, and new
    tokens by `sums_of_keys`, which a subclass sets.

    block_size  tokens of a block
    has_graphs  whether a CUDA graph of new tokens can choose
    """

    sums_of_keys: Sums
    block_size: int
    has_graphs: bool = False

    @abstractmethod
    def choose(self, row: int, q: Tensor, places: Tensor) -> Tensor:
        """Choose blocks for the queries q (S, H, D) of a row: (S, G or H, N) integers, -1 for none.
        Attention leaves out the keys after a query.

        places  (S,) int64: their positions
        """

    def keep(
        self, turn: Turn, q: Tensor, k: Tensor, v: Tensor, *tensors: Any
    ) -> Callable[[], Tensor]:
        return self._then_sum(turn, k, super().keep(turn, q, k, v, *tensors))

    def _then_sum(self, turn: Turn, by_k: Tensor, compute: Callable[[], Tensor]) -> Callable:
        """Return a function that also adds the keys by_k (B, C, G, D) of a prompt to the sums."""
        if self.room.limit is None:
            return compute
        layout = self.keys[turn.number].chunks.layouts[turn.number]

        def compute_and_sum() -> Tensor:
            out = compute()
            sp = self.room.sp.with_layout(layout)
            self.sums_of_keys.extend(sp.unshard(by_k.detach(), layout.seq_len))
            return out

        return compute_and_sum

    def attend(self, new: NewTokens, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        self.sums_of_keys.extend(k)
        return super().attend(new, q, k, v, *tensors)

    def _attend_part(self, new: NewTokens, q: Tensor, k: Tensor, *others: Tensor) -> Partials:
        """Attend one row at a time. `others` are the queries to choose by, unless they are q."""
        [by_q] = others or (q,)
        places, found = torch.arange(new.start, new.stop), []
        count, at = new.positions.count, new.positions.on(q.device)
        keys, values = (x[:, :count] for x in self.kept[:2])
        for row in range(len(q)):
            chosen = self.choose(row, by_q[row], places)
            tensors = q[row], keys[row], values[row], at[:count], places, chosen
            out, lse = attend_to_chosen(*tensors, self.block_size, self.kind.spec(q))
            found.append((out, lse.T))
        outs, lses = zip(*found, strict=True)
        return torch.stack(outs).unsqueeze(0), torch.stack(lses).unsqueeze(0)

    def refuses_crop(self) -> str | None:
        return "sums of keys, by which blocks are chosen, do not forget keys"

    def select_rows(self, rows: Tensor, count: int) -> bool:
        self.sums_of_keys.select_rows(rows)
        return super().select_rows(rows, count)

    def graph_obstacle(self) -> str | None:
        obstacle = super().graph_obstacle()
        return obstacle if self.has_graphs else "a CUDA graph does not choose blocks"


def attend_to_chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    places: Tensor,
    chosen: Tensor,
    size: int,
    spec: Spec,
) -> tuple[Tensor, Tensor]:
    """Return the attention of a few queries to those keys in their blocks that are at hand: out (S,
    H, D) and lse (H, S), in the accumulator's dtype.

    q          (S, H, D)
    k, v       (T, G, D), some keys of a document
    positions  (T,) int64, rising, on q's device: their positions in the document
    places     (S,) int64: those of the queries
    chosen     (S, G or H, N): blocks of `size` tokens of the document, -1 for none
    """
    (queries, heads, _), groups, choices = q.shape, k.shape[1], chosen.shape[1]
    out = torch.zeros_like(q, dtype=accumulator_dtype(q.dtype))
    lse = out.new_full((heads, queries), -torch.inf)
    if not len(k):
        return out, lse
    inside = torch.arange(size, device=q.device)
    group = torch.arange(choices, device=q.device).unsqueeze(1) * groups // choices
    for n, place in enumerate(places.tolist()):  # one query at a time, as keys are copied
        tokens = (chosen[n].long().unsqueeze(-1) * size + inside).flatten(1)  # (choices, N * size)
        at = torch.searchsorted(positions, tokens).clamp_max(len(k) - 1)
        seen = (positions[at] == tokens) & (tokens <= place)
        rows = q[n].unflatten(0, (choices, -1))  # (choices, heads of a choice, D)
        found = attend_grouped(rows, k[at, group], v[at, group], seen.unsqueeze(1), spec)
        out[n], lse[:, n] = (x.flatten(0, 1) for x in found)
    return out, lse
