"""Scalings of rotary positions, for sequences longer than those that a model was first trained on.

All compute in fp64 what transformers 5 computes from the same numbers (its modeling_rope_utils).

The frequencies of dynamic and longrope depend on a length. It is one more than a row's largest
position on any rank: the length of a whole sequence, or of the longest packed document, since
positions start again in each. transformers takes the longest of all rows of a batch and, for
dynamic, of earlier calls. Here each row has the frequencies that it would have alone.

Letters: B batch, S tokens of this rank, D head size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .fields import check_fields, check_names


@dataclass(frozen=True)
class RopeScaling(ABC):
    """A way to scale. Raises ValueError for numbers of another type or out of range."""

    kind: ClassVar[str]
    by_length: ClassVar[bool] = False  # whether frequencies depend on how long the sequence is

    @staticmethod
    def from_dict(values: dict[str, Any]) -> RopeScaling:
        """Make a scaling from its `to_dict`. Raises ValueError for unknown kinds and names."""
        values = dict(values)
        kind = values.pop("kind", None)
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        fields = ", ".join(field.name for field in dataclasses.fields(KINDS[kind]))
        check_names(KINDS[kind], values, f"{kind} takes {fields}")
        return KINDS[kind](**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the kind and its numbers, in JSON's types."""
        numbers = dataclasses.asdict(self).items()
        lists = {name: list(x) if isinstance(x, tuple) else x for name, x in numbers}
        return {"kind": self.kind, **lists}

    @property
    def attention_scale(self) -> float:
        """The factor of cos and sin."""
        return 1.0

    @property
    def extended_length(self) -> int | None:
        """Tokens of the longest sequence that it is for, or None if its numbers do not say it."""
        return None

    @abstractmethod
    def frequencies(self, plain: Tensor, theta: float, length: Tensor | None) -> Tensor:
        """Scale `plain`, `rope_frequencies` of a head and the base theta: (D / 2,) fp64.

        If by_length, the result is (..., D / 2) for `length` (...) int64.
        """

    def check(self, head_dim: int, theta: float) -> None:  # noqa: B027 - most accept any
        """Check that it supports heads of this size and this base. Raises ValueError."""

    def __post_init__(self) -> None:
        check_fields(self)


class _Stretch(RopeScaling):
    """A scaling by a factor that does not shrink."""

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1:
            raise ValueError(f"factor of {self.kind} must be at least 1, got {self.factor}")


class _Extension(RopeScaling):
    """A scaling that makes sequences of `original_length` tokens `factor` times longer."""

    factor: float
    original_length: int

    @property
    def extended_length(self) -> int:
        return round(self.original_length * self.factor)


@dataclass(frozen=True)
class Linear(_Stretch):
    """Rotations that are `factor` times slower, as if positions were (arXiv 2306.15595)."""

    kind = "linear"
    factor: float

    def frequencies(self, plain: Tensor, theta: float, length: Tensor | None) -> Tensor:
        return plain / self.factor


@dataclass(frozen=True)
class DynamicNTK(_Stretch):
    """A base that grows beyond `original_length` tokens: the slowest rotation becomes 1 + factor *
    (length / original_length - 1) times slower.
    """

    kind = "dynamic"
    by_length = True
    factor: float
    original_length: int

    def check(self, head_dim: int, theta: float) -> None:
        if head_dim == 2:
            raise ValueError("rope_scaling: dynamic needs a head_dim above 2, got 2")

    def frequencies(self, plain: Tensor, theta: float, length: Tensor | None) -> Tensor:
        assert length is not None, "its frequencies depend on the length"
        longer = (length.to(plain.device).double() / self.original_length - 1).clamp_min(0)
        slower = (1 + self.factor * longer).unsqueeze(-1)
        places = torch.arange(len(plain), device=plain.device, dtype=torch.float64)
        return plain * slower ** -(places / (len(plain) - 1))


