"""Rates: how fast the states of heads decay. They are constants, or each token chooses its own.

Constants are slopes: a state decays by e^(-slope) a token. Their values are terms of a call, and
decays follow from numbers of tokens.

A token's choice is log_decay: the state before the token decays by e^log_decay. Decays follow from
sums of log_decay. Each sum has its own terms alone: a difference of two running sums would round
away what follows a strong decay. Ranks send the sum of a run with its state.

Letters: B batch, S tokens of this rank, T = B S, H heads, D head size, n tokens of a chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from ..base.arguments import as_int, check_tensor
from ..base.dtypes import accumulator_dtype
from ..base.streams import send_to_device
from ..kernels.packed import prepare_once
from .segments import Faded

Slopes = tuple[float, ...] | None  # of heads, or None where each token chooses
ByRun = Mapping[int, Tensor]  # packed states (H, ...) by the number of their run
Sums = Sequence[Sequence[Faded]]


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


class Decays(NamedTuple):
    """The decays in a chunk of n tokens.

    before  (H, n, 1): from the state before the chunk to each token
    after   (H, n, 1): from each token to the state after the chunk
    pairs   (H, n, n): from key to query, 0 for later keys
    whole   (H, 1, 1): over the chunk
    """

    before: Tensor
    after: Tensor
    pairs: Tensor
    whole: Tensor


@dataclass(eq=False)
class ConstantRates:
    """The rates of slopes (H,) wide, which have these values.

    gradient  of log_decay, (T, H) wide, which a kernel fills. None: there is none
    """

    values: tuple[float, ...]
    slopes: Tensor
    gradient: None = None
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False)

    def within(self, start: int, stop: int) -> Decays:
        """Return the decays in the chunk of tokens start to stop - 1."""
        slopes, n = self.slopes, stop - start
        t = torch.arange(n, device=slopes.device).unsqueeze(1)
        pairs = _decay(slopes, (t - t.mT).clamp_min(0)).tril()
        before, after = _decay(slopes, t + 1), _decay(slopes, n - 1 - t)
        return Decays(before, after, pairs, _decay(slopes, t[:1] + n))

    def over(self, start: int, stop: int) -> Tensor:
        """Return the decay over these tokens: (H, 1, 1)."""
        return _decay(self.slopes, torch.full((1, 1), stop - start, device=self.slopes.device))

    def pack(
        self, states: Tensor, segments: Sequence[int] = (), cuts: Sequence[int] = ()
    ) -> Tensor:
        """Return what ranks send of states (N, H, D, D): (N, H, ...).

        segments  those that leave the states, where there are `cuts`. By default nothing decays
        """
        return states

    def add_up(self, direction: str, sums: Sums, packed: ByRun) -> list[Tensor]:
        """Return each of a direction's sums (H, D, D) of the packed states of runs."""

        def make() -> Tensor:
            exact = torch.tensor(self.values, dtype=torch.float64)
            tokens = torch.tensor([faded.tokens for faded in itertools.chain(*sums)])
            weights = _decay(exact, tokens.long()).mT[..., None, None].to(self.slopes.dtype)
            return send_to_device(weights, self.slopes.device)

        weights = prepare_once(self, (direction,), self.slopes.device, make)
        parts = weights.split([len(faded) for faded in sums])
        return [
            torch.stack([packed[run] for run, _ in faded]).mul_(part).sum(0)
            for faded, part in zip(sums, parts, strict=True)
        ]


def _decay(slopes: Tensor, tokens: Tensor) -> Tensor:
    """Return e^(-slope * tokens) (H, ...) for slopes (H,) and numbers of tokens of any shape."""
    return torch.exp(slopes.view(-1, *[1] * tokens.dim()) * -tokens)


