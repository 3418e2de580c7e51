"""Scalings of rotary positions, for sequences longer than those that a model was first trained on.

- linear (arXiv 2306.15595) divides positions by a factor.
- dynamic ("dynamic NTK") increases the base with the length, beyond the original length.
- yarn (arXiv 2309.00071) divides slow rotations by a factor, fast ones not, with a ramp between.
- llama3 is the same with bounds on wavelengths, as in Llama 3.1.
- longrope (arXiv 2402.13753) has a divisor for each rotation, in two sets: for short and for long
  sequences.

All compute what transformers 5 computes from the same numbers (its modeling_rope_utils), in fp64.

The frequencies of dynamic and longrope depend on a length. It is one more than a row's largest
position on any rank. For a whole sequence this is its length. Positions start again in each packed
document, so there it is the longest document's length. transformers takes the longest of all rows
of a batch and, for dynamic, of earlier calls. Here each row has the frequencies that it would have
alone.

Letters: B batch, S tokens of this rank, D head size.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bmt_burst.nn import rope_frequencies


@dataclass(frozen=True)
class RopeScaling(ABC):
    """A way to scale. Raises ValueError for numbers of another type or out of range."""

    kind: ClassVar[str]
    by_length: ClassVar[bool] = False  # whether frequencies depend on how long the sequence is

    @staticmethod
    def from_dict(said: dict[str, Any]) -> RopeScaling:
        """Make a scaling from its `to_dict`.

        Raises ValueError for an unknown kind, and for missing or unknown names.
        """
        said = dict(said)
        kind = said.pop("kind", None)
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        fields = {
            field.name: field.default is dataclasses.MISSING
            for field in dataclasses.fields(KINDS[kind])
        }
        missing = [name for name, needed in fields.items() if needed and name not in said]
        unknown = [name for name in said if name not in fields]
        if missing or unknown:
            raise ValueError(
                f"{kind} takes {', '.join(fields)}: missing {missing}, unknown {unknown}"
            )
        return KINDS[kind](**said)

    def to_dict(self) -> dict[str, Any]:
        """Return the kind and its numbers, in JSON's types."""
        numbers = dataclasses.asdict(self)
        return {"kind": self.kind} | {
            k: list(v) if isinstance(v, tuple) else v for k, v in numbers.items()
        }

    @property
    def attention_scale(self) -> float:
        """The factor of cos and sin."""
        return 1.0

    @property
    def extended_length(self) -> int | None:
        """Tokens of the longest sequence that it is for, or None if its numbers do not say it."""
        return None

    @abstractmethod
    def frequencies(
        self, head_dim: int, theta: float, length: Tensor | None, device: torch.device
    ) -> Tensor:
        """Compute radians from one position to the next: (D / 2,) fp64.

        If by_length, it is (..., D / 2) for `length` (...) int64.
        """

    def check(self, head_dim: int, theta: float) -> None:  # noqa: B027 - most accept any
        """Check that it supports heads of this size and this base. Raises ValueError."""

    def _check_numbers(self, **least: float) -> None:
        """Check that numbers are finite, of their field's type, and not below their `least`.

        Raises ValueError.
        """
        types = {field.name: str(field.type) for field in dataclasses.fields(self)}
        for name, lowest in least.items():
            value, whole = getattr(self, name), types[name] == "int"
            if value is None and "None" in types[name]:
                continue
            if not _is_number(value, whole) or value < lowest:
                kind, bound = (
                    "whole" if whole else "finite",
                    "above 0" if lowest == _SMALLEST else f"at least {lowest}",
                )
                raise ValueError(
                    f"{name} of {self.kind} must be a {kind} number {bound}, got {value!r}"
                )


_SMALLEST = 1e-9  # the least value of numbers that must be positive


class _Extension(RopeScaling):
    """A scaling that makes sequences of `original_length` tokens `factor` times longer."""

    factor: float
    original_length: int

    @property
    def extended_length(self) -> int:
        return round(self.original_length * self.factor)


@dataclass(frozen=True)
class Linear(RopeScaling):
    """Rotations that are `factor` times slower."""

    kind = "linear"
    factor: float

    def __post_init__(self):
        self._check_numbers(factor=1)

    def frequencies(
        self, head_dim: int, theta: float, length: Tensor | None, device: torch.device
    ) -> Tensor:
        return rope_frequencies(head_dim, theta, device) / self.factor


