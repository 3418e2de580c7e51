"""The terms of a call: the facts that all its ranks must agree on."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import RanksDisagree
from ..ranks.agreement import read_terms


def compare_terms(said: Sequence[bytes]) -> list[int]:
    """The tokens of each rank, once all else is known to be equal. Raises RanksDisagree on
    every rank.
    """
    replies = read_terms(said)
    for rank, reply in enumerate(replies):
        for term, value in replies[0].items():
            if term != "tokens" and reply[term] != value:
                raise RanksDisagree(
                    f"ranks differ in {term}: rank 0 has {value!r}, rank {rank} has {reply[term]!r}"
                )
    return [reply["tokens"] for reply in replies]
