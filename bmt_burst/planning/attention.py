"""The memory of one softmax attention: its plan runs on tensors without values."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels, strategies
from ..ahead import imagine_ranks
from ..base.arguments import as_count
from ..base.dtypes import accumulator_dtype
from ..bias.kernels import load
from ..bias.scores import Scores
from ..bias.scoring import TableScoring
from ..blocks.far import packed_dtype
from ..kernels.fa4 import Fa4Kernel
from ..ranks.rings import Rings
from ..sequence.layout import Chunked, Layout, count_chunks
from ..sequence.mask import Mask
from ..sparse import InfLLMV2
from ..spec import Spec
from ..strategies import Problem, Sizes
from ..strategies.compute import Keys, QueryGradients
from ..transport.imagined import ImaginedRing
from .ledger import META, Ledger

# Bytes of sparse attention beyond dense, measured in bench/results/sparse-1-nvidia-h200.jsonl: a
# span of keys and values, and lists of the blocks that queries chose.
_SPARSE_BYTES, _SPARSE_BYTES_OF_BLOCK = 1 << 29, 30
_TRIED_CHUNKS = 16


class _Kernel(Fa4Kernel):
    """FlashAttention-4, which allocates, and computes nothing."""

    name = "planned"

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        return None

    def forward_once(self, q, k, v, call, spec, added=None):
        return torch.empty_like(q), _rows(q)

    def backward_once(self, dout, q, k, v, out, lse, delta, call, spec, added=None):
        working = [q.new_empty(q.shape, dtype=torch.float32), _rows(q), _rows(q)]
        if q.shape[2] != k.shape[2]:  # gradients of keys that several heads share are summed wide
            working += [x.new_empty(x.shape, dtype=torch.float32) for x in (k, v)]
        grads = tuple(map(torch.empty_like, (q, k, v)))
        del working
        return grads


def _rows(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of one attention on a rank.

    forward, backward  the most while it runs, besides its inputs and results
    held               of the slots in which rings receive, which calls share
    """

    forward: int
    backward: int
    held: int


@dataclass(frozen=True)
class AttentionShape:
    """An attention of one rank to a sequence of `tokens` on `ranks`.

    inner  the ranks of a host, or that share heads with Ulysses
    chunk  the most queries of a chunk, on all ranks: only the last chunk of the tokens has queries.
           None if all tokens have

    Raises ValueError or TypeError for sizes that no attention has.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    ranks: int = 1
    inner: int = 1
    strategy: str = "auto"
    window: int | None = None
    sparse: InfLLMV2 | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "head_size", "ranks", "inner"):
            as_count(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads, got {self.kv_heads} kv_heads and {self.heads} heads"
            )
        if self.ranks % self.inner:
            raise ValueError(f"inner must divide ranks, got inner={self.inner}, ranks={self.ranks}")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating dtype of torch, got {self.dtype}")

    @property
    def rank_tokens(self) -> int:
        """The most tokens of a rank."""
        return -(-self.tokens // self.ranks)

    @property
    def queries(self) -> int:
        """The queries of all ranks."""
        return self.tokens if self.chunk is None else chunk_tokens(self.tokens, self.chunk)

    @property
    def memory(self) -> AttentionMemory:
        """The memory of a forward and a backward. Raises ValueError if the strategy refuses it."""
        return _find_memory(self)

    @property
    def saved_bytes(self) -> int:
        """Bytes of q, k, v, out and lse of a whole sequence, which autograd keeps on a rank."""
        of_heads = 2 * (self.heads + self.kv_heads) * self.head_size * self.dtype.itemsize
        return self.batch * self.rank_tokens * (of_heads + 4 * self.heads)

    @property
    def chunks(self) -> Chunked:
        """The chunks of one document."""
        assert self.chunk is not None, "a whole sequence has none"
        return Layout.chunks(self.tokens, self.ranks, self.chunk)

    @property
    def kept_tokens(self) -> int:
        """The keys that chunks have memory for, on the first rank in each row: all, or those in the
        window of the next chunk, and the last chunk's. 0 without chunks.
        """
        return 0 if self.chunk is None else _count_kept_tokens(self)

    @property
    def choice_bytes(self) -> int:
        """Bytes of a rank's sparse choices that chunks keep, in each row."""
        if self.chunk is None or self.sparse is None:
            return 0
        choosing = max(self.tokens - self.sparse.exact_tokens, 0) // self.ranks
        dtype = choice_dtype(self.tokens, self.sparse)
        return choosing * self.kv_heads * self.sparse.topk * dtype.itemsize


def find_refusal(strategy: str, pairs: Mask | Scores, layout: Layout, inner: int) -> str | None:
    """Return why a strategy cannot compute calls over the ranks of `layout`, or None if it can.

    pairs  the mask, or the scores of calls with a learned bias
    inner  as AttentionShape's
    """
    scores = pairs if isinstance(pairs, Scores) else None
    ranks = layout.size
    problem = Problem(
        mask=pairs.mask if isinstance(pairs, Scores) else pairs,
        layout=layout,
        spec=Spec(1.0),
        kernel=kernels.load("reference"),
        # strategies do not refuse numbers of heads or dtypes, so these are examples
        sizes=Sizes(1, ranks, ranks, 16, torch.float32, torch.float32),
        inner=inner,
        outer=ranks // inner,
        scoring=TableScoring(scores, load("reference")) if scores else strategies.DENSE,
    )
    return strategies.load(strategy).refuses(problem)


