"""Keys and values of earlier tokens over the ranks of a group, for generation.

The prompt is computed in chunks, each of them cut over the ranks, and its keys stay where they were
computed. Then every rank computes the whole model on the new tokens. Their keys stay on one rank
each. A rank attends to its own keys, and one gather of (out, lse) merges the ranks' results.

    cache = Cache(sp, layers=32, limit=140_000)
    for chunk in cache.prefill(length, tokens=16384):
        logits = model(chunk.shard(x), chunk.shard(positions, 0), cache=chunk)
    # on all ranks: logits of the last token, then the next token and its position
    logits = model(token, position, cache=cache)

Letters: B batch, S new tokens, C tokens of a rank in a chunk, T keys of a rank, H query heads, G kv
heads, D head size, E model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from .base.arguments import as_int
from .base.autocast import autocast, without_autocast
from .base.growing import Growing
from .calls.autograd import Past
from .calls.refusal import refuse_call
from .chunks import Chunk, Chunks, Kept
from .kernels.few_queries import Partials, attend_masked, attend_whole, merge
from .merging.sinks import decoded_with_sinks
from .ranks.agreement import admit_one_thread, agree, report_failure
from .ranks.rings import Rings, check_device, make_rings
from .ranks.sequence_parallel import SequenceParallel, check_sp
from .sequence.mask import Mask
from .sequence.span import Span
from .sparse.cache import KeySums, attend_to_chosen
from .sparse.choice import choose_in_document
from .sparse.config import InfLLMV2
from .spec import Spec

BLOCK = 64  # neighbouring new tokens whose keys stay on one rank


class Cache:
    """Keys and values of up to `limit` tokens, on the ranks of `sp`. Rows of a batch have one
    length.

    sp      the ranks that share the tokens, by default this one alone. Their layout does not count.
    layers  the number of attention layers of the model
    limit   the most tokens. Memory is reserved with the first keys, which set shape and dtype.
    length  the number of tokens so far

    `prefill` yields chunks of a prompt, which a model takes as its cache. Then the cache itself is
    the model's cache. All ranks pass the same new tokens, one or a few, and get the same results.
    The key of position p stays on rank (p // 64) % size. There are no gradients.

    Raises ValueError for layers or a limit below 1, TypeError for arguments of other types.
    """

    def __init__(self, sp: SequenceParallel | None, layers: int, limit: int):
        self.sp = check_sp(SequenceParallel() if sp is None else sp)
        self.layers, self.limit = as_int("layers", layers), as_int("limit", limit)
        for name in ("layers", "limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self.length = 0
        self._kept: dict[int, Kept] = {}
        self._sums: dict[int, KeySums] = {}  # of layers with sparse attention
        self._lengths = [0] * self.layers  # tokens of each layer
        self._filling: _Prompt | None = None  # its prefill has not ended
        self._positions = _Positions()
        self._new = _NewTokens()

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
            prompt = _Prompt(self, length, length if tokens is None else tokens, layout)
        except (TypeError, ValueError) as error:
            refuse_call(error, self.sp.process_group, self.sp.double_group)
        self._filling, self._sums = prompt, {}  # those of an earlier attempt do not count
        yield from cast("Iterator[PrefillChunk]", prompt.forward(last=True))
        self._kept = prompt.results
        self.length, self._lengths = prompt.length, [prompt.length] * self.layers
        self._positions.add([prompt.layout.positions(self.sp.rank)])
        self._filling = None

    def longest(self, positions: Tensor) -> Tensor:
        """Return the length by which rotary scalings choose frequencies, that of the text so far:
        () for `positions` (S,) int64, (B,) for (B, S).
        """
        return positions.amax(-1) + 1

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

        layer     the number of the layer, 0 to `layers` - 1. All layers compute the same tokens
                  before there are new ones.
        q         (B, S, H, D)
        k, v      (B, S, G, D)
        window    as nn.BurstAttention's
        strategy  that of a prefill; it has no meaning here

        The others are burst_attn_func's. Ranks agree in the first layer of new tokens. There it
        raises ValueError on all ranks if the cache is full, if another layer lacks earlier tokens,
        or if inputs do not fit on any rank.
        """
        rings = make_rings(self.sp.process_group, self.sp.double_group)
        doing = "a call with a Cache"
        q, k, v = (autocast(x) for x in (q, k, v))
        on_device = torch.cuda.device_of(q)  # kernels rely on it being the current one
        with on_device, torch.no_grad(), admit_one_thread(rings, doing), without_autocast(q):
            if not 0 <= layer < self.layers or self._lengths[layer] == self.length:
                agree(rings, "a Cache", lambda: self._describe(rings, layer, q, k, v, sparse))
                for ring in rings.shared:
                    ring.connect(q.device)
                self._begin(q.shape[1])
            with report_failure(rings, doing):
                self._check_inputs(layer, q, k, v)
                kept = self._keep(layer, k, v)
                spec = Spec(q.shape[-1] ** -0.5, deterministic, softcap)
                if sparse is not None:
                    self._add_sums(layer, k, sparse)
                if sparse is None or sparse.is_dense(self.length):
                    parts = self._attend_dense(q, *kept, window, flash, spec)
                else:
                    parts = self._attend_sparse(layer, q, *kept, sparse, spec)
                out, lse = _merge_ranks(rings, *merge(parts, q))
        if sinks is not None:
            out = decoded_with_sinks(out, lse, sinks)
        return out.to(q.dtype)

    def _describe(
        self, rings: Rings, layer: int, q: Tensor, k: Tensor, v: Tensor, sparse: InfLLMV2 | None
    ) -> dict[str, Any]:
        """Return the terms that ranks compare before new tokens. Raises ValueError for wrong
        inputs.
        """
        if not 0 <= layer < self.layers:
            raise ValueError(f"expected a layer below {self.layers} in this Cache, got {layer}")
        if self._filling is not None:
            raise ValueError("expected a Cache whose prefill has ended, got one in a prefill")
        refuse_nope(sparse)
        behind = [n for n, length in enumerate(self._lengths) if length < self.length]
        if behind:
            raise ValueError(
                f"layer {behind[0]} has {self._lengths[behind[0]]} tokens, layer {layer} has "
                f"{self.length}: expected all {self.layers} layers of this Cache to compute each "
                "token"
            )
        self._check_inputs(layer, q, k, v)
        self._check_limit(self.length + q.shape[1])
        check_device(rings, q)
        terms = {"layer": layer, "length": self.length, "limit": self.limit, "sparse": str(sparse)}
        return terms | {"shapes": [[*q.shape], [*k.shape]], "dtype": str(q.dtype)}

    def _check_limit(self, length: int) -> None:
        if length > self.limit:
            raise ValueError(
                f"the cache is full: it has a limit of {self.limit} tokens, expected at most "
                f"{self.limit - self.length} new ones, got {length - self.length}"
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
        if self._lengths[layer] < self.length:  # tokens that an earlier layer began
            new, got = self._new, (self._lengths[layer], q.shape[1])
            if (new.start, new.count) != got:
                raise ValueError(
                    f"expected layer {layer} to have {new.start} tokens and {new.count} new ones, "
                    f"as earlier layers do, got {got[0]} and {got[1]}"
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

    def _begin(self, tokens: int) -> None:
        """Note new tokens, and which of their keys stay on this rank."""
        start, stop, before = self.length, self.length + tokens, self._positions.count
        own = tuple(
            (max(block * BLOCK, start), min((block + 1) * BLOCK, stop))
            for block in range(start // BLOCK, -(-stop // BLOCK))
            if block % self.sp.size == self.sp.rank
        )
        self._positions.add([torch.arange(*span) for span in own])
        self.length, self._new = stop, _NewTokens(start, tokens, own, before)

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new keys and values that stay on this rank. Return all that it has: (B, T, G, D)
        each.
        """
        kept, new = self._kept.get(layer), self._new
        if kept is None:
            with reserve_memory(self.limit):
                kept = self._kept[layer] = Kept(k, v, self.count_own(0, self.limit))
        at = new.before
        for start, stop in new.own:
            some = slice(start - new.start, stop - new.start)
            kept.put(k[:, some], v[:, some], slice(at, at := at + stop - start))
        self._lengths[layer] = self.length
        return kept.k[:, :at], kept.v[:, :at]

    def count_own(self, start: int, stop: int) -> int:
        """Return how many keys of new tokens at positions `start` to `stop` - 1 stay here."""
        size, rank = self.sp.size, self.sp.rank

        def before(position: int) -> int:
            rounds, rest = divmod(position, BLOCK * size)
            return rounds * BLOCK + min(max(rest - rank * BLOCK, 0), BLOCK)

        return before(stop) - before(start)

    def _attend_dense(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None, flash: str, spec: Spec
    ) -> list[Partials]:
        """Return the attention of q to the keys of this rank."""
        whole, edges = self._find_visible(window, q.device)
        parts = []
        if whole[0] < whole[1]:
            keys = slice(*whole)
            parts += attend_whole(q, k[:, keys], v[:, keys], flash, spec)
        for (start, stop), visible in edges:
            keys = slice(start, stop)
            parts.append(attend_masked(q, k[:, keys], v[:, keys], visible, spec))
        return parts

    def _find_visible(self, window: int | None, device: torch.device) -> _Visible:
        """Return the keys of this rank that all new tokens see, and those that some of them see."""
        new, keys = self._new, self._positions.on_host
        if window not in new.visible:
            queries = torch.arange(new.start, new.start + new.count)
            ends = queries[[0, -1]]
            high = torch.searchsorted(keys, ends, right=True).tolist()
            low = [0, 0]
            if window is not None:
                low = torch.searchsorted(keys, ends - window, right=True).tolist()
            whole, edges = (low[1], high[0]), [(low[0], low[1]), (high[0], high[1])]
            if whole[0] >= whole[1]:
                whole, edges = (0, 0), [(low[0], high[1])]
            found = []
            for start, stop in edges:
                if start < stop:
                    distance = queries.unsqueeze(1) - keys[start:stop]
                    seen = distance >= 0
                    if window is not None:
                        seen &= distance < window
                    found.append(((start, stop), seen.to(device)))
            new.visible[window] = whole, found
        return new.visible[window]

    def _add_sums(self, layer: int, k: Tensor, sparse: InfLLMV2) -> None:
        """Add the keys (B, S, G, D) of the next tokens, of all ranks, to what blocks are chosen
        by.
        """
        self._sums.setdefault(layer, KeySums(sparse)).extend(k)

    def _attend_sparse(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sparse: InfLLMV2, spec: Spec
    ) -> list[Partials]:
        """Return the attention of q to the keys of this rank in the chosen blocks."""
        places, outs, lses = torch.arange(self._new.start, self.length), [], []
        positions = self._positions.on(q.device)
        for row, keys in enumerate(self._sums[layer].compress()):
            chosen = choose_in_document(q[row], places, keys, sparse, spec.scale)
            out, lse = attend_to_chosen(
                q[row], k[row], v[row], positions, places, chosen, sparse, spec
            )
            outs.append(out)
            lses.append(lse)
        return [(torch.stack(outs).unsqueeze(0), torch.stack(lses).unsqueeze(0))]


_Visible = tuple[Span, list[tuple[Span, Tensor]]]


@dataclass
class _NewTokens:
    """The tokens that layers compute now.

    start    their first position
    count    their number
    own      the positions whose keys stay on this rank
    before   the number of keys that this rank had before
    visible  what they see of this rank's keys, by the window of a layer
    """

    start: int = 0
    count: int = 0
    own: tuple[Span, ...] = ()
    before: int = 0
    visible: dict[int | None, _Visible] = field(default_factory=dict)


class _Positions:
    """The positions of this rank's keys: int64, rising. They are on the host, and on a device once
    they are used there.
    """

    def __init__(self) -> None:
        self._host = Growing(torch.empty(0, dtype=torch.int64))
        self._device: Growing | None = None

    def add(self, parts: list[Tensor]) -> None:
        for part in parts:
            self._host.add(part)
            if self._device is not None:
                self._device.add(part)

    @property
    def count(self) -> int:
        return self._host.count

    @property
    def on_host(self) -> Tensor:
        return self._host.rows

    def on(self, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self.on_host
        if self._device is None:
            self._device = Growing(self.on_host.to(device))
        return self._device.rows


class _Prompt(Chunks):
    """The chunks of a cache's first tokens."""

    _keeps_all = True

    def __init__(self, cache: Cache, length: int, tokens: int, layout: str):
        self.cache, self.length = cache, length
        self.results: dict[int, Kept] = {}
        super().__init__(Mask.causal(length), tokens, cache.layers, cache.sp, layout=layout)

    def _make_chunk(self, number: int, positions: Span, span: slice) -> PrefillChunk:
        return PrefillChunk(self, number, positions, span)

    def _count_places(self, window: int | None) -> int:
        new = self.cache.count_own(self.length, self.cache.limit)
        return super()._count_places(window) + new

    def _keep(
        self, chunk: Chunk, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None
    ) -> Past:
        if self.cache._filling is not self:
            raise ValueError(
                "expected a chunk of the prefill that began last, got one of an earlier prefill"
            )
        with reserve_memory(self.cache.limit):
            return super()._keep(chunk, layer, q, k, v, window)

    def _forget(self) -> None:
        self.results = dict(self._kept)
        super()._forget()


class PrefillChunk(Chunk):
    """A part of a prompt, which a model takes as its cache. `Cache.prefill` yields it."""

    chunks: _Prompt

    def select(self, x: Tensor) -> Tensor:
        """Return the prompt's last token of x (B, C, E), on all ranks: (B, 1, E) with the last
        chunk, none before.
        """
        if self is not self.chunks.chunks[-1]:
            return x[:, :0]
        sp, layout = self.chunks.sp, self.chunks.layout.layouts[self.number]
        last = sp.with_layout("contiguous").unshard(x[:, -1:], sp.size)  # of each rank
        at = layout.seq_len - 1
        [owner] = (r for r in range(sp.size) if any(at in some for some in layout.shards[r]))
        return last[:, owner : owner + 1]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Do what Chunk.attend does, and keep sums of keys for sparse attention."""
        sp, sparse = self.chunks.sp, options.get("sparse")
        try:
            refuse_nope(sparse)
        except ValueError as error:
            refuse_call(error, sp.process_group, sp.double_group)
        out = super().attend(layer, q, k, v, window, **options)
        if sparse is not None:
            layout = self.chunks.layout.layouts[self.number]
            whole = sp.with_layout(layout).unshard(autocast(k), layout.seq_len)
            self.chunks.cache._add_sums(layer, whole, sparse)
        return out


@contextlib.contextmanager
def reserve_memory(tokens: int) -> Iterator[None]:
    """Raise ValueError instead of torch's RuntimeError if memory does not suffice inside."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(
            f"not enough memory for the keys and values of {tokens:,} tokens: expected a smaller "
            "limit of the cache, or more ranks"
        ) from error


def refuse_nope(sparse: InfLLMV2 | None) -> None:
    """Raise ValueError for sparse attention that chooses by keys without rotary positions."""
    if sparse is not None and sparse.use_nope:
        raise ValueError(
            f"a Cache keeps rotated keys only: expected sparse attention without use_nope, got "
            f"{sparse}"
        )


def _merge_ranks(rings: Rings, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the merge of all ranks' out (B, S, H, D) and lse (B, H, S), in rank order."""
    if rings.size == 1:
        return out, lse
    packed = torch.cat((out, lse.transpose(1, 2).unsqueeze(-1)), -1)
    everyone = torch.stack(rings.gather_tensors(packed, [packed.shape] * rings.size))
    return merge([(everyone[..., :-1], everyone[..., -1].transpose(2, 3))], out)
