"""Training on a sequence in chunks: memory grows by the keys, values and their gradients only.

The forward keeps the keys and values that later chunks see (`memories/chunk_keys.py`), and no
graph. The backward goes from the last chunk to the first. It computes a chunk again with a graph,
whose queries attend to the kept keys. The gradients of earlier keys are added up in fp32. Those of
the chunk's own keys, to which later chunks have added, go to autograd, rounded once.

    chunks = Chunks(mask, tokens=65536, layers=32, sp=sp)
    for chunk in chunks.forward():
        model(x[:, chunk.span], positions[:, chunk.span], cache=chunk)
    for chunk in chunks.backward():
        mine = (tensor[:, chunk.span] for tensor in (x, positions, labels))
        loss, _ = model(*mine, cache=chunk)
        (loss / targets).backward()

Here x, positions and labels are this rank's shards by `chunks.layout`. Gradients are those of one
step on the whole sequence.

Letters: B batch, S tokens of a rank, C those of a chunk, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base.arguments import as_bool, as_count, as_int, check_dim, check_tensor
from ..base.compiled import not_compiled
from ..base.kept import KeptResults, is_in_backward
from ..base.policies import without_policies
from ..memories.chunk_keys import find_keys
from ..memories.protocol import Kind, Memory, Room, Turn
from ..ranks.agreement import agree
from ..ranks.sequence_parallel import SequenceParallel, WholeSequence, check_sp
from ..sequence.layout import Layout
from ..sequence.mask import Mask
from ..sequence.rows import Masks
from ..sequence.span import Span
from .base import KeptPart

# the phases of Chunks, as errors name them
_READY, _FORWARD, _KEPT, _BACKWARD = "without kept keys", "in forward()", "kept", "in backward()"


class Chunks:
    """A sequence, or a batch of them, in chunks. It keeps keys and values of one step.

    mask    the mask of the whole sequence, or one for each row. No token may see a later chunk.
    tokens  the most tokens of a chunk, on all ranks together
    layers  the number of attention layers of the model
    sp      the ranks that share the sequence, by default this one alone, while burst_attn_func
            takes all ranks. Their layout does not count: `layout` is the one of the chunks.
    layout  how each chunk is cut over the ranks: the name of a layout
    length  the length by which rotary scalings choose their frequencies, by default that of the
            longest document. Positions must be below it.

    Raises ValueError for a mask in which a token sees a later chunk, for masks of different
    lengths, for layers or a length below 1, and as `Layout.chunks`. Raises TypeError for arguments
    of other types.
    """

    _limit: int | None = None  # of a cache, if these are the chunks of its prompt

    def __init__(
        self,
        mask: Masks,
        tokens: int,
        layers: int,
        sp: SequenceParallel | None = None,
        *,
        layout: str = "zigzag",
        length: int | None = None,
    ):
        self.sp = check_sp(SequenceParallel() if sp is None else sp)
        self.masks = tuple(mask) if isinstance(mask, Iterable) else (mask,)
        for row in self.masks:
            if not isinstance(row, Mask):
                is_whole = isinstance(row, WholeSequence)
                hint = ": pass sequence.mask, since chunks have their own layouts" * is_whole
                kind = type(row).__name__
                raise TypeError(f"expected a Mask or one for each row, got {kind}{hint}")
        lengths = {length for row in self.masks for length in (row.seq_len, row.kv_len)}
        if len(lengths) != 1:
            raise ValueError(
                "expected masks of one length, of all rows and of queries and keys, got "
                f"{sorted(lengths) or 'no mask'}"
            )
        [seq_len] = lengths
        self.layers = as_count("layers", layers)
        self.layout = Layout.chunks(seq_len, self.sp.size, tokens, layout)
        self._length = None if length is None else as_count("length", length)
        longest = (max(stop - start for start, stop in row.parts) for row in self.masks)
        self.lengths = tuple(self._length or found for found in longest)
        mine = itertools.accumulate(
            (part.length(self.sp.rank) for part in self.layout.layouts), initial=0
        )
        cut = zip(self.layout.spans, itertools.pairwise(mine), strict=True)
        self.chunks = tuple(
            Chunk(self, n, positions, slice(*span)) for n, (positions, span) in enumerate(cut)
        )
        # an error here is better than one in the middle of a step
        find_keys(self.masks, self.layout, self.sp.rank)
        self._phase, self._memories = _READY, dict[int, Memory]()
        self._results = defaultdict[tuple[int, int], list[Tensor]](list)  # by chunk and layer
        self._evaluates = False
        self._current: Chunk | None = None
        self._run_number = 0  # counts forward() and backward()
        self._grad_mode = _GradMode()  # of the loop that runs
        self._calls = Counter[int]()
        # layers whose backward will run, those where it has begun, whether autograd recorded any
        self._needed, self._backwards, self._records = set[int](), set[int](), False
        self._ends: dict[int, Tensor] = {}  # of the positions of chunks that asked for a length
        self._positions: dict[int, Tensor] = {}  # of chunks, where a model passed them

    def forward(self, last: bool = False) -> Iterator[Chunk]:
        """Yield the chunks in their order, without gradient: all, or without `last` all but the
        last one, which its backward computes. Forgets what an earlier step kept.

        Raises ValueError on all ranks if a chunk was not computed by all layers.
        """
        self._evaluates = is_whole = as_bool("last", last)
        self.forget()
        yield from self._run(_FORWARD, self.chunks if is_whole else self.chunks[:-1])
        if not is_whole:
            self._phase = _KEPT
        elif self._limit is None:
            self.forget()

    def backward(self) -> Iterator[Chunk]:
        """Yield the chunks from the last one to the first. Run the model once on each, and call the
        backward of a loss before the next. A second run replaces the keys of the first, also one
        without gradient. Activation checkpointing may compute a chunk again.

        Raises ValueError unless `forward` has ended, unless each layer computed a chunk once, if
        keys or values are not those that the forward kept, as with dropout or other weights, and
        unless each layer's backward ran once.
        """
        if self._phase != _KEPT and len(self.chunks) > 1:
            raise ValueError(
                f"expected chunks whose forward() has ended, which each backward() needs, got "
                f"chunks that are {self._phase}"
            )
        yield from self._run(_BACKWARD, self.chunks[::-1])
        self.forget()

    def _run(self, phase: str, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        self._phase, self._run_number = phase, self._run_number + 1
        run = self._run_number
        try:
            for chunk in chunks:
                self._current = chunk
                self._calls.clear()
                self._backwards.clear()
                self._needed.clear()
                self._records = False
                self._grad_mode.set(phase == _BACKWARD)
                yield chunk
                if run == self._run_number:
                    self._grad_mode.restore()
                self._end_chunk(chunk, run)
                if phase == _FORWARD:
                    for memory in self._memories.values():
                        memory.close(chunk.number)
        except BaseException:  # also if a loop was left before its end
            if run == self._run_number:
                self.forget()
            raise
        self._current = None

    def forget(self) -> None:
        """Forget what layers keep, and end a run."""
        self._grad_mode.restore()
        self._phase, self._current = _READY, None
        self._memories.clear()
        self._results.clear()
        self._ends.clear()
        self._positions.clear()

    def take_turn(
        self, chunk: Chunk, layer: int, kind: Kind, q: Tensor, k: Tensor, v: Tensor, *tensors: Any
    ) -> tuple[Memory, Turn]:
        """Count a run of a layer on a chunk. Return its memory, and its turn, which `Memory.keep`
        takes. A benchmark may fill the memory without computing the attention.
        """
        self._check_turn(chunk, layer, q, k, v)
        memory = self._memories.get(layer)
        reserves = memory is None and self._phase == _FORWARD
        if memory is None:
            room = Room(layer, self.sp, self.masks, self.layout, self._limit)
            memory = self._memories[layer] = kind.memory(room, q, k, v, *tensors)
        memory.check(kind, q, k, v, *tensors)
        is_first = not self._calls[layer]
        if is_first or not is_in_backward():  # a recomputation is no other run
            self._calls[layer] += 1
        if torch.is_grad_enabled():
            self._records = True
            inputs = (x for x in (q, k, v, *tensors) if isinstance(x, Tensor))
            if any(x.requires_grad for x in inputs):
                self._needed.add(layer)
        return memory, Turn(
            number=chunk.number,
            differentiates=self._phase == _BACKWARD,
            is_first=is_first,
            with_backward=not self._evaluates,
            terms=self._describe() if reserves else None,
            begin=functools.partial(self._begin_backward, self._run_number, chunk, layer),
        )

    def _begin_backward(self, run: int, chunk: Chunk, layer: int) -> None:
        """Note the backward of a layer. Raises ValueError for a second or a late one."""
        if run != self._run_number:
            raise ValueError(
                f"expected a backward in the loop that yielded chunk {chunk.number}, got one after "
                "this loop: make no use of losses of an earlier step"
            )
        if layer in self._backwards:
            raise ValueError(
                f"expected one backward of chunk {chunk.number} in layer {layer}, got two: run the "
                "model and its backward once, and give each attention a layer of its own"
            )
        self._backwards.add(layer)

    def _check_turn(self, chunk: Chunk, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise ValueError for a chunk that is not the present one, a wrong layer, and tensors of
        other tokens than the chunk's.
        """
        if chunk is not self._current:
            loop = "forward() or backward()"
            if self._limit is not None:
                loop = "prefill(), or once another one began"
            expected = f"no chunk after the loop over {loop}"
            if self._current is not None:
                expected = f"chunk {self._current.number}, which the loop yielded last"
            raise ValueError(f"expected {expected}, got chunk {chunk.number}")
        if not 0 <= as_int("layer", layer) < self.layers:
            raise ValueError(f"expected a layer below {self.layers} in these Chunks, got {layer}")
        tokens, rows = chunk.span.stop - chunk.span.start, len(self.masks)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4 or x.shape[1] != tokens or rows not in (1, len(x)):
                raise ValueError(
                    f"expected {name} ({rows if rows > 1 else 'batch'}, {tokens}, heads, head "
                    f"size), this rank's tokens of chunk {chunk.number}, got shape {tuple(x.shape)}"
                )

    def _end_chunk(self, chunk: Chunk, run: int) -> None:
        """Raise ValueError on all ranks if a model on any of them computed a chunk wrongly, or
        called layers in another order.
        """

        def describe() -> dict[str, Any]:
            if run != self._run_number:
                raise ValueError(
                    "forward() or backward() began before the one whose chunks are taken here had "
                    "ended: run one at a time, or make Chunks for each"
                )
            self._check_calls(chunk)
            # states reserve no memory, so their layers do not compare what `_describe` returns
            return {"order of layers": [*map(int, self._calls)], "length of Chunks": self._length}

        agree(self.sp.rings, "", describe, doing=f"the end of chunk {chunk.number}")
        if chunk is self.chunks[-1]:
            self._check_positions()
            self._check_lengths()
        if self._phase == _BACKWARD:
            for memory in self._memories.values():
                memory.finish(chunk.number)
            self._check_kept(chunk)
        elif chunk is self.chunks[0] and self.sp.size > 1:
            # NCCL connects ranks when they first exchange tensors. It needs memory, which may not
            # be left in the backward. So they exchange some here.
            self.sp.sum(next(iter(self._memories.values())).difference)

    def _check_calls(self, chunk: Chunk) -> None:
        """Raise ValueError unless each layer computed a chunk once, and its gradients if needed."""
        missing = [layer for layer in range(self.layers) if not self._calls[layer]]
        if missing:
            raise ValueError(
                f"chunk {chunk.number} was not computed by {len(missing)} of {self.layers} layers, "
                f"the first is layer {missing[0]}: pass cache=chunk to the model, and its number "
                "of layers to Chunks"
            )
        again = [layer for layer, count in self._calls.items() if count > 1]
        if again:
            raise ValueError(
                f"chunk {chunk.number} was computed {self._calls[again[0]]} times by layer "
                f"{again[0]}: run the model once, and give each attention a layer of its own"
            )
        if self._phase == _BACKWARD and not self._records:
            raise ValueError(
                f"expected a backward of chunk {chunk.number}, got a run without gradient: leave "
                "out torch.no_grad"
            )
        # below the first trainable weight, layers need no backward
        without = sorted(self._needed - self._backwards)
        if self._phase == _BACKWARD and without:
            raise ValueError(
                f"expected a backward of chunk {chunk.number} before the next chunk, got none of "
                f"layer {without[0]}"
            )

    def _check_kept(self, chunk: Chunk) -> None:
        """Raise ValueError on all ranks if a chunk is not what the forward kept of it."""
        each = [memory.difference.float() for memory in self._memories.values()]
        # NaN shows in the loss, and hides no difference of another layer
        worst = torch.stack(each).nan_to_num(0.0).amax()
        # the sum over ranks has only differences beyond rounding
        if (found := self.sp.sum(torch.where(worst > 1, worst, 0.0))) > 0:
            raise ValueError(
                f"the keys, values or states of chunk {chunk.number} differ from what the forward "
                f"kept, by {float(found):.3g} times as much as rounding does at most: both runs "
                "need the same weights, and a model without dropout"
            )

    def _check_lengths(self) -> None:
        """Raise ValueError if positions do not have the lengths that were expected."""
        if len(self._ends) < len(self.chunks):
            return
        ends = torch.stack([*self._ends.values()]).amax(0)
        found = self.sp.longest(ends.unsqueeze(-1) - 1)
        lengths = torch.tensor(self.lengths, device=found.device)
        if bool((found != (lengths if found.dim() else lengths.amax())).any()):
            raise ValueError(
                f"expected positions up to a length of {self.lengths}, that of the mask's longest "
                f"document or the length= of Chunks, got {found.tolist()}: pass the right "
                "length=, since rotary scalings depend on it"
            )

    def _check_positions(self) -> None:
        """Raise ValueError on all ranks if positions show that shards are of another layout."""
        if self.sp.size == 1 or len(self._positions) < len(self.chunks):
            return
        mine = torch.cat([self._positions[n] for n in range(len(self.chunks))], -1)
        whole = self.sp.with_layout(self.layout).unshard(mine, self.layout.seq_len, -1)
        neighbours = self._neighbours.to(whole.device)
        if len(whole) == 1:  # shared by all rows
            neighbours = neighbours.all(0)
        before, after = whole[:, :-1], whole[:, 1:]
        wrong = (after < before) & (after != 0) & neighbours
        if wrong.any():
            place = tuple(wrong.nonzero()[0])
            raise ValueError(
                "expected positions that do not fall within a document of the mask, except to 0, "
                f"got {int(after[place])} after {int(before[place])} at token {int(place[-1]) + 1} "
                "of the sequence: ranks have other tokens than the chunks. Cut tokens, labels and "
                "positions by chunks.layout.shard(x, sp.rank), or for each chunk by chunk.shard(x)"
            )

    @functools.cached_property
    def _neighbours(self) -> Tensor:
        """Whether each token but the last and the next one are of one document: (rows, S - 1) bool.
        Nothing is known of positions in a tree of drafts, and of padding.
        """
        rows = torch.zeros(len(self.masks), self.layout.seq_len - 1, dtype=torch.bool)
        for row, mask in zip(rows, self.masks, strict=True):
            begins = {s.q[0] for s in mask.slices if mask.first_break is None}
            for start, stop in mask.parts:
                row[start : stop - 1] = start in begins
        return rows

    def _describe(self) -> dict[str, Any]:
        """Return what ranks compare of the calls of all chunks."""
        return {
            "masks of all chunks": [mask.digest for mask in self.masks],
            "layout of all chunks": self.layout.term,
            "limit of the Cache": self._limit,
            "layers of Chunks": self.layers,
            "length of Chunks": self._length,
            "last of forward()": self._evaluates,
        }


