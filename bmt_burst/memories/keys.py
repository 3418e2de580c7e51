"""Softmax attention as a kind of layer. Its memory holds keys and values.

Letters: B batch, C tokens of a rank in a chunk, S new tokens, T keys of a rank, H query heads, G kv
heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..base.kept import find_difference
from ..calls.autograd import Past
from ..calls.inputs import check_sinks
from ..calls.softmax import SoftmaxAttention, attend, reserve_ahead
from ..kernels.few_queries import find_kernels, has_kernels
from ..merging.parts import Partials
from ..merging.sinks import decoded_with_sinks
from ..ranks.sequence_parallel import WholeSequence
from ..spec import Spec
from .chunk_keys import ChunkKeys, find_keys
from .new_tokens import NewTokens, count_own
from .protocol import Kind, Memory, Room, Turn, check_alike, reserve_memory, select_rows


@dataclass(frozen=True)
class Softmax(SoftmaxAttention):
    """Softmax attention as a kind of layer, which `part.mix` takes.

    scale      factor of the scores, by default 1 / sqrt(D)
    window     a token sees only itself and the window - 1 tokens before it, if the mask allows
    extension  what burst_attn_func takes as `sparse`
    flash, deterministic, strategy, backward, group_bytes, softcap
               as burst_attn_func's

    Its tensors besides q, k and v are the sinks (H,) or None, and those of the extension. Raises
    TypeError for a value of a wrong type, ValueError for one that is out of range.
    """

    def memory(self, room: Room, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> KeyMemory:
        if (extension := self.extension) is None:
            return KeyMemory(self, room, k, v)
        if extension.memory is None:
            raise ValueError(
                f"{extension.name} has no chunks, prompts or new tokens: compute the whole "
                "sequence in one call"
            )
        made: KeyMemory = extension.memory(self, room, k, v)
        return made

    def spec(self, q: Tensor) -> Spec:
        return self.make_spec(q.shape[-1], q.shape[-1], q.dtype)


class KeyMemory(Memory):
    """Keys and values of a layer. Those of chunks lie in the places that `ChunkKeys` gives them,
    and those of new tokens follow.

    kept  the keys, the values, and what else a subclass keeps of each token, (B, T, G, D) each
    """

    def __init__(self, kind: Softmax, room: Room, *like: Tensor):
        self.kind, self.room, self.rows = kind, room, len(like[0])
        # some extensions are dense in short sequences
        extension = kind.extension and kind.extension.in_chunks(room.masks)
        self.kind_of_chunks = replace(kind, window=None, extension=extension)
        self.keys: tuple[ChunkKeys, ...] = ()
        count = length = 0
        if room.chunks is not None:
            of_sequence = room.masks, room.chunks, room.sp.rank
            self.keys = find_keys(*of_sequence, kind.window, keeps_all=room.limit is not None)
            count = max(each.own.stop for each in self.keys)
            length = room.chunks.seq_len
        if room.limit is not None:
            count += count_own(room.sp, length, room.limit)
        with reserve_memory(room.limit):
            self.kept = [x.new_empty(len(x), count, *x.shape[2:]) for x in like]
        self.difference = torch.zeros((), dtype=torch.float32, device=like[0].device)

    @functools.cached_property
    def sums(self) -> list[Tensor]:
        """The sums of gradients of keys and values, in the accumulator's dtype."""
        return [torch.zeros_like(x, dtype=accumulator_dtype(x.dtype)) for x in self.kept[:2]]

    def check(self, kind: Kind, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> None:
        layer = self.room.layer
        if not isinstance(kind, Softmax):
            raise ValueError(f"layer {layer} keeps keys of {self.kind.name}, got {kind.name}")
        for name in ("window", "extension", "softcap", "scale"):
            expected, found = getattr(self.kind, name), getattr(kind, name)
            if found != expected:
                shown = "softmax_scale" if name == "scale" else name
                raise ValueError(
                    f"expected {shown}={expected}, as in earlier calls of layer {layer}, got "
                    f"{shown}={found}"
                )
        if v.shape[3] != q.shape[3]:
            raise ValueError(
                f"chunks and caches take values of the keys' head size, {q.shape[3]}, got "
                f"{v.shape[3]}"
            )
        for name, x, earlier in zip("kv", (k, v), self.kept[:2], strict=True):
            check_alike(layer, name, x, self.rows, earlier)
        check_sinks(tensors[0] if tensors else None, q)

    def keep(
        self, turn: Turn, q: Tensor, k: Tensor, v: Tensor, *tensors: Any
    ) -> Callable[[], Tensor]:
        return functools.partial(self._attend_chunk, turn, self.put(turn, k, v), q, k, v, *tensors)

    def put(self, turn: Turn, *tensors: Tensor) -> Past:
        """Keep tensors (B, C, G, D) of a chunk. Return all keys and values that its queries see,
        with the sums of their gradients if a backward follows.
        """
        keys = self.keys[turn.number]
        if turn.differentiates and turn.is_first and turn.number < len(self.keys) - 1:
            self._open(tensors, keys)
        with torch.no_grad():
            for kept, x in zip(self.kept, tensors, strict=True):
                kept[:, keys.own] = x
        k, v = (x[:, keys.seen] for x in self.kept[:2])
        dk, dv = (x[:, keys.seen] for x in self.sums) if turn.differentiates else (None, None)
        begin = turn.begin if turn.differentiates else None
        return Past(k, v, dk, dv, slice(keys.own.start - keys.seen.start, None), begin)

    def _attend_chunk(
        self, turn: Turn, past: Past, q: Tensor, k: Tensor, v: Tensor, *tensors: Any
    ) -> Tensor:
        rings, kind = self.room.sp.rings, self.kind_of_chunks
        if kind.extension is None:
            tensors = tensors[:1]
        if turn.terms is not None:
            # Later there may be no memory left. To let it grow with each chunk would be slow.
            terms = turn.terms | {"window": self.kind.window}
            sequences = functools.partial(map, _find_sequence, self.keys)
            reserve_ahead(rings, sequences, kind, (q, k, v, *tensors), terms, turn.with_backward)
        sequence = _find_sequence(self.keys[turn.number])
        return attend(rings, sequence, kind, q, k, v, tensors, past)[0]

    @torch.no_grad()
    def close(self, number: int) -> None:
        keys = self.keys[number]
        if keys.kept != keys.own:
            for x in self.kept:
                x[:, keys.kept] = x[:, keys.last].clone()

    @torch.no_grad()
    def _open(self, tensors: Iterable[Tensor], keys: ChunkKeys) -> None:
        """Compare a chunk's tensors with the kept ones, and make room for the sums of all its keys.
        Those of keys that no later chunk sees are 0.
        """
        last = slice(keys.last.start - keys.own.start, None)
        pairs = zip(tensors, self.kept, strict=True)
        each = [find_difference(x[:, last], kept[:, keys.kept]) for x, kept in pairs]
        self.difference = torch.stack([x.float() for x in each]).amax()
        if keys.kept != keys.own:
            for x in self.sums:
                later = x[:, keys.kept].clone()
                x[:, keys.own] = 0
                x[:, keys.last] = later

    def attend(self, new: NewTokens, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        sinks, *others = tensors or (None,)
        self.add(new, k, v)
        parts = self._attend_part(new, q, k, *others)
        out, lse = new.merge(parts, q, q.dtype if sinks is None else None)
        if sinks is not None:
            out = decoded_with_sinks(out, lse.transpose(1, 2), sinks).to(q.dtype)
        return out

    def add(self, new: NewTokens, k: Tensor, v: Tensor) -> None:
        """Keep k and v (B, S, G, D) of new tokens."""
        find_kernels(k).put(k, v, *self.kept[:2], new.on(k.device, "places"))

    def _attend_part(self, new: NewTokens, q: Tensor, k: Tensor, *others: Tensor) -> Partials:
        """Return the attention of new tokens to the keys of this rank."""
        spans = new.on(q.device, "spans", self.kind.window)
        return find_kernels(q).attend(q, *self.kept[:2], spans, self.kind.spec(q))

    def select_rows(self, rows: Tensor, count: int) -> bool:
        in_place, self.rows = len(rows) == self.rows, len(rows)
        for n, x in enumerate(self.kept):
            used = select_rows(x[:, :count], rows)
            if not in_place:
                with torch.inference_mode(x.is_inference()):  # the mode in which it may change
                    self.kept[n] = x.new_empty(len(rows), *x.shape[1:])
                    self.kept[n][:, :count] = used
        return in_place

    def graph_obstacle(self) -> str | None:
        k = self.kept[0]
        if has_kernels(k):
            return None
        return f"keys are {k.dtype} on {k.device}, for which there is no kernel"


def _find_sequence(keys: ChunkKeys) -> WholeSequence:
    """Return the queries of a chunk and the keys that they see."""
    masks = keys.masks[0] if len(keys.masks) == 1 else keys.masks
    return WholeSequence.local(masks, keys.chunks.layouts[keys.number], keys.layout)
