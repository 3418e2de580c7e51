"""The options of `sequence_parallel`, and the classes that have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class Options:
    """The options of `sequence_parallel`."""

    sp_size: int | None
    mesh: dist.DeviceMesh | None
    layout: str
    balanced: bool
    flash: str
    deterministic: bool
    strategy: str
    untested: bool
    loss_only: bool

    @property
    def of_attention(self) -> dict[str, Any]:
        """The keyword arguments of burst_attn_func."""
        names = "flash", "deterministic", "strategy"
        return {name: getattr(self, name) for name in names}

    @property
    def of_enable(self) -> dict[str, Any]:
        """The keyword arguments of `enable`."""
        return {**self.of_attention, "balanced": self.balanced, "untested": self.untested}


def make_class(mixin: type, cls: Class, options: Options) -> Class:
    """Return `cls` with the methods of `mixin` before its own."""
    same = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls)(cls.__name__, (mixin, cls), same | {"_sp_options": options})
