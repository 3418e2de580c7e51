"""Implementations of one contract by name, imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Refuses = Callable[[Any], str | None]  # returns why an implementation cannot compute, or None


class Registry(Generic[T]):
    """Implementations of one contract, the fastest first.

    package  the package of their modules
    places   for each name a module, or "module:Class" for an instance of the class
    """

    def __init__(self, package: str, places: Mapping[str, str]):
        self._package, self._places = package, places
        self._loaded: dict[str, T] = {}

    def names(self) -> list[str]:
        return list(self._places)

    def load(self, name: str) -> T:
        """Import and return the implementation called `name`."""
        if name not in self._loaded:
            module, _, kind = self._places[name].partition(":")
            found: Any = importlib.import_module(f"{self._package}.{module}")
            self._loaded.setdefault(name, getattr(found, kind)() if kind else found)
        return self._loaded[name]

    def find(self, x: Tensor) -> T:
        """Return "triton" for tensors like x on GPUs and below fp64, "meta" for tensors without
        values if there is one, and otherwise "torch".
        """
        if x.is_cuda and x.dtype != torch.float64:
            return self.load("triton")
        return self.load("meta" if x.is_meta and "meta" in self._places else "torch")

    def first(self, names: Iterable[str], q: Tensor, refuses: Refuses, what: str) -> str:
        """Return the first of `names` that does not refuse tensors like q (..., D). Raises
        ValueError, which `what` begins, with each one's reason if there is none.
        """
        reasons = []
        for name in names:
            if (reason := refuses(self._loaded.get(name) or self.load(name))) is None:
                return name
            reasons.append(f"{name}: {reason}")
        given = f"{q.dtype}, head size {q.shape[-1]} on {q.device}"
        raise ValueError(f"no {what} {given}: {'; '.join(reasons)}")

    def pick(self, flash: str, q: Tensor, refuses: Refuses, aliases: Mapping[str, Any]) -> str:
        """Return the `first` of the names that `flash` stands for. "auto" stands for all.

        Raises TypeError unless it is a string, ValueError if it is unknown.
        """
        if not isinstance(flash, str):
            raise TypeError(f"flash must be the name of a kernel, got {flash!r}")
        if flash not in self._places and flash != "auto" and flash not in aliases:
            expected = ["auto", *aliases, *self._places]
            raise ValueError(f"expected flash to be one of {expected}, got {flash!r}")
        names = self._places if flash == "auto" else aliases.get(flash, (flash,))
        return self.first(names, q, refuses, f"kernel for flash={flash!r},")


Modules = Registry[ModuleType]