@dataclass(eq=False)
class TokenRates:
    """The rates that tokens choose, log_decay (T, H) wide, with the methods of ConstantRates.

    A packed state (H, D D + 1) has the sum of its segment's log_decay at its end.
    """

    log_decay: Tensor
    gradient: Tensor | None = None

    def within(self, start: int, stop: int) -> Decays:
        # row t, column s + 1: the sum after token s up to token t
        steps = self.log_decay[start:stop].mT.unsqueeze(2).expand(-1, -1, stop - start + 1)
        decays = torch.exp(running_sum(steps.tril(), 1)).tril(1)
        return Decays(decays[..., :1], decays[:, -1, 1:, None], decays[..., 1:], decays[:, -1:, :1])

    def over(self, start: int, stop: int) -> Tensor:
        return torch.exp(self.log_decay[start:stop].sum(0)).view(-1, 1, 1)

    def pack(
        self, states: Tensor, segments: Sequence[int] = (), cuts: Sequence[int] = ()
    ) -> Tensor:
        packed = functional.pad(states.flatten(2), (0, 1))
        for place, segment in enumerate(segments):
            packed[place, :, -1] = self.log_decay[cuts[segment] : cuts[segment + 1]].sum(0)
        return packed

    def add_up(self, direction: str, sums: Sums, packed: ByRun) -> list[Tensor]:
        found = []
        for faded in sums:
            states = torch.stack([packed[run] for run, _ in faded])
            # a state decays over the runs after its own
            later = functional.pad(states[1:, :, -1].flip(0), (0, 0, 1, 0))
            decays = torch.exp(running_sum(later, 0)).flip(0).unsqueeze(2)
            total = (states[..., :-1] * decays).sum(0)
            found.append(total.view(len(total), math.isqrt(total.shape[1]), -1))
        return found


Rates = ConstantRates | TokenRates


def running_sum(x: Tensor, dim: int) -> Tensor:
    """Return the sums of x up to each entry along `dim`. They have the same bits in each run, which
    torch.cumsum does not promise on GPUs.
    """
    step, count = 1, x.shape[dim]
    while step < count:
        first, rest = x.split([step, count - step], dim)
        x = torch.cat((first, rest + x.narrow(dim, 0, count - step)), dim)
        step *= 2
    return x


def find_rates(
    owner: Any, slopes: Slopes, log_decay: Tensor | None, x: Tensor, needs_gradient: bool = False
) -> Rates:
    """Return the rates of slopes, which `owner` keeps, or of log_decay (..., H), on x's device."""
    dtype = accumulator_dtype(x.dtype)
    if slopes is None:
        assert log_decay is not None, "each token chooses"
        wide = widen(log_decay, dtype).flatten(0, -2)
        return TokenRates(wide, torch.empty_like(wide) if needs_gradient else None)

    def make() -> ConstantRates:
        return ConstantRates(slopes, send_to_device(torch.tensor(slopes, dtype=dtype), x.device))

    return prepare_once(owner, ("rates", slopes, dtype), x.device, make)


def widen(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """Return log_decay in a wide dtype. A positive value becomes NaN: the host cannot refuse that
    of a GPU without waiting for it.
    """
    return log_decay.to(dtype).masked_fill(log_decay > 0, math.nan)


def check_rates(slopes: Any, log_decay: Any, q: Tensor) -> Slopes:
    """Return the values of slopes for q (B, S, H, D), or None for a log_decay.

    Slopes of a GPU are read once for each tensor, since the host waits for them. The values of a
    log_decay are checked on CPUs alone.

    Raises TypeError or ValueError unless there is one of them, as lightning_attn_func describes it.
    """
    if (slopes is None) == (log_decay is None):
        found = "neither" if slopes is None else "both"
        raise ValueError(f"expected slopes, or log_decay of each token, got {found}")
    name, x, shape, each = "slopes", slopes, q.shape[2:3], "head"
    if slopes is None:
        name, x, shape, each = "log_decay", log_decay, q.shape[:3], "token and head"
    check_tensor(name, x)
    if x.shape != shape:
        raise ValueError(
            f"{name} must be {tuple(shape)}, one for each {each}, got shape {tuple(x.shape)}"
        )
    if x.dtype not in {torch.float32, q.dtype} - {torch.float16, torch.bfloat16}:
        raise TypeError(f"{name} must be torch.float32, got {x.dtype}")
    if slopes is None:
        if x.device != q.device:
            raise ValueError(f"log_decay must be on {q.device}, got {x.device}")
        if x.is_cpu and (x > 0).any():
            raise ValueError(
                f"log_decay must be at most 0, got {x[x > 0].max().item()}: the state before a "
                "token decays by e^log_decay"
            )
        return None
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


_known: MutableMapping[Tensor, tuple[int, tuple[float, ...]]] = WeakTensorKeyDictionary()


def _read(slopes: Tensor) -> tuple[float, ...]:
    if not slopes.is_cuda or slopes.is_inference():
        return tuple(slopes.tolist())
    version, values = _known.get(slopes, (None, ()))
    if version != slopes._version:
        values = tuple(slopes.tolist())
        _known[slopes] = slopes._version, values
    return values
