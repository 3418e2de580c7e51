"""The options of `sequence_parallel`, and the classes that have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class Switch:
    """The options of `sequence_parallel`."""

    sp_size: int | None
    mesh: dist.DeviceMesh | None
    layout: str
    balanced: bool
    flash: str
    deterministic: bool
    strategy: str
    untested: bool

    @property
    def of_enable(self) -> dict[str, Any]:
        """The keyword arguments of `enable`."""
        names = "balanced", "flash", "deterministic", "strategy", "untested"
        return {name: getattr(self, name) for name in names}


def make_class(mixin: type, cls: Class, switch: Switch) -> Class:
    """Return `cls` with the methods of `mixin` before its own."""
    same = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls)(cls.__name__, (mixin, cls), same | {"_switch": switch})
