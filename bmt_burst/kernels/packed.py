"""The arguments of FlashAttention's variable-length functions for a `KernelCall`.

Each tile is a sequence of packed tokens. The tokens between tiles are sequences without keys or
without queries, so that each token is in one. Batches follow one another. The results are cached in
the call. The host waits for no GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..base.streams import current_stream, send_to_device
from ..sequence.span import length
from ..sequence.tile import KernelCall

Kept = TypeVar("Kept")


class Sequences(NamedTuple):
    """The sequences of a call on q (B, S, ...) and k, v (B, T, ...).

    cu_seqlens_q, cu_seqlens_k  (sequences + 1,) int32: first token of each in the packed tokens,
                                then B S or B T
    longest                     tokens of the longest sequence of either side
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest: int


def sequences(call: KernelCall, batch: int, device: torch.device) -> Sequences:
    """Return the sequences of a call, on a device."""

    def make() -> Sequences:
        spans = call.sequences()
        lengths = [[length(pair[side]) for pair in spans] * batch for side in (0, 1)]
        starts = [[*itertools.accumulate(side, initial=0)] for side in lengths]
        tables = [torch.tensor(side, dtype=torch.int32) for side in starts]
        q_starts, kv_starts = (send_to_device(table, device) for table in tables)
        return Sequences(q_starts, kv_starts, max(map(max, lengths)))

    return prepare_once(call, ("sequences", batch), device, make)


def blind_queries(call: KernelCall, device: torch.device) -> Tensor | None:
    """Return which queries see no key, (S,) bool on a device, or None if all see some."""

    def make() -> Tensor | None:
        result = torch.ones(call.q_tokens, dtype=torch.bool)
        for q, kv in call.tiles:  # no tile is empty, and a left bound leaves each query a key
            hidden = 0 if call.right is None else max(length(q) - length(kv) - call.right, 0)
            result[q[0] + hidden : q[1]] = False
        return send_to_device(result, device) if result.any() else None

    return prepare_once(call, ("blind",), device, make)


def effective_band(call: KernelCall) -> tuple[int | None, int | None]:
    """Return the call's left and right, with None for a bound that hides nothing and costs time."""
    if "band" not in call.prepared:
        left, right = call.left, call.right
        if left is not None and left >= max((length(kv) for _, kv in call.tiles), default=0) - 1:
            left = None
        if right and right >= max((length(q) for q, _ in call.tiles), default=0) - 1:
            right = None
        call.prepared["band"] = left, right
    band: tuple[int | None, int | None] = call.prepared["band"]
    return band


def make_dense(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def pack(*tensors: Tensor) -> list[Tensor]:
    """Flatten (B, S, ...) to (B S, ...)."""
    return [x.flatten(0, 1) for x in tensors]


def unpack(batch: int, *tensors: Tensor) -> list[Tensor]:
    """Unflatten (B S, ...) to (B, S, ...)."""
    return [x.unflatten(0, (batch, -1)) for x in tensors]


def pack_rows(x: Tensor) -> Tensor:
    """Flatten lse or delta (B, H, S) to (H, B S)."""
    return x.transpose(0, 1).flatten(1)


def unpack_rows(x: Tensor, batch: int) -> Tensor:
    """Unflatten (H, B S) to (B, H, S)."""
    return x.unflatten(1, (batch, -1)).transpose(0, 1)


def prepare_once(
    owner: Any, name: tuple[Hashable, ...], device: torch.device, make: Callable[[], Kept]
) -> Kept:
    """Return the result of `make`, which is called once for each GPU and stream, since a copy to a
    GPU is made in a stream's order. `owner.prepared` keeps it, as in a KernelCall.
    """
    key = *name, device, current_stream(device)
    if key not in owner.prepared:
        owner.prepared[key] = make()
    result: Kept = owner.prepared[key]
    return result
