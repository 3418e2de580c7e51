"""A folder of instances that is complete and matches its index."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np

from train.cpm_live.instances import Instance
from train.cpm_live.stored import InstanceFiles
from train.data.token_file import TokenFile


class InstanceFile(TokenFile):
    """A folder of instances for one kind of model. Raises the same errors as TokenFile."""

    def __init__(self, folder: str | Path, instances: str):
        self.instances = instances
        super().__init__(folder)

    @cached_property
    def all(self) -> InstanceFiles:
        return InstanceFiles(self.folder, np.dtype(self.index["dtype"]))

    @property
    def hashes(self) -> dict[str, str]:
        """The sha256 of the files of tokens, sub-ids, segments and tasks, if the index has them."""
        return {
            name: found
            for name, found in self.index.get("sha256", {}).items()
            if name.endswith(".bin")
        }

    def instance(self, number: int, part: slice = slice(None)) -> Instance:
        """Return an instance, as InstanceFiles does. Raises ValueError for unknown tokens."""
        found = self.all.instance(number, part)
        if len(found) and found.tokens.max() >= self.index["vocab_size"]:
            raise ValueError(
                f"{self.folder}: expected tokens below {self.index['vocab_size']}, the size of the "
                f"vocabulary, got {int(found.tokens.max())} in instance {number}"
            )
        return found
