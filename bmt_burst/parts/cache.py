"""The cache of generation: what layers keep of earlier tokens, on any number of ranks.

The prompt is computed in chunks, and its keys stay where they were computed. Then every rank
computes the whole model on the new tokens, and the keys of each new token stay on one rank. A rank
attends to its own keys, and one gather of (out, lse) merges the ranks' results. Every rank holds
the states of lightning layers.

    cache = Cache(sp, layers=32, limit=140_000)
    for chunk in cache.prefill(length, tokens=16384):
        logits = model(chunk.shard(x), chunk.shard(positions, 0), cache=chunk)
    # on all ranks: logits of the last token, then the next token and its position
    logits = model(token, position, cache=cache)

Letters: B batch, S new tokens, H query heads, G kv heads, D head size, E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ..base.arguments import as_count, as_int
from ..base.autocast import without_autocast
from ..base.streams import Flag
from ..calls.inputs import check_inputs
from ..calls.requests import on_device
from ..errors import RanksDisagree
from ..memories.keys import KeyMemory, Softmax
from ..memories.new_tokens import NewTokens, Positions
from ..memories.protocol import Kind, Memory, Room
from ..ranks.agreement import Terms, admit_one_thread, agree, refuse, report_failure, run_agreed
from ..ranks.rings import Rings, check_device
from ..ranks.sequence_parallel import SequenceParallel, check_sp
from ..sequence.mask import Mask
from .base import KeptPart
from .chunks import Chunk, Chunks

Result = TypeVar("Result")

_CALL = "a call with a Cache"


class _WithoutBackward(torch.autograd.Function):
    """The result of new tokens. Gradients that leave it out would be wrong without an error."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise ValueError(
            "new tokens of a Cache have no backward: call backward on the loss of a whole sequence "
            "or of a chunk of Chunks"
        )


class Cache(KeptPart):
    """A cache of up to `limit` tokens, on the ranks of `sp`. Rows of a batch have one length.

    sp      the ranks that share the tokens, by default this one alone. Their layout does not count.
    layers  the number of attention layers of the model
    limit   the most tokens. Memory is reserved with a layer's first keys, which set shape and dtype
    length  the number of tokens so far

    `prefill` yields chunks of a prompt, which a model takes as its cache. Then the cache itself is
    the model's cache. All ranks pass the same new tokens, one or a few, and get the same results.
    The key of position p stays on rank (p // 64) % size. A backward raises ValueError.

    Ranks agree in the first layer of new tokens, and in each layer once. They also compare keys,
    values, the positions that a model passed and the order of layers. If these differ, a later call
    raises RanksDisagree on all of them, at once on CPUs, and on GPUs once it is known.

    Raises ValueError for layers or a limit below 1, TypeError for arguments of other types, and
    AttributeError on all ranks if `length` is set.
    """

    saves_graph = False

    def __init__(self, sp: SequenceParallel | None, layers: int, limit: int):
        self.sp = check_sp(SequenceParallel() if sp is None else sp)
        self.layers, self._limit = as_count("layers", layers), as_count("limit", limit)
        self._length = 0
        self._memories: dict[int, Memory] = {}
        self._done = [*range(self.layers)]  # layers with the newest tokens, in the order of calls
        self._filling: Chunks | None = None  # its prefill has not ended
        self._positions = Positions(self.sp, torch.empty(0, dtype=torch.int64), 0, self.limit)
        self._new: NewTokens | None = None
        self._flags: list[Flag] = []  # whether ranks differed, of tokens for which it is not known
        self._given: Tensor | None = None  # positions of the next new tokens
        self._moves = 0  # how often memory was replaced, which makes CUDA graphs invalid

    @property
    def limit(self) -> int:
        """The most tokens. It is read-only, since memory is reserved for as many."""
        return self._limit

    @property
    def length(self) -> int:
        """The number of tokens so far. It is read-only; `crop` takes the newest tokens back."""
        return self._length

    @length.setter
    def length(self, length: int) -> NoReturn:
        error = AttributeError(
            f"the length of a Cache is read-only: expected {self._length}, got {length}: take new "
            f"tokens back with cache.crop({length}) on all ranks"
        )
        self.refuse(error, "a new length of a Cache")

    def prefill(
        self, length: int, tokens: int | None = None, layout: str = "zigzag"
    ) -> Iterator[Chunk]:
        """Yield the chunks of a prompt of `length` tokens, which are the first of the cache.

        tokens  the most tokens of a chunk, on all ranks together, by default all
        layout  how each chunk is cut over the ranks: the name of a layout

        A model computes each chunk before the next one is requested. It returns logits of the
        prompt's last token only, (B, 1, V), on all ranks with the last chunk. Rotary scalings by
        length, and `dense_len` of sparse attention, take the length of the prompt. A prefill that
        failed or was left early may be started again, with other arguments.

        Raises ValueError on all ranks if the cache is not empty, the prompt exceeds its limit, a
        chunk has fewer tokens than there are ranks, or memory does not suffice. The first attention
        raises RanksDisagree if ranks passed different arguments.
        """
        try:
            length = as_int("length", length)
            if self.length:
                raise ValueError(
                    f"expected an empty Cache, got one with {self.length} tokens: pass more tokens "
                    "to the model with cache=cache"
                )
            self._check_limit(length)
            if length < self.sp.size:
                raise ValueError(
                    f"expected a prompt of at least {self.sp.size} tokens, one for each rank, got "
                    f"{length}: without a prefill, pass them as new tokens of the empty Cache, "
                    "model(tokens, positions, cache=cache) on all ranks"
                )
            tokens = length if tokens is None else tokens
            prompt = Chunks(Mask.causal(length), tokens, self.layers, self.sp, layout=layout)
            prompt._limit = self.limit
        except (TypeError, ValueError) as error:
            self.refuse(error)
        if self._filling is not None:
            self._filling.forget()
        self._filling = prompt
        yield from prompt.forward(last=True)
        self._memories, self._filling = dict(prompt._memories), None
        self._length = length
        mine = prompt.layout.positions(self.sp.rank)
        self._positions = Positions(self.sp, mine, length, self.limit)

    def select(self, x: Tensor) -> Tensor:
        """Return all new tokens of x (B, S, E)."""
        return x

    def longest(self, positions: Tensor) -> Tensor:
        """Return the length of the text so far: () for `positions` (S,) int64, (B,) for (B, S)."""
        return positions.amax(-1) + 1

    def check_positions(self, positions: Tensor) -> None:
        """Note the positions of new tokens, which may be any. Ranks compare them."""
        self._given = positions

    def _prepare(
        self, layer: int, kind: Kind, q: Tensor, k: Tensor, v: Tensor, *tensors: Any
    ) -> Callable[[], Tensor]:
        given = q, k, v, *tensors

        def compute() -> Tensor:
            out = self._extend(layer, kind, given, lambda memory, new: memory.attend(new, *given))
            inputs = [x for x in given if isinstance(x, Tensor)]
            if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
                out = _WithoutBackward.apply(out, *inputs)
            return out

        return compute

    def _extend(
        self,
        layer: int,
        kind: Kind,
        tensors: tuple[Any, ...],
        use: Callable[[Memory, NewTokens], Result],
    ) -> Result:
        """Return what `use` does with a layer's memory and the new tokens."""
        rings, (q, k, v, *others) = self.sp.rings, tensors

        def check() -> tuple[Terms, Memory]:
            self._check_call(layer, kind, tensors)
            check_device(rings, q)
            memory = self._memories.get(layer)
            if memory is None:
                memory = kind.memory(Room(int(layer), self.sp, limit=self.limit), *tensors)
                memory.check(kind, *tensors)
            shared = {"layer": int(layer), **self._terms, "kind": str(kind)}
            shared |= {"shapes": [[*q.shape], [*k.shape]], "dtype": str(q.dtype)}
            shared |= {"tensors besides q, k and v": [x is not None for x in others]}
            return Terms(_CALL, shared, of=" of a Cache"), memory

        def begin(memory: Memory, _: Any) -> Result:
            if layer in self._done:
                for ring in rings.shared:
                    ring.connect(q.device)
                self._begin(rings, q.shape[1])
            self._memories[layer] = memory
            return compute(memory)

        def compute(memory: Memory) -> Result:
            assert self._new is not None, "the first layer has begun them"
            if self._given is not None:
                self._new.given, self._given = self._given, None
            self._new.compare(k, v)
            found = use(memory, self._new)
            self._done.append(int(layer))
            return found

        with on_device(q), torch.no_grad(), without_autocast(q):
            if not self._sends_no_line:
                return run_agreed(rings, _CALL, check, begin)
            with admit_one_thread(rings, _CALL), report_failure(rings, _CALL):
                self._check_call(layer, kind, tensors)
                return compute(self._memories[layer])

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v (B, S, G, D) of new tokens, and return those of all tokens so far, (B, T, G,
        D), for an attention of your own. Raises ValueError for several ranks.
        """
        if self.sp.size > 1:
            error = ValueError(
                f"expected a Cache of one rank, got one of {self.sp.size}: no rank has all keys"
            )
            self.refuse(error)

        def keep(memory: Memory, new: NewTokens) -> tuple[Tensor, Tensor]:
            assert isinstance(memory, KeyMemory), "a checked kind keeps keys"
            memory.add(new, k, v)
            keys, values = (x[:, : new.stop] for x in memory.kept[:2])
            return keys, values

        return self._extend(layer, Softmax(), (k, k, v), keep)

    def crop(self, length: int) -> None:
        """Take back new tokens, such as a rejected draft, so that `length` tokens stay, the same on
        all ranks. It also ends new tokens that an error left in the middle of a model.

        Raises ValueError on all ranks for a length out of range or that a layer does not have, and
        where a layer cannot take tokens back: a state of lightning attention, or sums of keys.
        """
        first = self._positions.start

        def describe() -> dict[str, Any]:
            self._check_ready(0, kept := as_int("length", length))
            if not first <= kept <= self.length:
                raise ValueError(
                    f"expected a length from {first}, that of the prompt, to {self.length}, that "
                    f"of the cache, got {length}"
                )
            for layer, memory in self._memories.items():
                if kept < self.length and (reason := memory.refuses_crop()):
                    raise ValueError(f"layer {layer} cannot take tokens back: {reason}")
            return {"length": kept}

        self._take_back(agree(self.sp.rings, "Cache.crop", describe)[0]["length"])

    def _take_back(self, length: int) -> None:
        self._positions.crop(length)
        self._length = length
        if len(self._done) < self.layers:
            self._done = [*range(self.layers)]

    def select_rows(self, rows: Tensor | Sequence[int]) -> None:
        """Keep these rows of the batch, in this order, such as the beams of a search: N numbers,
        which may repeat, the same on all ranks.

        Raises ValueError on all ranks for no rows and for rows that there are not, TypeError for
        other things than whole numbers.
        """

        def describe() -> dict[str, Any]:
            self._check_ready(0)
            if not self._memories:
                raise ValueError("expected a Cache that has tokens, got an empty one")
            most = min(memory.rows for memory in self._memories.values())
            given = rows.tolist() if isinstance(rows, Tensor) else rows
            if not isinstance(given, Iterable):
                raise TypeError(f"expected rows of 0 to {most - 1}, got {given}")
            chosen = [as_int("each of rows", row) for row in given]
            if not chosen or not 0 <= min(chosen) <= max(chosen) < most:
                raise ValueError(f"expected rows of 0 to {most - 1}, got {chosen}")
            return {"rows": chosen}

        terms, *_ = agree(self.sp.rings, "Cache.select_rows", describe)
        chosen = torch.tensor(terms["rows"])
        count = self._positions.count
        in_place = [memory.select_rows(chosen, count) for memory in self._memories.values()]
        self._moves += not all(in_place)

    def variant(self, length: int) -> tuple[Any, ...]:
        """Return what a CUDA graph of a new token depends on, if the text has `length` tokens."""
        return self._moves, *(memory.variant(length) for memory in self._memories.values())

    @property
    def _terms(self) -> dict[str, Any]:
        """The terms of the next new tokens, which ranks compare."""
        return {
            "length": self.length,
            "limit": self.limit,
            "order of layers in the tokens before": self._done,
        }

    @property
    def _sends_no_line(self) -> bool:
        """Whether ranks are in the middle of new tokens, and have agreed in each layer before."""
        return len(self._done) < self.layers == len(self._memories)

    def refuse(self, error: Exception, doing: str = _CALL) -> NoReturn:
        """Raise `error` instead of the call `doing`. The other ranks raise RanksDisagree, or in the
        middle of new tokens RankFailed.
        """
        if self._sends_no_line:  # the others compute a layer, and read none
            with admit_one_thread(self.sp.rings, doing), report_failure(self.sp.rings, doing):
                raise error
        refuse(self.sp.rings, doing, error)

    def _check_call(self, layer: int, kind: Kind, tensors: tuple[Any, ...]) -> None:
        """Raise ValueError or TypeError unless the layer may compute these tensors now."""
        q, k, v, *_ = tensors
        if not 0 <= as_int("layer", layer) < self.layers:
            raise ValueError(f"expected a layer below {self.layers} in this Cache, got {layer}")
        check_inputs(q, k, v, None, is_packed=False)
        if not q.shape[1] == k.shape[1] > 0:
            raise ValueError(
                f"expected q and k of the same new tokens, at least one, got {q.shape[1]} and "
                f"{k.shape[1]}"
            )
        if layer in self._done:
            self._check_ready(q.shape[1])
        elif self._new is not None and q.shape[1] != self._new.stop - self._new.start:
            raise ValueError(
                f"expected {self._new.stop - self._new.start} new tokens in layer {layer}, as in "
                f"earlier layers, got {q.shape[1]}"
            )
        if (memory := self._memories.get(layer)) is not None:
            memory.check(kind, *tensors)

    def _check_ready(self, tokens: int, stays: int | None = None) -> None:
        """Raise ValueError unless all layers can compute new tokens, or have those that stay."""
        if self._filling is not None:
            raise ValueError("expected a Cache whose prefill has ended, got one in a prefill")
        if self._new is not None and self._new.differs is not None:
            self._flags.append(Flag(self._new.differs))
            self._new.differs = None
        while self._flags and (found := self._flags[0].is_set()) is not None:
            if found:
                raise RanksDisagree(
                    "ranks were given other new tokens or positions, and the cache holds both: "
                    "choose each token on one rank, and send it to the others, for example with "
                    "torch.distributed.broadcast"
                )
            del self._flags[0]
        behind = sorted({*range(self.layers)} - {*self._done})
        least = self.length if stays is None else stays
        if behind and self._new is not None and self._new.start < least:
            ahead = f"layer {self._done[0]}" if self._done else "this Cache"
            raise ValueError(
                f"layer {behind[0]} has {self._new.start} tokens, {ahead} has {self.length}: "
                f"expected all {self.layers} layers of this Cache to compute each token"
            )
        self._check_limit(self.length + tokens)

    def _check_limit(self, length: int) -> None:
        if length > self.limit:
            raise ValueError(
                f"the cache is full: it has a limit of {self.limit} tokens, expected at most "
                f"{self.limit - self.length} new ones, got {length - self.length}: make a Cache "
                "with a larger limit"
            )

    def _begin(self, rings: Rings, tokens: int) -> NewTokens:
        """Note new tokens, and which of their keys stay on this rank."""
        self._new = NewTokens(rings, self._positions, self.length, tokens)
        self._length, self._done = self._new.stop, []
        return self._new
