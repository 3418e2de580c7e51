"""InfLLM-V2 as a call, a layer and a model see it (arXiv 2509.24663, 2506.07900)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor
from torch.nn import functional

from ..base.arguments import DTYPES, check_tensor
from ..blocks.documents import find_longest, find_low
from ..blocks.extension import BlockChoice
from ..sequence.mask import Mask, Slice
from ..sequence.span import length, overlap, shifted
from ..strategies import Plan, Problem
from ..strategies.extension import Tensors
from .config import Constants
from .memory import SparseMemory
from .plan import SparsePlan


@dataclass(frozen=True)
class InfLLMV2(Constants, BlockChoice):
    """InfLLM-V2, the sparse attention of MiniCPM4. Each query attends to `topk + window_size //
    block_size` blocks of its document, or to all that are visible if they are fewer.

    Some blocks are always chosen: the first `init_blocks`, the query's own, and the window_size //
    block_size blocks before that. The others are those with the highest scores. The query heads of
    a kv head share a choice.

    block_size     tokens of a block. Blocks are counted from the start of each document.
    kernel_size    tokens that a compressed key is the mean of, 2 * kernel_stride
    kernel_stride  tokens from one compressed key to the next
    init_blocks    blocks at the start of a document that are always chosen
    window_size    tokens of the blocks before a query's own that are always chosen, at least one
                   block
    topk           blocks that are chosen in addition to those of the window
    dense_len      calls are dense if their longest document has fewer tokens. With -1 none is.
    use_nope       whether blocks are chosen by queries and keys without rotary positions, which the
                   caller passes

    Raises ValueError for constants that force more blocks than are chosen or that do not divide one
    another, TypeError for anything but whole numbers and a bool.
    """

    name = "sparse attention"
    kind = "infllm-v2"
    memory = SparseMemory

    def check(self, tensors: Tensors, q: Tensor, k: Tensor) -> None:
        if (count := len(tensors)) not in (0, 2):
            raise TypeError(f"choose_by must be a pair of queries and keys, got {count} items")
        for name, x, like in zip(("queries", "keys"), tensors, (q, k), strict=False):
            check_tensor(f"{name} of choose_by", x)
            if x.shape != like.shape or x.device != like.device:
                raise ValueError(
                    f"expected {name} of choose_by of shape {tuple(like.shape)} on {like.device}, "
                    f"got {tuple(x.shape)} on {x.device}"
                )
            if x.dtype not in DTYPES:
                raise ValueError(f"{name} of choose_by must be floating point, got {x.dtype}")
        if bool(tensors) != self.use_nope:
            got = f"choose_by and sparse={self}" if tensors else f"{self} alone"
            raise ValueError(f"expected choose_by together with use_nope=True, got {got}")

    def for_layer(self, *, rotary: bool, **others: Any) -> Self:
        super().for_layer(rotary=rotary, **others)
        # without rotary positions the choice is the same, by the same q and k
        return self if rotary else replace(self, use_nope=False)

    def of_layer(self, q: Tensor, k: Tensor) -> Tensors:
        return (q.detach(), k.detach()) if self.use_nope else ()

    def work_mask(self, mask: Mask) -> Mask:
        # Far kernels take about twice as long for a key as dense ones. So a query that chooses has
        # the work of a window with twice the keys beyond its own one.
        return mask.windowed(2 * self.exact_tokens - self.window_size)

    def prepare(self, tensors: Tensors, q: Tensor) -> Tensors:
        found = (x.detach() if x.dim() == 4 else x.detach().unsqueeze(0) for x in tensors)
        return tuple(functional.pad(x.to(q.dtype), (0, q.shape[-1] - x.shape[-1])) for x in found)

    def join_rows(self, tensors: Tensors) -> Tensors:
        return tuple(x.flatten(0, 1).unsqueeze(0) for x in tensors)

    def in_chunks(self, masks: Sequence[Mask]) -> Self | None:
        if masks and self.is_dense(max(map(find_longest, masks))):
            return None
        return replace(self, dense_len=-1)

    def near_mask(self, mask: Mask) -> Mask:
        """Return all pairs of the first `exact_tokens` of documents, and windows of later ones."""
        slices = []
        for s in mask.slices:
            (start, stop), low = s.kv, find_low(s)
            middle = min(start + self.exact_tokens, stop)
            for tokens, keys, high in (
                ((start, middle), (start, middle), None),
                ((middle, stop), (middle - self.window_size, stop), self.window_size + 1),
            ):
                queries = overlap(shifted(tokens, low), s.q)
                if length(queries):
                    slices.append(Slice(queries, keys, low, high and high + low))
        return Mask(mask.seq_len, tuple(slices), mask.kv_len)

    def is_exact(self, longest: int) -> bool:
        return self.is_dense(longest) or longest <= self.exact_tokens

    def make_plan(self, problem: Problem, rank: int, near: Plan, span_bytes: int) -> Plan:
        return SparsePlan(problem, self, rank, near, span_bytes)
