"""The constants of InfLLM-V2, the sparse attention of MiniCPM4 (arXiv 2509.24663, 2506.07900)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from ..base.arguments import as_bool, as_int

_LEAST = {"init_blocks": 0, "dense_len": -1}  # others are 1 or more


@dataclass(frozen=True)
class Constants:
    """The constants of InfLLM-V2, as `InfLLMV2` describes them."""

    block_size: int = 64
    kernel_size: int = 32
    kernel_stride: int = 16
    init_blocks: int = 1
    window_size: int = 2048
    topk: int = 64
    dense_len: int = 8192
    use_nope: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "use_nope", as_bool("use_nope", self.use_nope))
        for name in (field.name for field in fields(self) if field.name != "use_nope"):
            value, least = as_int(name, getattr(self, name)), _LEAST.get(name, 1)
            if value < least:
                raise ValueError(f"expected {name} of at least {least}, got {value}")
            object.__setattr__(self, name, value)
        if (size := self.kernel_size) != (twice := 2 * self.kernel_stride):
            raise ValueError(f"expected kernel_size = 2 * kernel_stride = {twice}, got {size}")
        for name, divisor in (("block_size", "kernel_stride"), ("window_size", "block_size")):
            value, by = getattr(self, name), getattr(self, divisor)
            if value % by:
                raise ValueError(f"expected {name} to be a multiple of {divisor}={by}, got {value}")
        if self.topk < (least := self.init_blocks + 1):
            raise ValueError(
                f"expected topk of at least init_blocks + 1 = {least}, got {self.topk}"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the constants that a `sparse_config` of config.json describes.

        Raises ValueError for an unknown name, TypeError for anything but names and values.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"expected names and values, got {values!r}")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"expected some of {sorted(known)}, got {unknown}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the constants by name, as `sparse_config` has them."""
        return asdict(self)

    @property
    def window_blocks(self) -> int:
        """The number of blocks before a query's own that are always chosen."""
        return self.window_size // self.block_size

    @property
    def most_blocks(self) -> int:
        """The largest number of blocks that a query attends to."""
        return self.topk + self.window_blocks

    @property
    def exact_tokens(self) -> int:
        """The first tokens of each document, which attend to all tokens before them."""
        return self.most_blocks * self.block_size

    @property
    def shortest_document(self) -> int:
        """The tokens of the shortest document with queries that choose blocks."""
        return self.exact_tokens + self.block_size

    def is_dense(self, longest: int) -> bool:
        """Whether a call is dense if its longest document has this many tokens."""
        return longest < self.dense_len
