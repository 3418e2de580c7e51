"""Lines and shards that could not be used: how many, and the first ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from train.base.wording import counted
from train.data.files import TextFile

_LISTED = 20  # bad lines that are listed


@dataclass
class BadLines:
    """Lines that could not be used, `among` all that are not empty, and characters left out."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    left_out: int = 0
    among: int = 0

    def add(self, file: TextFile, line: int, reason: str) -> None:
        self.extend(BadLines(1, [f"{file}:{line}: {reason}"]))

    def extend(self, later: BadLines) -> None:
        self.count += later.count
        self.left_out += later.left_out
        self.among += later.among
        self.first += later.first[: _LISTED - len(self.first)]

    def check(self, most: float) -> None:
        """Raise ValueError if more than the share `most` of the lines are bad."""
        if self.count and self.count / self.among > most:
            raise ValueError(self.summary(f", more than --max-bad {most:g} of them"))

    def summary(self, too_many: str = "") -> str:
        """Return how many lines are bad, and the first ones."""
        if not self.count:
            return "no line is bad"
        verb = "is" if self.count == 1 else "are"
        bad = f"{self.count:,} of {counted(self.among, 'line')} {verb} bad{too_many}"
        return f"{bad}. The first: {'; '.join(self.first[:3])}"

    def report(self) -> None:
        """Print to stderr how many lines were skipped and characters left out."""
        if self.left_out:
            were = (
                f"{noun} that the vocabulary lacks {verb} left out"
                for noun, verb in (("character", "was"), ("characters", "were"))
            )
            print(counted(self.left_out, *were), file=sys.stderr)
        if self.count:
            skipped = counted(self.count, "bad line was skipped", "bad lines were skipped")
            print(f"{skipped}, the first:", *self.first[:5], sep="\n  ", file=sys.stderr)


def check_broken(found: Sequence[str], most: int) -> None:
    """Raise ValueError if more than `most` files are broken."""
    if len(found) > most:
        shards = counted(len(found), "broken shard")
        raise ValueError(f"{shards}, more than --max-bad-shards {most}: {'; '.join(found)}")


class BrokenShards:
    """Broken files, with the reasons. More than `most` raise ValueError, which names all."""

    def __init__(self, most: int):
        self.most = most
        self.found: list[str] = []

    def add(self, file: TextFile, reason: str) -> None:
        self.found.append(f"{file}: {reason}")
        check_broken(self.found, self.most)

    def report(self) -> None:
        """Print the shards to stderr."""
        if self.found:
            count = len(self.found)
            skipped = counted(count, "broken shard was skipped", "broken shards were skipped")
            print(f"{skipped} from the damage on:", *self.found, sep="\n  ", file=sys.stderr)
