"""A `KernelCall` as the variable-length functions of FlashAttention take it: packed tokens, cut into sequences.

The tiles are sequences, and so are the tokens between them: those have no keys, or no queries. Thus every token is in
one. Batches follow one another. What is made here stays with the call, and the host waits for no GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..span import length
from ..tile import KernelCall


@dataclass(frozen=True)
class Packing:
    """The sequences of a call on q (B, S, ...) and k, v (B, T, ...).

    cu_seqlens_q, cu_seqlens_k  (sequences + 1,) int32: where each begins in the packed tokens; B S or B T at the end
    longest                     tokens of the longest one, of either side
    blind                       (B S,) bool: queries that see no key; None if all see some
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest: int
    blind: Tensor | None


def packing(call: KernelCall, batch: int, device: torch.device) -> Packing:
    """How a call is packed, on a device. On a GPU it is made, once, in the order of the current stream."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    key = "packing", batch, device, stream
    if key not in call.prepared:
        call.prepared[key] = _packing(call, batch, device)
    return call.prepared[key]


def band(call: KernelCall) -> tuple[int | None, int | None]:
    """The call's left and right, but None where that hides nothing, for which there are faster kernels."""
    left, right = call.left, call.right
    if left is not None and left >= max((length(kv) for _, kv in call.tiles), default=0) - 1:
        left = None
    if right and right >= max((length(q) for q, _ in call.tiles), default=0) - 1:
        right = None
    return left, right


def pack(x: Tensor) -> Tensor:
    """(B, S, ...) -> (B S, ...)."""
    return x.flatten(0, 1)


def unpack(x: Tensor, batch: int) -> Tensor:
    """(B S, ...) -> (B, S, ...)."""
    return x.unflatten(0, (batch, -1))


def pack_rows(x: Tensor) -> Tensor:
    """lse or delta (B, H, S) -> (H, B S)."""
    return x.transpose(0, 1).flatten(1)


def unpack_rows(x: Tensor, batch: int) -> Tensor:
    """(H, B S) -> (B, H, S)."""
    return x.unflatten(1, (batch, -1)).transpose(0, 1)


def _packing(call: KernelCall, batch: int, device: torch.device) -> Packing:
    sequences = call.sequences()
    lengths = [[length(sequence[side]) for sequence in sequences] * batch for side in (0, 1)]
    cu_seqlens = (_on(device, list(itertools.accumulate(side, initial=0)), torch.int32) for side in lengths)
    blind = _blind(call)
    return Packing(*cu_seqlens, max(map(max, lengths)), _on(device, blind * batch, torch.bool) if any(blind) else None)


def _blind(call: KernelCall) -> list[bool]:
    """Of each query, whether it sees no key. Tiles are not empty, and a left bound leaves each query one."""
    blind = [True] * call.q_tokens
    for q, kv in call.tiles:
        hidden = 0 if call.right is None else min(max(length(q) - length(kv) - call.right, 0), length(q))
        blind[q[0] + hidden : q[1]] = [False] * (length(q) - hidden)
    return blind


def _on(device: torch.device, numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on a device, copied from pinned memory if it is a GPU."""
    on_gpu = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=on_gpu).to(device, non_blocking=on_gpu)
