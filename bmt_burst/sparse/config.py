"""The constants of InfLLM-V2, the sparse attention of MiniCPM4 (arXiv 2509.24663, 2506.07900)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from ..base.arguments import as_bool, as_int

_LEAST = {"init_blocks": 0, "dense_len": -1}  # others are 1 or more


@dataclass(frozen=True)
class InfLLMV2:
    """Each query attends to `topk + window_size // block_size` blocks of its document, or to all
    that are visible if they are fewer.

    Some blocks are always chosen: the first `init_blocks`, the query's own, and the window_size //
    block_size blocks before that. The others are those with the highest scores. The query heads of
    a kv head share a choice.

    block_size     tokens of a block. Blocks are counted from the start of each document.
    kernel_size    tokens that a compressed key is the mean of, 2 * kernel_stride
    kernel_stride  tokens from one compressed key to the next
    init_blocks    blocks at the start of a document that are always chosen
    window_size    tokens of the blocks before a query's own that are always chosen, at least one
                   block
    topk           blocks that are chosen in addition to those of the window
    dense_len      calls are dense if their longest document has fewer tokens. With -1 none is.
    use_nope       whether blocks are chosen by queries and keys without rotary positions, which the
                   caller passes

    Raises ValueError for constants that force more blocks than are chosen or that do not divide one
    another, TypeError for anything but whole numbers and a bool.
    """

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
        if self.kernel_size != 2 * self.kernel_stride:
            raise ValueError(
                f"expected kernel_size = 2 * kernel_stride = {2 * self.kernel_stride}, "
                f"got {self.kernel_size}"
            )
        for name, divisor in (("block_size", "kernel_stride"), ("window_size", "block_size")):
            if getattr(self, name) % getattr(self, divisor):
                raise ValueError(
                    f"expected {name} to be a multiple of {divisor}={getattr(self, divisor)}, "
                    f"got {getattr(self, name)}"
                )
        if self.topk < self.init_blocks + 1:
            raise ValueError(
                f"expected topk of at least init_blocks + 1 = {self.init_blocks + 1}, "
                f"got {self.topk}"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration that a `sparse_config` of config.json describes.

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

    def is_dense(self, longest: int) -> bool:
        """Whether a call is dense if its longest document has this many tokens."""
        return longest < self.dense_len


def check_layer(sparse: Any, **excluded: Any) -> None:
    """Raise ValueError if a sparse layer also has an excluded argument, TypeError for no config."""
    if sparse is None:
        return
    if not isinstance(sparse, InfLLMV2):
        raise TypeError(f"sparse must be an InfLLMV2, got {type(sparse).__name__}")
    for name, value in excluded.items():
        if value is not None:
            raise ValueError(f"expected sparse or {name}, got {sparse} and {name}={value}")