def chunk_tokens(tokens: int, most: int) -> int:
    """Return the tokens of the longest chunk, if a chunk has at most `most` tokens."""
    return -(-tokens // count_chunks(tokens, most))


@functools.lru_cache(maxsize=1024)  # all layers of a model ask, and chunks may be thousands
def _count_kept_tokens(shape: AttentionShape) -> int:
    chunks = shape.chunks
    if shape.window is None:
        return chunks.length(0)
    first, *_ = chunks.layouts
    stop = first.seq_len
    in_window = first.count(0, (max(stop - shape.window + 1, 0), stop))
    return (len(chunks.spans) - 1) * in_window + chunks.layouts[-1].length(0)


@functools.lru_cache(maxsize=1024)
def _find_memory(shape: AttentionShape) -> AttentionMemory:
    if shape.sparse is not None:
        return _sparse_memory(shape, shape.sparse)
    return _run_problem(shape, _make_problem(shape))


def _run_problem(shape: AttentionShape, problem: Problem) -> AttentionMemory:
    """Run the plan of a problem in ledgers."""
    plan = strategies.choose(shape.strategy, problem).plan(problem, 0)
    rings = _reserve(shape)
    sums: tuple[Tensor, ...] = ()
    queries = problem.layout.length(0)
    tokens = queries if problem.kv_layout is None else problem.kv_layout.length(0)
    q, k, v = (
        torch.empty(shape.batch, *some, shape.head_size, dtype=shape.dtype, device=META)
        for some in ((queries, shape.heads), (tokens, shape.kv_heads), (tokens, shape.kv_heads))
    )
    if shape.chunk is not None:  # sums that chunks keep, to which the backward adds
        wide = accumulator_dtype(shape.dtype)
        sums = torch.empty_like(k, dtype=wide), torch.empty_like(v, dtype=wide)
    imagined = [ring for ring in rings.shared if isinstance(ring, ImaginedRing)]
    slots = [x for ring in imagined for lane in ring.slots.values() for x in lane]
    forward, backward = Ledger(), Ledger()
    forward.ignore(q, k, v, *slots)
    with forward:
        out, lse, _ = plan.forward(rings, q, k, v)
    dout = torch.empty_like(out)
    backward.ignore(q, k, v, out, lse, dout, *sums, *slots)
    with backward:
        keys = Keys(k, v, *sums)
        grads = plan.backward(rings, QueryGradients(q, dout, lse, out), keys, (), ())[:3]
    made = grads[:1] if sums else grads
    return AttentionMemory(
        forward.most - out.nbytes - lse.nbytes,
        backward.most - sum(x.nbytes for x in made),
        _count_held(rings),
    )


def _reserve(shape: AttentionShape) -> Rings:
    """Return imagined rings that hold what the calls of a step receive. Not all of many chunks are
    tried. With more keys a chunk may send queries, and receive less than an earlier one.
    """
    rings = imagine_ranks(0, shape.ranks, shape.inner).rings
    if shape.chunk is None:
        problems = [_make_problem(shape)]
    else:
        count = count_chunks(shape.tokens, shape.chunk)
        tried = {(count - 1) * i // _TRIED_CHUNKS for i in range(_TRIED_CHUNKS + 1)}
        problems = [_make_problem(shape, number) for number in sorted(tried)]
    for problem in problems:
        if shape.sparse is None:
            plan = strategies.choose(shape.strategy, problem).plan(problem, 0)
        else:
            plan = shape.sparse.plan(problem, 0, shape.strategy)
        plan.reserve(rings, META, with_backward=True)
    return rings


def _count_held(rings: Rings) -> int:
    return rings.inner.held_bytes + rings.outer.held_bytes


def choice_dtype(tokens: int, sparse: InfLLMV2 | None) -> torch.dtype:
    """Return the dtype of chosen blocks of a sequence."""
    return packed_dtype(0 if sparse is None else -(-tokens // sparse.block_size))


def _make_problem(shape: AttentionShape, number: int = -1) -> Problem:
    """Return the call of a sequence, or that of the chunk with this number."""
    mask = Mask.causal(shape.tokens)
    if shape.window is not None:
        mask = mask.windowed(shape.window)
    layout, kv_layout = Layout.named("zigzag", shape.tokens, shape.ranks), None
    if shape.chunk is not None:
        chunks = shape.chunks
        (start, stop), first = chunks.spans[number], 0
        if shape.window is not None:
            first = max(start - shape.window + 1, 0)
        mask = mask.rows(start, stop).transposed.rows(first, stop).transposed
        layout, kv_layout = chunks.layouts[number], chunks.since(first, chunks.find_chunk(start))
    return Problem(
        mask=mask,
        layout=layout,
        kv_layout=kv_layout,
        spec=Spec(1.0),
        kernel=_Kernel(),
        sizes=Sizes(
            shape.batch, shape.heads, shape.kv_heads, shape.head_size, shape.dtype, shape.dtype
        ),
        inner=shape.inner,
        outer=shape.ranks // shape.inner,
    )


def _sparse_memory(shape: AttentionShape, sparse: InfLLMV2) -> AttentionMemory:
    """Return the memory of sparse attention: dense attention, and the rest as measured."""
    plain = replace(shape, sparse=None)
    if sparse.is_dense(shape.tokens):
        return _find_memory(plain)
    if shape.chunk is None:
        dense = replace(_find_memory(plain), held=_count_held(_reserve(shape)))
    else:  # dense calls of few queries have near keys only, not all
        problem = _make_problem(shape)
        dense = _run_problem(shape, replace(problem, mask=sparse.near_mask(problem.mask)))
    queries = -(-shape.queries // shape.ranks)
    blocks = shape.batch * queries * shape.kv_heads * sparse.most_blocks
    beyond = _SPARSE_BYTES + _SPARSE_BYTES_OF_BLOCK * blocks
    return AttentionMemory(dense.forward + beyond, dense.backward + beyond, dense.held)
