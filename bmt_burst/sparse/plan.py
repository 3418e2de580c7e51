"""Sparse attention over ranks: blocks of keys that the data chose, and a window.

Queries stay. The window, the nearest keys of each query, is a mask. Any strategy computes it, as a
dense call. The far part are the chosen blocks beyond the window:

    choose    ranks gather all keys in spans of the sequence, and sum them up to compressed keys.
              Each rank then chooses blocks for its own queries.
    forward   ranks gather keys and values, span by span. Each computes its far part, which merges
              with the window by lse.
    backward  ranks gather keys and values again, and return the gradients of each span to the
              owners of its tokens.

A span has as many tokens as `span_bytes` of keys and values allow. Nearly every block is chosen by
some query of each rank, so sending only chosen blocks would save nothing. The choice depends
neither on ranks nor on spans (see `bmt_burst.sparse`).

Letters: B batch, S tokens of a rank, T tokens of a span, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..base.streams import send_to_device
from ..merging.merge import stack_lse_delta
from ..ranks.rings import Rings
from ..sequence.span import Span, length, overlap
from ..strategies import Plan, Problem
from ..strategies.compute import Keys, QueryGradients, Tensors
from .blocks import FarBlocks, FarKeys, packed_dtype
from .choice import choose_in_document, documents, find_longest
from .compressed import CompressedKeys, compress, sum_strides
from .config import InfLLMV2
from .far import find_kernels
from .memory import find_choice
from .spans import Spans


class SparsePlan(Plan):
    """The part of one rank in sparse calls of one problem.

    Its forward takes the queries and keys by which blocks are chosen, or none to choose by q and k.
    It keeps the choice (B, S, G, topk) in `packed_dtype`: the first blocks of this rank's queries,
    with all that are far.

    window      the dense plan of the windows
    span_bytes  the most bytes of keys and values in a span, unless a stride of tokens is larger
    """

    def __init__(
        self, problem: Problem, sparse: InfLLMV2, rank: int, window: Plan, span_bytes: int
    ):
        self.problem, self.rank, self.sparse = problem, rank, sparse
        self.window, self.span_bytes = window, span_bytes

    def reserve(self, rings: Rings, device: torch.device, with_backward: bool) -> None:
        """Reserve the transport's memory for the windows and for spans, as `Plan.reserve` does."""
        self.window.reserve(rings, device, with_backward)
        problem, sizes, tokens = self.problem, self.problem.sizes, self._most_tokens
        entries = 2 * sizes.batch * sizes.kv_heads * sizes.head_size
        visit = min(tokens, problem.layout.seq_len) * entries * sizes.dtype.itemsize
        column = min(tokens, problem.outer * problem.most_tokens)  # at one place of all hosts
        returned = problem.inner * column * entries * sizes.partial.itemsize
        rings.reserve({"visit": visit, "return": returned * with_backward}, device)

    def choose(self, rings: Rings, q: Tensor, k: Tensor) -> Tensor:
        """Choose blocks for this rank's q (B, S, H, D), by the k (B, S, G, D) of all ranks.

        A recomputation takes the choice of the first run.
        """

        def choose() -> Tensor:
            with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
                keys = self._compress(rings, k)
                return torch.stack([self._choose_row(*row) for row in zip(q, keys, strict=True)])

        return find_choice(choose)

    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, inputs: Tensors = ()
    ) -> tuple[Tensor, Tensor, Tensors]:
        chosen = self.choose(rings, *(inputs or (q, k)))
        near, near_lse, _ = self.window.forward(rings, q, k, v)
        # One span is rounded once. Sums of several are kept wide.
        dtype = q.dtype if len(self.spans.spans) == 1 else near_lse.dtype
        # the far part is merged into these in place
        copy = not self.problem.kernel.writes_new_memory
        out, lse = near.to(dtype, copy=copy), near_lse.to(near_lse.dtype, copy=copy)
        del near, near_lse
        for rows in self._gather_far(rings, k, v, chosen):
            for row, far in enumerate(rows):
                find_kernels(q[row], far).add_far_outputs(q[row], far, out[row], lse[row])
        return out.to(q.dtype), lse, (chosen,)

    def backward(
        self, rings: Rings, queries: QueryGradients, keys: Keys, inputs: Tensors, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor, tuple[None, ...]]:
        [chosen], q, dout, lse = kept, queries.q, queries.dout, queries.lse
        *near, _ = self.window.backward(rings, queries, keys, (), ())
        dq, dk, dv = (x.to(lse.dtype) for x in near)
        del near
        assert queries.out is not None, "a call has out"
        lse_delta = stack_lse_delta(queries.out, dout, lse)
        for number, rows in enumerate(self._gather_far(rings, keys.k, keys.v, chosen)):
            added = []
            for row, far in enumerate(rows):
                add = find_kernels(q[row], far).add_far_gradients
                added.append(add(dout[row], q[row], far, lse_delta[row], dq[row]))
            grads = [torch.stack(x) for x in zip(*added, strict=True)]
            own = self.spans.own_tokens(number)
            given = self.spans.give_back(rings, grads, number, self.problem.sizes.partial)
            for total, part in zip((dk, dv), given, strict=True):
                total[:, own] += part
        none = (None,) * len(inputs)  # no gradient flows through the choice
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), none

    def _gather_far(
        self, rings: Rings, k: Tensor, v: Tensor, chosen: Tensor
    ) -> Iterator[list[FarKeys]]:
        """Yield the keys of each span, as the queries of each row attend to them."""
        starts, stops = (send_to_device(x, chosen.device) for x in self._ends)
        size, scale = self.sparse.block_size, self.problem.spec.scale
        tokens = self.problem.mask.seq_len
        blocks = [FarBlocks.of_choice(row.int(), starts, stops, size, tokens) for row in chosen]
        for number, (first, _) in enumerate(self.spans.spans):
            rows = zip(*self.spans.gather(rings, [k, v], number), blocks, strict=True)
            yield [FarKeys(k, v, of_row, first, scale) for k, v, of_row in rows]

    def _compress(self, rings: Rings, k: Tensor) -> list[dict[int, CompressedKeys]]:
        """Return the compressed keys of each row's documents, by the documents' starts."""
        parts = documents(self.problem.mask)
        sums: list[dict[int, list[Tensor]]] = [{start: [] for start, _ in parts} for _ in k]
        for number, span in enumerate(self.spans.spans):
            [whole] = self.spans.gather(rings, [k], number)
            inside = [(document[0], overlap(document, span)) for document in parts]
            for start, (first, last) in [each for each in inside if length(each[1])]:
                for row, of_documents in zip(whole, sums, strict=True):
                    tokens = row[first - span[0] : last - span[0]]
                    of_documents[start].append(sum_strides(tokens, self.sparse))
        return [
            {start: compress(torch.cat(found), self.sparse) for start, found in row.items()}
            for row in sums
        ]

    def _choose_row(self, q: Tensor, keys: dict[int, CompressedKeys]) -> Tensor:
        """Return the chosen blocks of a row's q (S, H, D) that may be far: (S, G, topk)."""
        positions, scale = self.spans.positions[self.rank], self.problem.spec.scale
        shape = len(q), self.problem.sizes.kv_heads, self.sparse.most_blocks
        chosen = torch.full(shape, -1, dtype=torch.int32, device=q.device)
        parts = documents(self.problem.mask)
        bounds = torch.tensor(parts, dtype=torch.int64).view(-1, 2)
        for (start, _), here in zip(parts, torch.searchsorted(positions, bounds), strict=True):
            mine = slice(*here.tolist())
            if mine.start < mine.stop:
                places = positions[mine] - start
                chosen[mine] = choose_in_document(q[mine], places, keys[start], self.sparse, scale)
        # The last `window_blocks` places of a list have blocks that lie in the window as a whole.
        # So they do in short lists, which have all blocks up to the query's own.
        blocks = -(-find_longest(self.problem.mask) // self.sparse.block_size)
        return chosen[..., : self.sparse.topk].to(packed_dtype(blocks), copy=True)

    @functools.cached_property
    def spans(self) -> Spans:
        """The spans of the sequence that are gathered one after the other. None ends within a
        stride of a document.
        """
        problem, stride = self.problem, self.sparse.kernel_stride
        cut = _cut_sequence(problem.mask.parts, self._most_tokens, stride)
        return Spans(problem.layout, self.rank, problem.inner, cut)

    @property
    def _most_tokens(self) -> int:
        """The most tokens of a span."""
        sizes = self.problem.sizes
        bytes_of_token = 2 * sizes.batch * sizes.kv_heads * sizes.head_size * sizes.dtype.itemsize
        return max(self.span_bytes // bytes_of_token, self.sparse.kernel_stride)

    @functools.cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """For each query, the start of its document and the end of its far part: (S,) int64."""
        positions = self.spans.positions[self.rank]
        starts = positions - self.problem.mask.positions()[positions]
        return starts, positions - self.sparse.window_size


def _cut_sequence(parts: Sequence[Span], most: int, stride: int) -> tuple[Span, ...]:
    """Cut a sequence of documents into spans of at most `most` tokens, which are at least a stride.
    No span ends within a stride of a document.
    """
    cuts = [0]
    for start, stop in parts:
        while stop - cuts[-1] > most:
            cuts.append(start + (cuts[-1] + most - start) // stride * stride)
    return tuple(itertools.pairwise((*cuts, parts[-1][1])))
