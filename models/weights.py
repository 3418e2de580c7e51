"""Weights under this project's names, checked against the configuration of their model.

If files and configuration contradict each other, the error shows both. Nothing is dropped unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bmt_burst.nn import rope_frequencies

from .config import CPMConfig
from .origins import find_origin, layers_of
from .tensor_files import DTYPES, Stored

Shapes = Callable[[], Mapping[str, tuple[int, ...]]]

_FREQUENCIES = "inv_freq"  # buffers with rotary frequencies, which older programs save
_SAME_FREQUENCY = 0.01  # relative difference, of numbers that may be fp16
_ROWS = 4096  # rows that are compared at once
_EMBEDDINGS = ("embed_tokens.weight", "input_embedding.weight")
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Expected:
    """The model that weights belong to.

    config  its configuration
    kind    its kind: cpm, cpm-bee or cpm-ant
    where   where the user gave the configuration: a config.json or an option
    fields  the names of its fields there, where they differ from the configuration's
    untied  whether --untie gives the model a head that the configuration ties to the embeddings
    advice  what to do if the weights are of another model, for the end of a message
    ties_by_default  whether the head is tied because the configuration does not say it
    """

    config: Any
    kind: str
    where: str
    fields: Mapping[str, str] = field(default_factory=dict)
    untied: bool = False
    advice: str = ""
    ties_by_default: bool = False

    def name(self, field: str) -> str:
        return self.fields.get(field, field)

    def value(self, field: str) -> str:
        """Return a field's name and value."""
        return f"{self.name(field)} {getattr(self.config, field)}"


class Weights(Mapping[str, Tensor]):
    """Weights by this project's names. Each is read when it is requested.

    Raises ValueError, which names `source`, if the tensors in `files` are not exactly the weights
    of the model, in a floating-point dtype of 16 bits or more. `shapes` returns their shapes.
    """

    def __init__(
        self, source: object, files: Mapping[str, Stored], expected: Expected, shapes: Shapes
    ):
        self._source, self._model = source, expected
        frequencies = {name for name in files if name.rpartition(".")[2] == _FREQUENCIES}
        self._origin = find_origin(files.keys() - frequencies, source)
        self._check_kind()
        found = self._rename({x: files[x] for x in files if x not in frequencies})
        self._check_layers(found)
        for name in sorted(frequencies):
            self._check_frequencies(name, files[name])
        self._stored = self._with_head(found)
        self._check(shapes())

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def _rename(self, files: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return tensors by our names. Raises ValueError if two have the same."""
        found: dict[str, Stored] = {}
        for name, stored in files.items():
            if (ours := self._origin.ours(name)) in found:
                raise ValueError(f"{self._source} has {ours} twice, once as {name}")
            found[ours] = stored
        return found

    def _check_kind(self) -> None:
        origin, model = self._origin, self._model
        if origin.kind != model.kind:
            raise ValueError(
                f"{self._source} looks like {origin.name}, a {origin.kind}, expected the weights "
                f"of {model.where}, a {model.kind}{model.advice}"
            )

    def _check_layers(self, found: Mapping[str, Stored]) -> None:
        """Raise ValueError for another number of layers, before a model of that size is made."""
        layers, count = layers_of(found), self._model.config.num_layers
        got = max(layers, default=-1) + 1
        # layers of CPM-Live's models may be empty
        if got > count or (got < count and self._model.kind == "cpm"):
            raise ValueError(
                f"{self._source}: expected weights of {count} layers "
                f"({self._model.name('num_layers')} of {self._model.where}), got {got} layers"
                f"{self._model.advice}"
            )

    def _check_frequencies(self, name: str, stored: Stored) -> None:
        """Raise ValueError if saved rotary frequencies are not those of the configuration."""
        config = self._model.config
        if not isinstance(config, CPMConfig):
            raise ValueError(f"{self._source}: unexpected weights {[name]}")
        saved, scaling = stored.read().double(), config.rope_scaling
        accepted = [rope_frequencies(config.head_dim, config.rope_theta)]
        if scaling is not None and not scaling.by_length:
            accepted.append(scaling.frequencies(accepted[0], config.rope_theta, None))
        if not any(_are_close(saved, expected) for expected in accepted):
            raise ValueError(
                f"{self._source}: {name} are not the rotary frequencies of "
                f"{self._model.value('rope_theta')} ({self._model.where}) and head size "
                f"{config.head_dim}: correct the configuration, or remove {name} from the file"
            )

    def _with_head(self, found: dict[str, Stored]) -> dict[str, Stored]:
        """Return the weights without a tied head that equals the embeddings, or with a new head."""
        model = self._model
        embeddings = next((found[name] for name in _EMBEDDINGS if name in found), None)
        if embeddings is None:
            return found
        if model.untied:
            return {HEAD: embeddings, **found}
        if HEAD not in found or not getattr(model.config, "tie_embeddings", True):
            return found
        if not (difference := _difference(found[HEAD], embeddings)):
            return {name: stored for name, stored in found.items() if name != HEAD}
        head, tie = self._origin.theirs(HEAD), model.name("tie_embeddings")
        said = f"{self._source} has {head}, which differs from the embeddings ({difference})"
        if model.kind != "cpm":
            raise ValueError(f"{said}: the head of a {model.kind} is tied to its embeddings")
        default = f"by default, which {model.where} does not change"
        tied = default if model.ties_by_default else f"in {model.where}"
        raise ValueError(
            f"{said}, but {tie} is true {tied}: give --untie to train this head, or set {tie} to "
            "false there"
        )

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        found, source = self._stored, self._source
        missing = [name for name in shapes if name not in found]
        surplus = [name for name in found if name not in shapes]
        if missing or surplus:
            lists = ([self._origin.theirs(name) for name in x[:5]] for x in (missing, surplus))
            said = "{}: missing weights {}, unexpected weights {}".format(source, *lists)
            said += f", as {self._model.where} describes the model"
            if HEAD in missing:
                tie = self._model.name("tie_embeddings")
                said += f"; set {tie} to true there if the head is tied to the embeddings"
            raise ValueError(f"{said}{self._model.advice}")
        for name, shape in shapes.items():
            stored, theirs = found[name], self._origin.theirs(name)
            if stored.shape != shape:
                raise ValueError(
                    f"{source}: expected {theirs} of shape {shape}, as {self._model.where} says, "
                    f"got {stored.shape}{self._model.advice}"
                )
            if stored.dtype not in DTYPES:
                raise ValueError(
                    f"{source}: expected {theirs} in one of {', '.join(DTYPES)}, got {stored.dtype}"
                )


def _are_close(saved: Tensor, expected: Tensor) -> bool:
    if saved.shape != expected.shape:
        return False
    return torch.allclose(saved, expected, rtol=_SAME_FREQUENCY, atol=1e-7)


def _difference(head: Stored, embeddings: Stored) -> str:
    """Return how a head differs from embeddings: nothing if shape and values are equal. If one has
    fewer bits, the other is rounded to them.
    """
    if head.shape != embeddings.shape:
        return f"shape {head.shape} and {embeddings.shape}"
    most = 0.0
    for a, b in zip(head.read().split(_ROWS), embeddings.read().split(_ROWS), strict=True):
        if not torch.equal(a.to(b.dtype), b) and not torch.equal(a, b.to(a.dtype)):
            gap = (a.double() - b.double()).abs().nan_to_num(torch.inf)
            most = max(most, float(gap.max()))
    return f"by up to {most:.3g}" if most else ""
