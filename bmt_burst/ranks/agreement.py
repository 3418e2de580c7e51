"""What ranks tell each other before they begin something together, and what follows from it.

A rank says a line of JSON: what it is "doing", with the terms of that, or the "failure" that keeps
it from it. All hear the same, so all go on or all raise. Ranks number their calls, and the backward
of a call is agreed on as well: what two ranks make of unlike calls would add up to gradients that
are wrong and say nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from ..errors import RankLate, RanksDisagree
from ..transport import MESSAGE_BYTES, Transport
from .rings import Rings

Result = TypeVar("Result")
Error = TypeVar("Error", bound=Exception)

_RULE = (
    "two threads of this process called in the same group at once, so it is unusable now. But a group is for one "
    "thread at a time: let threads take turns, or give each a group of its own"
)
_KNOWN = "_known_to_all_ranks"  # attribute of errors that every rank has heard of


def gather_terms(
    rings: Rings, doing: str, terms: Callable[[], dict[str, Any]]
) -> tuple[bytes, ...]:
    """What every rank says, in rank order, once all have: see `read_terms`.

    If `terms` fails, the others are told, and its failure is raised here once they know. They do
    already where it
    comes from a call within: a backward may compute its forward again, and attention with it.
    """
    with admit_one_thread(rings, doing):
        return _gather_terms(rings, doing, terms)


def _gather_terms(
    rings: Rings, doing: str, terms: Callable[[], dict[str, Any]]
) -> tuple[bytes, ...]:
    failure = None
    try:
        mine = json.dumps({"doing": doing, **terms()})
        if len(mine) > MESSAGE_BYTES:  # all of it is ASCII
            raise ValueError(
                f"what is to be said of {doing} has {len(mine)} bytes, more than {MESSAGE_BYTES}"
            )
    except Exception as caught:
        if hasattr(caught, _KNOWN):
            raise  # who is told twice would wait for a word that nobody says
        failure, mine = caught, _format_failure(doing, caught)
    try:
        said = tuple(rings.gather(mine.encode()))
    except RankLate as late:
        raise _mark_known(RankLate(f"{doing}: {late}")) from late
    except Exception as lost:
        # or as good as that: to tell of it would be to wait once more for who did not come
        _mark_known(lost)
        raise
    if failure:
        raise _mark_known(failure)
    return said


def read_terms(said: Sequence[bytes]) -> list[dict[str, Any]]:
    """The terms that the ranks said. Raises ValueError, alike on every rank, if one failed or does
    something else.
    """
    replies = [_parse_line(line) for line in said]
    for rank, reply in enumerate(replies):
        if "failure" in reply:
            raise _mark_known(
                RanksDisagree(
                    f"rank {rank} of the group failed before {reply['doing']}: {reply['failure']}"
                )
            )
    doing = [reply.pop("doing") for reply in replies]
    for rank, other in enumerate(doing):
        if other != doing[0]:
            said = f"rank 0 begins {doing[0]}, rank {rank} begins {other}"
            raise _mark_known(RanksDisagree(f"ranks do not do the same: {said}"))
    return replies


def run_together(rings: Rings, doing: str, work: Callable[[], Result]) -> Result:
    """What `work` returns on this rank, once it has succeeded on all ranks and all are `doing` the
    same.

    Raises its failure where it failed, elsewhere ValueError.
    """
    results = []

    def terms() -> dict[str, Any]:
        results.append(work())
        return {}

    said = gather_terms(rings, doing, terms)
    if any(line != said[0] for line in said):
        read_terms(said)
    return results[0]


@contextmanager
def admit_one_thread(rings: Rings, doing: str) -> Iterator[None]:
    """Keep other threads of this process out of the rings meanwhile. This thread may enter again.

    Ranks pair what they send by its order. Two threads would each take messages that are for the
    other one.

    Raises RuntimeError at once if another thread is within. That one raises it too, at the end of
    what it does, unless that fails anyway. The group is unusable from then on: on another rank the
    other thread may have been first, and nobody could tell.
    """
    used = [ring for ring in (rings.inner, rings.outer) if ring.size > 1]
    try:
        with ExitStack() as held:
            for ring in used:
                if ring.in_use.acquire(blocking=False):
                    held.callback(ring.in_use.release)
                else:
                    ring.contested = True
            _check_uncontested(used, doing)
            yield
    # after the release, so that one of two threads sees that the ring is contested and free
    finally:
        _leave_contested(used, doing)
    _check_uncontested(used, doing)


def _check_uncontested(used: Sequence[Transport], doing: str) -> None:
    """Raise RuntimeError if a second thread called in one of the rings meanwhile."""
    if any(ring.contested for ring in used):
        raise _mark_known(RuntimeError(f"{doing}: {_RULE}"))


def _leave_contested(used: Sequence[Transport], doing: str) -> None:
    """Make all rings unusable if one is contested. A ring that another thread is within is left by
    that one.
    """
    if not any(ring.contested for ring in used):
        return
    for ring in used:
        if ring.in_use.acquire(blocking=False):
            try:
                ring.contested = True
                if not ring.broken:
                    ring.leave(f"{doing}: {_RULE}".encode())
            finally:
                ring.in_use.release()


@contextmanager
def mark_known_errors() -> Iterator[None]:
    """Mark a ValueError within as one that every rank raises, since it follows from what all of
    them said.
    """
    try:
        yield
    except ValueError as error:
        _mark_known(error)
        raise


@contextmanager
def report_failure(rings: Rings, doing: str) -> Iterator[None]:
    """Let the other ranks know if this one fails in what all agreed on, unless it is an error that
    they know.

    Raises RuntimeError, with the rank and its reason, on a rank that fails because another one did.
    """
    try:
        yield
    except BaseException as error:
        if hasattr(error, _KNOWN):
            raise
        if theirs := rings.give_up(f"{doing}: {_format_reason(error)}".encode()):
            raise type(theirs)(f"{theirs}; so this rank cannot go on with {doing}") from error
        raise
    rings.note_enqueued(doing)


def _mark_known(error: Error) -> Error:
    setattr(error, _KNOWN, True)
    return error


def _format_failure(doing: str, error: BaseException) -> str:
    """What a rank says that cannot be doing what it should."""
    return json.dumps({"doing": doing, "failure": _format_reason(error)})


def _format_reason(error: BaseException) -> str:
    """In printable ASCII, 400 characters at most."""
    return "".join(
        c if c.isprintable() and c.isascii() else "?"
        for c in f"{type(error).__name__}: {error}"[:400]
    )


def _parse_line(line: bytes) -> dict[str, Any]:
    """What a rank said; words of another kind are what it is doing."""
    try:
        return json.loads(line)
    except ValueError:
        return {"doing": f"'{line.decode(errors='replace')[:200]}'"}