@dataclass(frozen=True)
class DynamicNTK(RopeScaling):
    """A base that grows for sequences of more than `original_length` tokens.

    The slowest rotation becomes 1 + factor * (length / original_length - 1) times slower.
    """

    kind = "dynamic"
    by_length = True
    factor: float
    original_length: int

    def __post_init__(self):
        self._check_numbers(factor=1, original_length=1)

    def check(self, head_dim: int, theta: float) -> None:
        if head_dim == 2:
            raise ValueError("dynamic needs a head_dim above 2, got 2")

    def frequencies(
        self, head_dim: int, theta: float, length: Tensor | None, device: torch.device
    ) -> Tensor:
        assert length is not None, "its frequencies depend on the length"
        slower = 1 + self.factor * (
            length.to(device).double() / self.original_length - 1
        ).clamp_min(0)
        exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / (
            head_dim - 2
        )
        return rope_frequencies(head_dim, theta, device) * slower.unsqueeze(-1) ** -exponents


@dataclass(frozen=True)
class Yarn(_Extension):
    """YaRN: slow rotations become `factor` times slower.

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

    def __post_init__(self):
        positive = {"beta_fast": _SMALLEST, "beta_slow": _SMALLEST, "attention_factor": _SMALLEST}
        self._check_numbers(factor=1, original_length=1, **positive)
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast={self.beta_fast} of yarn must not be below beta_slow={self.beta_slow}"
            )
        if not isinstance(self.truncate, bool):
            raise ValueError(f"truncate of yarn must be bool, got {self.truncate!r}")

    def check(self, head_dim: int, theta: float) -> None:
        if theta <= 1:
            raise ValueError(f"yarn needs a rope_theta above 1, got {theta}")

    @property
    def attention_scale(self) -> float:
        return (
            0.1 * math.log(self.factor) + 1
            if self.attention_factor is None
            else self.attention_factor
        )

    def frequencies(
        self, head_dim: int, theta: float, length: Tensor | None, device: torch.device
    ) -> Tensor:
        first, last = (
            self._index(turns, head_dim, theta) for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first or 0.001  # transformers' step if the ramp has no width
        ramp = (torch.arange(head_dim // 2, device=device, dtype=torch.float64) - first) / width
        slowed = ramp.clamp(0, 1)
        return rope_frequencies(head_dim, theta, device) * (1 - slowed + slowed / self.factor)

    def _index(self, turns: float, head_dim: int, theta: float) -> float:
        """Compute the index of the rotation that turns `turns` times in the original length."""
        return (
            head_dim
            * math.log(self.original_length / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )


@dataclass(frozen=True)
class Llama3(_Extension):
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

    def __post_init__(self):
        self._check_numbers(
            factor=1, low_freq_factor=_SMALLEST, high_freq_factor=_SMALLEST, original_length=1
        )
        if self.high_freq_factor <= self.low_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ValueError(
                f"high_freq_factor={high} of llama3 must be above low_freq_factor={low}"
            )

    def frequencies(
        self, head_dim: int, theta: float, length: Tensor | None, device: torch.device
    ) -> Tensor:
        plain = rope_frequencies(head_dim, theta, device)
        turns = self.original_length * plain / (2 * math.pi)
        kept = (
            (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        ).clamp(0, 1)
        return plain * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class LongRope(_Extension):
    """LongRoPE: rotation j becomes slower by long_factor[j] or short_factor[j].

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

    def __post_init__(self):
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or not all(
                _is_number(v) and v > 0 for v in values
            ):
                raise ValueError(
                    f"{name} of longrope must be a list of positive numbers, got {values!r}"
                )
            object.__setattr__(self, name, tuple(values))
        self._check_numbers(original_length=2, factor=_SMALLEST, attention_factor=_SMALLEST)

    def check(self, head_dim: int, theta: float) -> None:
        for name in ("short_factor", "long_factor"):
            expected, got = head_dim // 2, len(getattr(self, name))
            if got != expected:
                raise ValueError(
                    f"{name} of longrope must have {expected} numbers for head_dim={head_dim}, "
                    f"got {got}"
                )

    @property
    def attention_scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1)) / math.log(self.original_length))

    def frequencies(
        self, head_dim: int, theta: float, length: Tensor | None, device: torch.device
    ) -> Tensor:
        assert length is not None, "its frequencies depend on the length"
        short, long = (
            torch.tensor(x, dtype=torch.float64, device=device)
            for x in (self.short_factor, self.long_factor)
        )
        is_long = (length.to(device) > self.original_length).unsqueeze(-1)
        return rope_frequencies(head_dim, theta, device) / torch.where(is_long, long, short)


KINDS: dict[str, type[RopeScaling]] = {
    cls.kind: cls for cls in (Linear, DynamicNTK, Yarn, Llama3, LongRope)
}


def _is_number(value: Any, whole: bool = False) -> bool:
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)
