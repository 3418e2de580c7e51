"""Keys and values of earlier tokens over the ranks of a group, for generation.

The prompt is computed in chunks, each of them cut over the ranks, and its keys stay where they were
computed. Then every rank computes the whole model on the new tokens, and the keys of each new token
stay on one rank. A rank attends to its own keys, and one gather of (out, lse) merges the ranks'
results.

    cache = Cache(sp, layers=32, limit=140_000)
    for chunk in cache.prefill(length, tokens=16384):
        logits = model(chunk.shard(x), chunk.shard(positions, 0), cache=chunk)
    # on all ranks: logits of the last token, then the next token and its position
    logits = model(token, position, cache=cache)

Letters: B batch, S new tokens, T keys of a rank, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from ..base.arguments import as_int
from ..base.autocast import autocast, without_autocast
from ..base.compiled import not_compiled
from ..base.streams import send_to_device
from ..calls.refusal import refuse_call
from .chunks import Kept
from ..kernels import few_queries
from ..kernels.few_queries import Partials, find_kernels
from ..merging.sinks import decoded_with_sinks
from ..ranks.agreement import admit_one_thread, agree, report_failure
from ..ranks.rings import Rings, check_device, make_rings
from ..ranks.sequence_parallel import SequenceParallel, check_sp
from ..sparse.cache import KeySums, attend_to_chosen
from ..sparse.choice import choose_in_document
from ..sparse.config import InfLLMV2
from ..spec import Spec
from .new_tokens import BLOCK, NewTokens, Positions, merge_ranks
from .prompt import PrefillChunk, Prompt, refuse_nope, reserve_memory

if TYPE_CHECKING:  # it needs the package triton
    from ..sparse.triton_decoding import DecodingKeys


class Cache:
    """Keys and values of up to `limit` tokens, on the ranks of `sp`. Rows of a batch have one
    length.

    sp      the ranks that share the tokens, by default this one alone. Their layout does not count.
    layers  the number of attention layers of the model
    limit   the most tokens. Memory is reserved with the first keys, which set shape and dtype.
    length  the number of tokens so far, which only new tokens change

    `prefill` yields chunks of a prompt, which a model takes as its cache. Then the cache itself is
    the model's cache. All ranks pass the same new tokens, one or a few, and get the same results.
    The key of position p stays on rank (p // 64) % size. There are no gradients.

    Raises ValueError for layers or a limit below 1, TypeError for arguments of other types, and
    AttributeError on all ranks if `length` is set.
    """

    def __init__(self, sp: SequenceParallel | None, layers: int, limit: int):
        self.sp = check_sp(SequenceParallel() if sp is None else sp)
        self.layers, self._limit = as_int("layers", layers), as_int("limit", limit)
        for name in ("layers", "limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self._length = 0
        self._kept: dict[int, Kept] = {}
        # of layers with sparse attention: of the prompt, and with new tokens on GPUs
        self._sums: dict[int, KeySums] = {}
        self._decoding: dict[int, DecodingKeys] = {}
        self._lengths = [0] * self.layers  # tokens of each layer
        self._filling: Prompt | None = None  # its prefill has not ended
        self._positions = Positions(self.sp, torch.empty(0, dtype=torch.int64), 0, self.limit)
        self._new = NewTokens(0, [], [])

    @property
    def limit(self) -> int:
        """The most tokens. It is read-only, since memory is reserved for as many."""
        return self._limit

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        return self._length

    @length.setter
    def length(self, length: int) -> NoReturn:
        error = AttributeError(
            f"a Cache cannot take tokens back: expected a length that stays {self._length}, got "
            f"{length}: after a rejected draft, prefill another Cache with the tokens to keep"
        )
        refuse_call(error, self.sp.process_group, self.sp.double_group, "a new length of a Cache")

    def prefill(
        self, length: int, tokens: int | None = None, layout: str = "zigzag"
    ) -> Iterator[PrefillChunk]:
        """Yield the chunks of a prompt of `length` tokens, which are the first of the cache.

        tokens  the most tokens of a chunk, on all ranks together, by default all
        layout  how each chunk is cut over the ranks: the name of a layout

        A model computes each chunk before the next one is requested. It returns logits of the
        prompt's last token only, (B, 1, V), on all ranks with the last chunk. Rotary scalings by
        length, and `dense_len` of sparse attention, take the length of the prompt.

        A prefill that failed or was left early may be started again, with other arguments.

        Raises ValueError on all ranks if the cache is not empty, if the prompt exceeds its limit,
        if a chunk has fewer tokens than there are ranks, or if there is not enough memory. The
        first attention raises RanksDisagree on all ranks if they passed different arguments.
        """
        try:
            length = as_int("length", length)
            if self.length or any(self._lengths):
                raise ValueError(
                    f"expected an empty Cache, got one with {self.length} tokens: pass more tokens "
                    "to the model with cache=cache"
                )
            self._check_limit(length)
            if 1 <= length < self.sp.size:
                raise ValueError(
                    f"expected a prompt of at least {self.sp.size} tokens, one for each rank, got "
                    f"{length}: without a prefill, pass them as new tokens of the empty Cache, "
                    "model(tokens, positions, cache=cache) on all ranks"
                )
            prompt = Prompt(
                self.sp,
                self.layers,
                length,
                length if tokens is None else tokens,
                layout,
                limit=self.limit,
                later=self.count_own(length, self.limit),
                add_sums=self._add_sums,
            )
        except (TypeError, ValueError) as error:
            refuse_call(error, self.sp.process_group, self.sp.double_group)
        if self._filling is not None:
            self._filling.is_replaced = True
        self._filling, self._sums = prompt, {}  # those of an earlier attempt do not count
        yield from cast("Iterator[PrefillChunk]", prompt.forward(last=True))
        self._kept = prompt.results
        self._length, self._lengths = prompt.length, [prompt.length] * self.layers
        mine = prompt.layout.positions(self.sp.rank)
        self._positions = Positions(self.sp, mine, prompt.length, self.limit)
        self._filling = None

    @property
    def _dense_lens(self) -> set[int]:
        """The `dense_len` of layers with sparse attention."""
        of_prompt = {keys.sparse.dense_len for keys in self._sums.values()}
        return of_prompt | {keys.sparse.dense_len for keys in self._decoding.values()}

    def longest(self, positions: Tensor) -> Tensor:
        """Return the length by which rotary scalings choose frequencies, that of the text so far:
        () for `positions` (S,) int64, (B,) for (B, S).
        """
        return positions.amax(-1) + 1

    @not_compiled
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None = None,
        *,
        sinks: Tensor | None = None,
        sparse: InfLLMV2 | None = None,
        flash: str = "auto",
        softcap: float | None = None,
        deterministic: bool = False,
        strategy: str = "auto",
    ) -> Tensor:
        """Keep k and v of new tokens, and return the attention of q to all tokens so far: (B, S, H,
        D), in q's dtype or autocast's, without gradient. All ranks pass the same tensors.

        layer            the number of the layer, 0 to `layers` - 1. All layers compute the same
                         tokens before there are new ones.
        q                (B, S, H, D)
        k, v             (B, S, G, D)
        window           as nn.BurstAttention's
        flash, strategy  those of a prefill. They have no meaning here: kernels/few_queries.py has
                         the kernels of new tokens, and all are deterministic

        The others are burst_attn_func's. Ranks agree in the first layer of new tokens. There it
        raises ValueError on all ranks if the cache is full, if another layer lacks earlier tokens,
        or if inputs do not fit on any rank.
        """
        rings = make_rings(self.sp.process_group, self.sp.double_group)
        doing = "a call with a Cache"
        q, k, v = (autocast(x) for x in (q, k, v))
        on_device = torch.cuda.device_of(q)  # kernels rely on it being the current one
        with on_device, torch.no_grad(), admit_one_thread(rings, doing), without_autocast(q):
            is_known = isinstance(layer, Integral) and 0 <= layer < self.layers
            if not is_known or self._lengths[layer] == self.length:
                agree(rings, "a Cache", lambda: self._describe(rings, layer, q, k, v, sparse))
                for ring in rings.shared:
                    ring.connect(q.device)
                self._begin(q.shape[1])
            with report_failure(rings, doing):
                self._check_inputs(layer, q, k, v)
                self._check_sums(layer, sparse)
                kept = self._keep(layer, k, v)
                spec = Spec(q.shape[-1] ** -0.5, deterministic, softcap)
                if sparse is not None:
                    self._add_new_sums(layer, k, sparse)
                if sparse is None or sparse.is_dense(self.length):
                    spans = self._send_spans(window, q.device)
                    parts = find_kernels(q).attend(q, kept.k, kept.v, spans, spec)
                else:
                    parts = self._attend_sparse(layer, q, kept, sparse, spec)
                out, lse = merge_ranks(rings, parts, q, q.dtype if sinks is None else None)
        if sinks is not None:
            out = decoded_with_sinks(out, lse.transpose(1, 2), sinks).to(q.dtype)
        return out

    def _describe(
        self, rings: Rings, layer: int, q: Tensor, k: Tensor, v: Tensor, sparse: InfLLMV2 | None
    ) -> dict[str, Any]:
        """Return the terms that ranks compare before new tokens. Raises ValueError for wrong
        inputs.
        """
        if not 0 <= as_int("layer", layer) < self.layers:
            raise ValueError(f"expected a layer below {self.layers} in this Cache, got {layer}")
        refuse_nope(sparse)
        self._check_ready(q.shape[1])
        self._check_inputs(layer, q, k, v)
        self._check_sums(layer, sparse)
        check_device(rings, q)
        terms = {"layer": layer, "length": self.length, "limit": self.limit, "sparse": str(sparse)}
        return terms | {"shapes": [[*q.shape], [*k.shape]], "dtype": str(q.dtype)}

    def _check_ready(self, tokens: int) -> None:
        """Raise ValueError unless all layers can compute so many new tokens now."""
        if self._filling is not None:
            raise ValueError("expected a Cache whose prefill has ended, got one in a prefill")
        behind = [n for n, length in enumerate(self._lengths) if length < self.length]
        if behind:
            ahead = self._lengths.index(self.length)
            raise ValueError(
                f"layer {behind[0]} has {self._lengths[behind[0]]} tokens, layer {ahead} has "
                f"{self.length}: expected all {self.layers} layers of this Cache to compute each "
                "token"
            )
        self._check_limit(self.length + tokens)

    def _check_limit(self, length: int) -> None:
        if length > self.limit:
            raise ValueError(
                f"the cache is full: it has a limit of {self.limit} tokens, expected at most "
                f"{self.limit - self.length} new ones, got {length - self.length}: make a Cache "
                "with a larger limit"
            )

    def _check_inputs(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or not q.shape[1]:
            raise ValueError(
                "expected q, k and v (batch, tokens, heads, head size) of at least one token, and "
                f"k and v of one shape, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
            )
        same = q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
        if not same or q.shape[2] % k.shape[2] or not q.dtype == k.dtype == v.dtype:
            raise ValueError(
                "expected q and k of one batch, tokens, head size and dtype, and a multiple of k's "
                f"heads in q, got {tuple(q.shape)} {q.dtype} and {tuple(k.shape)} {k.dtype}"
            )
        began = len(self._new.places)
        if self._lengths[layer] < self.length and q.shape[1] != began:
            raise ValueError(
                f"expected {began} new tokens in layer {layer}, as in earlier layers, got "
                f"{q.shape[1]}"
            )
        kept = self._kept.get(layer)
        if kept is None:
            return
        had, given = ((len(x), *x.shape[2:], x.dtype, x.device) for x in (kept.k, k))
        if had != given:
            raise ValueError(
                f"layer {layer} of the cache has keys (batch, heads, head size, dtype, device) "
                f"{had}, got {given}"
            )

    def _check_sums(self, layer: int, sparse: InfLLMV2 | None) -> None:
        """Raise ValueError if sums of keys lack earlier tokens of a layer."""
        summed = self._sums[layer].tokens if layer in self._sums else 0
        if sparse is not None and layer not in self._decoding and summed < self._lengths[layer]:
            raise ValueError(
                f"expected sparse=None, as for {self._lengths[layer] - summed} earlier tokens of "
                f"layer {layer}, got {sparse}"
            )

    def _begin(self, tokens: int) -> None:
        """Note new tokens, and which of their keys stay on this rank."""
        start, stop, before = self.length, self.length + tokens, self._positions.count
        own = [p // BLOCK % self.sp.size == self.sp.rank for p in range(start, stop)]
        stops = [before + count for count in itertools.accumulate(own)]
        self._positions.count = stops[-1]
        places = [end - 1 if mine else -1 for end, mine in zip(stops, own, strict=True)]
        self._length, self._new = stop, NewTokens(start, places, stops)

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> Kept:
        """Keep the new keys and values that stay on this rank. Return all of its memory."""
        kept, new = self._kept.get(layer), self._new
        if kept is None:
            with reserve_memory(self.limit):
                kept = self._kept[layer] = Kept(k, v, self.count_own(0, self.limit))
        if new.on_device is None:
            new.on_device = send_to_device(torch.tensor(new.places), k.device)
        find_kernels(k).put(k, v, kept.k, kept.v, new.on_device)
        self._lengths[layer] = self.length
        return kept

    def count_own(self, start: int, stop: int) -> int:
        """Return how many keys of new tokens at positions `start` to `stop` - 1 stay here."""
        size, rank = self.sp.size, self.sp.rank

        def before(position: int) -> int:
            rounds, rest = divmod(position, BLOCK * size)
            return rounds * BLOCK + min(max(rest - rank * BLOCK, 0), BLOCK)

        return before(stop) - before(start)

    def _send_spans(self, window: int | None, device: torch.device) -> Tensor:
        """Return the spans of this rank's keys that new tokens see, (S, 2) int64 on a device."""
        spans = self._new.spans
        if window not in spans:
            spans[window] = send_to_device(torch.tensor(self._find_spans(window)), device)
        return spans[window]

    def _find_spans(self, window: int | None) -> list[list[int]]:
        """Return the spans of this rank's keys that new tokens see: for each token the first key,
        and the key after the last one.
        """
        new, starts = self._new, [0] * len(self._new.stops)
        if window is not None:
            hidden = torch.arange(new.start, self.length) - window
            starts = torch.searchsorted(self._positions.on_host, hidden, right=True).tolist()
        return [[start, stop] for start, stop in zip(starts, new.stops, strict=True)]

    def _add_sums(self, layer: int, k: Tensor, sparse: InfLLMV2) -> None:
        """Add the keys (B, S, G, D) of the next tokens, of all ranks, to what blocks are chosen
        by.
        """
        self._sums.setdefault(layer, KeySums(sparse)).extend(k)

    def _add_new_sums(self, layer: int, k: Tensor, sparse: InfLLMV2) -> None:
        """Do what `_add_sums` does with new tokens, on GPUs in memory that a graph may write."""
        if find_kernels(k) is few_queries:
            self._add_sums(layer, k, sparse)
            return
        from ..sparse.triton_decoding import DecodingKeys

        if layer not in self._decoding:
            with reserve_memory(self.limit):
                sums = self._sums.pop(layer, None)
                self._decoding[layer] = DecodingKeys(sums, k, self.limit, sparse)
        self._decoding[layer].extend(k, self._new.first_on(k.device))

    def _attend_sparse(
        self, layer: int, q: Tensor, kept: Kept, sparse: InfLLMV2, spec: Spec
    ) -> Partials:
        """Return the attention of q to the keys of this rank in the chosen blocks."""
        if layer in self._decoding:
            at_hand = self._positions.in_blocks(sparse.block_size, q.device)
            first = self._new.first_on(q.device)
            return self._decoding[layer].attend(
                q, kept.k, kept.v, at_hand, first, self._new.prepared, spec
            )
        places, outs, lses = torch.arange(self._new.start, self.length), [], []
        k, v = (x[:, : self._positions.count] for x in (kept.k, kept.v))
        positions = self._positions.on(q.device)[: self._positions.count]
        for row, keys in enumerate(self._sums[layer].compress()):
            chosen = choose_in_document(q[row], places, keys, sparse, spec.scale)
            out, lse = attend_to_chosen(
                q[row], k[row], v[row], positions, places, chosen, sparse, spec
            )
            outs.append(out)
            lses.append(lse.T)
        return torch.stack(outs).unsqueeze(0), torch.stack(lses).unsqueeze(0)