class _GradMode:
    """The grad mode of a thread, which a loop changes while its caller computes a chunk. A loop
    that was left may end in another thread, which collects it: then that thread's mode stays.
    """

    def __init__(self) -> None:
        self._before: tuple[int, bool] | None = None

    def set(self, records: bool) -> None:
        self._before = threading.get_ident(), torch.is_grad_enabled()
        torch.set_grad_enabled(records)

    def restore(self) -> None:
        """Return to the mode before `set`, once."""
        before, self._before = self._before, None
        if before is not None and before[0] == threading.get_ident():
            torch.set_grad_enabled(before[1])


class Chunk(KeptPart):
    """A part of the sequence, which a model takes as its cache. It is no dataclass, since wrappers
    of models would rebuild it in each forward.

    number     counts from 0
    positions  its tokens in the whole sequence
    span       its tokens in this rank's shard
    """

    saves_graph: ClassVar[bool] = True

    def __init__(self, chunks: Chunks, number: int, positions: Span, span: slice):
        self.chunks, self.number, self.positions, self.span = chunks, number, positions, span
        self.sp = chunks.sp

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of the chunk: C entries of the whole x along `dim`. A prompt
        may be the first entries of x. Raises ValueError for an x of another length.
        """
        dim, (start, stop) = check_dim(x, dim), self.positions
        tokens, whole = x.shape[dim], self.chunks.layout.seq_len
        if tokens < whole or (tokens > whole and self.chunks._limit is None):
            raise ValueError(
                f"expected {whole} tokens of the whole sequence in dimension {dim}, got {tokens} "
                f"in shape {tuple(x.shape)}"
            )
        layout = self.chunks.layout.layouts[self.number]
        return layout.shard(x.narrow(dim, start, stop - start), self.sp.rank, dim)

    def select(self, x: Tensor) -> Tensor:
        """Return the tokens of x (B, C, E) that get a result: all, or none if the run only keeps
        what later chunks need. Of a prompt that is its last token, (B, 1, E) on all ranks, with
        the last chunk.
        """
        chunks = self.chunks
        if chunks._limit is None:
            return x if chunks._evaluates or chunks._phase == _BACKWARD else x[:, :0]
        if self is not chunks.chunks[-1]:
            return x[:, :0]
        sp, layout = self.sp, chunks.layout.layouts[self.number]
        last = sp.with_layout("contiguous").unshard(x[:, -1:], sp.size)  # of each rank
        at = layout.seq_len - 1
        [owner] = (r for r in range(sp.size) if any(at in some for some in layout.shards[r]))
        return last[:, owner : owner + 1]

    @not_compiled
    def check_positions(self, positions: Tensor) -> None:
        """Note the positions of this rank's tokens: (C,) int64, or (B, C).

        At the end of the last chunk ranks gather them, 8 bytes a token, to check that tokens lie as
        the chunks' layout says: within a document positions never fall, except to 0.

        Raises ValueError or TypeError on all ranks unless there is one for each token.
        """
        tokens = self.span.stop - self.span.start
        try:
            check_tensor("positions", positions)
            if positions.dim() not in (1, 2) or positions.shape[-1] != tokens:
                raise ValueError(
                    f"expected positions (batch, {tokens}) or ({tokens},), of this rank's tokens "
                    f"of chunk {self.number}, got shape {tuple(positions.shape)}: cut them by "
                    "chunk.shard"
                )
        except (TypeError, ValueError) as error:
            self.refuse(error)
        self.chunks._positions[self.number] = positions.view(-1, tokens)

    @not_compiled
    def longest(self, positions: Tensor) -> Tensor:
        """Return SequenceParallel.longest of the whole sequence: () for `positions` (C,), (B,) for
        (B, C).
        """
        chunks = self.chunks
        chunks._ends[self.number] = positions.amax(-1) + 1
        lengths = torch.tensor(chunks.lengths, device=positions.device)
        return lengths.amax() if positions.dim() == 1 else lengths.expand(len(positions))

    def _prepare(
        self, layer: int, kind: Kind, q: Tensor, k: Tensor, v: Tensor, *tensors: Any
    ) -> Callable[[], Tensor]:
        chunks = self.chunks
        with without_policies():  # a recomputation does less
            memory, turn = chunks.take_turn(self, layer, kind, q, k, v, *tensors)
            compute = memory.keep(turn, q, k, v, *tensors)
        is_computed_once = chunks._evaluates or self is chunks.chunks[-1]
        if is_computed_once or not memory.keeps_results:
            return compute
        results = KeptResults(chunks._results[self.number, layer], turn.differentiates)

        def compute_and_keep() -> Tensor:
            with results:  # the second run takes those of the first one
                return compute()

        return compute_and_keep
