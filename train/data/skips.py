"""Ranges of the data order that a run leaves out (--skip-data), after a loss spike for example.

A sample is the n-th sequence that the run reads, and its place is the sequence's number in the
order of the data, which never changes. So a second range is given in the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from train.base.wording import counted, parse_pair

Range = tuple[int, int]


@dataclass(frozen=True)
class Skips:
    """Ranges of places that are left out, from START to END - 1. They rise and do not overlap."""

    ranges: tuple[Range, ...] = ()

    def place(self, sample: int) -> int:
        for start, end in self.ranges:
            if sample >= start:
                sample += end - start
        return sample

    def end(self, samples: int) -> int:
        """Return the place after the last of the first `samples` samples."""
        return self.place(samples - 1) + 1 if samples else 0

    def passed(self, before: int, after: int) -> list[Range]:
        """Return the ranges that are left out between two numbers of samples."""
        first, last = self.end(before), self.end(after)
        return [(start, end) for start, end in self.ranges if first <= start and end <= last]

    def with_range(self, given: Range, samples: int, remaining: int) -> Skips:
        """Return these ranges and the one `given`. `samples` are read, and `remaining` will be.

        Raises ValueError if it has read some of it, would not reach it, or it overlaps others.
        """
        if given in self.ranges:
            return self
        start, end = given
        named = f"--skip-data {start}:{end}"
        read, last = self.end(samples), self.end(samples + remaining)
        if start < read:
            raise ValueError(
                f"{named} has sequences that were read already: the checkpoint has read the first "
                f"{counted(read, 'sequence')} of the data; resume from an earlier one, or skip "
                f"from {read} on"
            )
        if others := [f"{a}:{b}" for a, b in self.ranges if a < end and start < b]:
            raise ValueError(f"{named} overlaps {', '.join(others)}, which the checkpoint skips")
        if start >= last:
            raise ValueError(f"{named} is after the sequences that the run reads, up to {last}")
        return Skips(tuple(sorted((*self.ranges, given))))

    def __str__(self) -> str:
        return ", ".join(f"{start}:{end}" for start, end in self.ranges)


def parse_range(text: str) -> Range:
    """Return the range of --skip-data. Raises ValueError for anything else."""
    found = parse_pair(text)
    if found is None or found[0] >= found[1]:
        raise ValueError(
            "--skip-data must be FROM:TO, two numbers of sequences that rise, as in 4000:4800, got "
            f"{text!r}"
        )
    return found
