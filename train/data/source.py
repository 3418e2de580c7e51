"""Sources decide which row is sample n of a run: folders, streams and mixtures (mixture.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from bmt_burst import Scores
from train.data.token_file import TokenFile


class Source(ABC):
    """Rows of --seq-len tokens in the order in which a run takes them.

    Sample n is the n-th row that all ranks together take, so it does not depend on their number. A
    rank reads its own samples only, in rising order, after `restore` from that state's sample on.

    folder      the folder of the tokenizer, which messages name
    kind        the kind of model that reads these instances; None for documents
    documents   whether documents or instances of a row are kept apart
    """

    folder: Path
    vocab_size: int
    documents: bool
    kind: str | None = None

    @property
    @abstractmethod
    def bos_id(self) -> int | None:
        """The begin token that documents get by default, if there is one."""

    @property
    def epoch(self) -> int | None:
        """The number of rows after which the source starts over, if it is known."""
        return None

    @property
    @abstractmethod
    def description(self) -> str:
        """A few words on documents or instances, for the log."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The facts that must stay the same, so that a sample number means the same sample."""

    @property
    def example_scores(self) -> Scores | None:
        """Scores of one row, for a model that adds a learned bias to the scores of attention."""
        return None

    @abstractmethod
    def keep_documents_apart(self, apart: bool, bos: int | None) -> Self:
        """Return a source that keeps documents apart or not, with begin token `bos`."""

    @abstractmethod
    def of_sample(self, sample: int) -> Any:
        """Return the row that is sample number `sample` of the run."""

    def state(self, samples: int) -> dict[str, Any]:
        """Return the state after `samples` samples: empty if samples are found by number."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the samples of a `state`."""
        assert not state


class Stored(Source):
    """Numbered rows of a data folder, in another order in each epoch. `len` is their number."""

    def __init__(self, file: TokenFile, seed: int):
        self.file, self.seed = file, seed
        self.folder, self.kind = file.folder, file.instances
        self.vocab_size = file.index["vocab_size"]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Any:
        """Return row `index`."""

    @property
    def bos_id(self) -> int | None:
        return self.file.bos_id

    @property
    def epoch(self) -> int:
        return len(self)

    def order(self, sample: int) -> int:
        """Return the row that is sample number `sample` of the run."""
        epoch, place = divmod(sample, len(self))
        return int(self._orders(epoch)[place])

    @cached_property
    def _orders(self) -> Any:
        """A function that returns the order of an epoch. A step may be at the end of one."""
        return lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((self.seed, epoch)).permutation(len(self))
        )
