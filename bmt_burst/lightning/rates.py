"""Slopes: how fast the state of each head decays, by e^(-slope) a token. They are constants."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..base.arguments import as_int, check_tensor
from ..base.dtypes import accumulator_dtype
from ..base.streams import send_to_device
from ..kernels.packed import prepare_once


def alibi_slopes(num_heads: int) -> Tensor:
    """Return ALiBi's slopes, those of MiniCPM-SALA: (H,) fp32, on the CPU.

    For a power of two H, slope h is 2^(-8 (h + 1) / H). Otherwise they are the slopes of the next
    lower power of two, then every second one of twice as many heads, from the first. The formula is
    that of the paper "Train Short, Test Long" and its code.

    Raises ValueError for less than one head, TypeError for anything but a whole number.
    """
    heads = as_int("num_heads", num_heads)
    if heads < 1:
        raise ValueError(f"expected num_heads of at least 1, got {heads}")
    lower = 1 << (heads.bit_length() - 1)
    more = _geometric(2 * lower)[::2][: heads - lower]
    return torch.tensor(_geometric(lower) + more, dtype=torch.float32, device="cpu")


def _geometric(heads: int) -> list[float]:
    return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]


def decay(slopes: Tensor, tokens: Tensor) -> Tensor:
    """Return e^(-slope * tokens) (H, ...) for slopes (H,) and numbers of tokens of any shape."""
    return torch.exp(slopes.view(-1, *[1] * tokens.dim()) * -tokens)


def check_slopes(slopes: Tensor, q: Tensor) -> tuple[float, ...]:
    """Return the values of slopes for q (B, S, H, D).

    A GPU's values are read once for each tensor, since the host waits for them.

    Raises TypeError or ValueError unless they are (H,) fp32 (or fp64 for fp64 inputs) on q's device
    or the CPU, finite and at least 0, and constants.
    """
    check_tensor("slopes", slopes)
    heads, dtypes = q.shape[2], {torch.float32, q.dtype} - {torch.float16, torch.bfloat16}
    if slopes.shape != (heads,):
        raise ValueError(
            f"slopes must be ({heads},), one for each head, got shape {tuple(slopes.shape)}"
        )
    if slopes.dtype not in dtypes:
        raise TypeError(f"slopes must be torch.float32, got {slopes.dtype}")
    if slopes.device not in (q.device, torch.device("cpu")):
        raise ValueError(f"slopes must be on {q.device} or the CPU, got {slopes.device}")
    if slopes.requires_grad:
        raise ValueError("slopes have no gradient: expected requires_grad=False, got True")
    values = _read(slopes)
    for head, value in enumerate(values):
        if not 0 <= value < math.inf:
            raise ValueError(
                f"slopes must be finite and at least 0, got {value} for head {head}: the state "
                "decays by e^(-slope) a token"
            )
    return values


def send_slopes(owner: Any, values: tuple[float, ...], x: Tensor) -> Tensor:
    """Return slopes (H,) on x's device, in the accumulator's dtype. `owner` keeps them."""
    dtype = accumulator_dtype(x.dtype)

    def make() -> Tensor:
        return send_to_device(torch.tensor(values, dtype=dtype), x.device)

    return prepare_once(owner, ("slopes", values, dtype), x.device, make)


def describe_slopes(values: tuple[float, ...]) -> str:
    """Return a line that is equal for equal slopes."""
    digest = hashlib.blake2b(struct.pack(f"{len(values)}d", *values), digest_size=12).hexdigest()
    return f"{values[0]:g} to {values[-1]:g}, digest {digest}"


_known: MutableMapping[Tensor, tuple[int, tuple[float, ...]]] = WeakTensorKeyDictionary()


def _read(slopes: Tensor) -> tuple[float, ...]:
    if not slopes.is_cuda or slopes.is_inference():
        return tuple(slopes.tolist())
    version, values = _known.get(slopes, (None, ()))
    if version != slopes._version:
        values = tuple(slopes.tolist())
        _known[slopes] = slopes._version, values
    return values