@dataclass(frozen=True)
class Yarn(_Stretch, _Extension):
    """YaRN (arXiv 2309.00071): slow rotations become `factor` times slower.

    Slow ones turn less than `beta_slow` times in `original_length` tokens. Those that turn more
    than `beta_fast` times stay as they are. Between them is a ramp over their index.

    truncate          whether the ramp begins and ends at whole indices
    attention_factor  the factor of cos and sin, by default 0.1 ln(factor) + 1
    """

    kind = "yarn"
    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast={self.beta_fast} of yarn must not be below beta_slow={self.beta_slow}"
            )

    def check(self, head_dim: int, theta: float) -> None:
        if theta <= 1:
            raise ValueError(f"rope_scaling: yarn needs a rope_theta above 1, got {theta}")

    @property
    def attention_scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1

    def frequencies(self, plain: Tensor, theta: float, length: Tensor | None) -> Tensor:
        head_dim = 2 * len(plain)
        # indices of the rotations that turn so many times in the original length
        radians = (2 * math.pi * turns for turns in (self.beta_fast, self.beta_slow))
        first, last = (
            head_dim * math.log(self.original_length / each) / (2 * math.log(theta))
            for each in radians
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first or 0.001  # transformers' step if the ramp has no width
        places = torch.arange(len(plain), device=plain.device, dtype=torch.float64)
        slowed = ((places - first) / width).clamp(0, 1)
        return plain * (1 - slowed + slowed / self.factor)


@dataclass(frozen=True)
class Llama3(_Stretch, _Extension):
    """Llama 3's scaling: long wavelengths become `factor` times longer.

    Long ones are above original_length / low_freq_factor. Those below original_length /
    high_freq_factor stay as they are. Frequencies between are mixed, by how often they turn in the
    original length.
    """

    kind = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ValueError(
                f"high_freq_factor={high} of llama3 must be above low_freq_factor={low}"
            )

    def frequencies(self, plain: Tensor, theta: float, length: Tensor | None) -> Tensor:
        turns = self.original_length * plain / (2 * math.pi)
        ramp = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / ramp).clamp(0, 1)
        return plain * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class LongRope(_Extension):
    """LongRoPE (arXiv 2402.13753): rotation j becomes slower by long_factor[j] or short_factor[j].

    Sequences of more than `original_length` tokens are long.

    factor            how many times longer than the original ones sequences may become
    attention_factor  the factor of cos and sin, by default sqrt(1 + ln(factor) /
                      ln(original_length))
    """

    kind = "longrope"
    by_length = True
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    factor: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_length < 2:
            raise ValueError("original_length of longrope must be at least 2, got 1")
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or not all(map(_is_positive, values)):
                raise ValueError(
                    f"{name} of longrope must be a list of positive numbers, got {values!r}"
                )
            object.__setattr__(self, name, tuple(values))

    def check(self, head_dim: int, theta: float) -> None:
        for name in ("short_factor", "long_factor"):
            expected, got = head_dim // 2, len(getattr(self, name))
            if got != expected:
                raise ValueError(
                    f"rope_scaling: {name} of longrope must have {expected} numbers for "
                    f"head_dim={head_dim}, got {got}"
                )

    @property
    def attention_scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1)) / math.log(self.original_length))

    def frequencies(self, plain: Tensor, theta: float, length: Tensor | None) -> Tensor:
        assert length is not None, "its frequencies depend on the length"
        factors = self.short_factor, self.long_factor
        short, long = (_on_device(x, plain.device) for x in factors)
        is_long = (length.to(plain.device) > self.original_length).unsqueeze(-1)
        return plain / torch.where(is_long, long, short)


KINDS: dict[str, type[RopeScaling]] = {
    cls.kind: cls for cls in (Linear, DynamicNTK, Yarn, Llama3, LongRope)
}


@functools.lru_cache(maxsize=16)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers in fp64. They are kept, since a CUDA graph cannot copy them from the host."""
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf
