"""Sources of rows: folders of tokens or instances, and mixtures of them (mixture.py).

A source decides which row is sample n of a run. `Dealer` decides which rank reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, Self

from bmt_burst import Scores


class Source(Protocol):
    """Rows of --seq-len tokens in the order in which a run takes them.

    Sample n is the n-th row that all ranks together take from this source. It does not depend on
    the number of ranks. A rank reads its own samples only, in rising order. After `restore`, it
    begins at the sample of that state.
    """

    @property
    def folder(self) -> Path:
        """The folder of the tokenizer. Messages name it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def kind(self) -> str | None:
        """The kind of model that reads these instances; None for documents."""

    @property
    def finds_documents(self) -> bool:
        """Whether it is known where documents start."""

    @property
    def bos_id(self) -> int | None:
        """The begin token that documents get by default, if there is one."""

    @property
    def documents(self) -> bool:
        """Whether documents or instances of a row are kept apart."""

    @property
    def epoch(self) -> int | None:
        """The number of rows after which the source starts over; None if there is no such
        number.
        """

    @property
    def padding(self) -> float:
        """The share of an epoch's positions that are padding."""

    @property
    def description(self) -> str:
        """A few words on documents or instances, for the log."""

    @property
    def identity(self) -> dict[str, Any]:
        """The facts that must stay the same, so that a sample number means the same sample."""

    @property
    def example_scores(self) -> Scores | None:
        """Scores of one row, for a model that adds a learned bias to the scores of attention."""

    def keep_documents_apart(self, apart: bool, bos: int | None) -> Self:
        """Return a source that keeps documents apart if `apart`, with begin token `bos`. Return
        instances unchanged.
        """

    def of_sample(self, sample: int) -> Any:
        """Return the row that is sample number `sample` of the run."""

    def state(self, samples: int) -> dict[str, Any]:
        """Return what a checkpoint after `samples` samples stores of this source: values of JSON.
        Nothing for a source that finds each sample by its number.
        """

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the samples of a `state`."""


class Stored(Source, Protocol):
    """A source of numbered rows. `len` is the number of rows in an epoch."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """Return row `index`."""
