"""Agreement of the ranks before they begin something together.

Each rank sends a line of JSON. It names what the rank is "doing", with the terms, or the "failure"
that prevents it. All ranks read the same lines, so all go on or all raise. Ranks number their calls
and also agree on the backward of each call. Otherwise ranks in different backwards would silently
add up wrong gradients.

The section "What ranks agree on" of docs/design.md tells what is promised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..base.autograd import stops_recomputation
from ..base.streams import refuse_capture
from ..errors import RankLate, RanksDisagree
from ..transport.messenger import MESSAGE_BYTES, Messenger
from .rings import Rings

Result = TypeVar("Result")
Error = TypeVar("Error", bound=BaseException)

_RULE = (
    "two threads of this process called in the same group at once, so it is unusable now. A group "
    "is for one thread at a time: let threads take turns, or give each thread its own group"
)
_CAPTURED = "ranks agree on each call over the host, which a graph does not replay"
_KNOWN = "_known_to_all_ranks"  # attribute of errors


def gather_terms(
    rings: Rings, doing: str, terms: Callable[[], dict[str, Any]]
) -> tuple[bytes, ...]:
    """Return the lines of all ranks in rank order, for `read_terms`.

    `terms` returns this rank's terms. If it fails, this rank sends its failure to the others, and
    then raises it. A failure that a call inside `terms` raised is known to them: a backward may
    compute its forward again, which calls attention.

    Several ranks raise RuntimeError at once, before they send anything, while a CUDA graph is
    captured.
    """
    if rings.size > 1:
        refuse_capture(doing, _CAPTURED)
    failure = None
    with admit_one_thread(rings, doing):
        try:
            mine = _format_terms(doing, terms())
        except Exception as caught:
            if hasattr(caught, _KNOWN):
                raise  # the others do not wait for a second line about it
            failure, mine = caught, _format_terms(doing, {"failure": _format_reason(caught)})
        try:
            lines = tuple(rings.gather(mine))
        except RankLate as late:
            raise mark_known(RankLate(f"{doing}: {late}")) from late
        except Exception as lost:
            # reporting it would wait again for a rank that is gone
            mark_known(lost)
            raise
        if failure:
            raise mark_known(failure)
        return lines


def _format_terms(doing: str, terms: dict[str, Any]) -> bytes:
    """Return the line of a rank with these terms. Raises ValueError if it is too long to send."""
    line = json.dumps({"doing": doing, **terms}).encode()
    if len(line) > MESSAGE_BYTES:
        raise ValueError(
            f"expected at most {MESSAGE_BYTES} bytes to describe {doing}, got {len(line)}"
        )
    return line


def read_terms(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the terms of each rank, from the lines that `gather_terms` returned.

    Raises RanksDisagree on every rank if one failed or does something else.
    """
    replies = [_parse_line(line) for line in lines]
    for rank, reply in enumerate(replies):
        if "failure" in reply:
            failed = f"rank {rank} of the group failed before {reply['doing']}: {reply['failure']}"
            raise mark_known(RanksDisagree(failed))
    doing = [reply.pop("doing") for reply in replies]
    for rank, other in enumerate(doing):
        if other != doing[0]:
            unlike = f"rank 0 begins {doing[0]}, rank {rank} begins {other}"
            raise mark_known(RanksDisagree(f"ranks do not do the same: {unlike}"))
    return replies


def agree(
    rings: Rings, name: str, terms: Callable[[], dict[str, Any]], *, but: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the terms of all ranks for a call of the function `name`.

    Raises RanksDisagree on every rank if ranks differ in a term that is not in `but`.
    """
    return read_equal_terms(gather_terms(rings, f"a call of {name}", terms), but, f" of {name}")


def read_equal_terms(
    lines: Sequence[bytes], but: Sequence[str], of: str = ""
) -> list[dict[str, Any]]:
    """Return the terms of each rank as `read_terms` does.

    of  ends a term's name in errors

    Raises RanksDisagree on every rank if ranks differ in a term that is not in `but`.
    """
    everyone = read_terms(lines)
    for rank, theirs in enumerate(everyone):
        for term in everyone[0] | theirs:  # some terms are those of an extension
            value, other = everyone[0].get(term), theirs.get(term)
            if term not in but and other != value:
                raise RanksDisagree(
                    f"ranks differ in {term}{of}: rank 0 has {value!r}, rank {rank} has {other!r}"
                )
    return everyone


def run_together(rings: Rings, doing: str, work: Callable[[], Result]) -> Result:
    """Return the result of `work` on this rank, once it has succeeded on all ranks.

    If it fails, its error is raised on this rank and RanksDisagree on the others. Raises
    RanksDisagree on every rank if one is doing something else.
    """
    results = []

    def terms() -> dict[str, Any]:
        results.append(work())
        return {}

    lines = gather_terms(rings, doing, terms)
    # equal lines need no reading: a failure of this rank has been raised
    if lines.count(lines[0]) < rings.size:
        read_terms(lines)
    return results[0]


class admit_one_thread:
    """A context that keeps other threads of this process out of the rings. This thread may enter
    again.

    Ranks pair messages by their order. Two threads would receive each other's messages.

    Raises RuntimeError at once if another thread is inside. That thread raises it too when it is
    done, unless it fails anyway. The group is unusable from then on: on another rank the other
    thread may have been first, and no rank could know.
    """

    def __init__(self, rings: Rings, doing: str):
        self.used, self.doing = [ring.messenger for ring in rings.shared], doing
        self.held: list[Messenger] = []

    def __enter__(self) -> None:
        for messenger in self.used:
            if messenger.in_use.acquire(blocking=False):
                self.held.append(messenger)
            else:
                messenger.contested = True
        if any(messenger.contested for messenger in self.used):
            self.__exit__(None)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for messenger in self.held:
            messenger.in_use.release()
        # after the release, so that one of two threads sees the ring contested and free
        if any(messenger.contested for messenger in self.used):
            _close_contested(self.used, self.doing)
            if kind is None:
                raise mark_known(RuntimeError(f"{self.doing}: {_RULE}"))


def _close_contested(used: Sequence[Messenger], doing: str) -> None:
    """Make all groups unusable. If another thread is inside a group, that thread does it."""
    for messenger in used:
        if messenger.in_use.acquire(blocking=False):
            try:
                messenger.contested = True
                if not messenger.unusable:
                    messenger.close(f"in {doing}: {_RULE}")
            finally:
                messenger.in_use.release()


class report_failure:
    """A context that reports it to the other ranks if this one fails in a call that all agreed on,
    unless they know the error already.

    If this rank fails because another one did, it raises that rank's error, with its reason.
    """

    def __init__(self, rings: Rings, doing: str):
        self.rings, self.doing = rings, doing
        # streams may wait for ranks of either ring
        self.watches = [ring.watch for ring in rings.shared if ring.watch]

    def __enter__(self) -> None:
        for watch in self.watches:
            watch.begin_call(self.doing)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        is_enqueued = error is None or stops_recomputation(error)
        for watch in self.watches:
            watch.end_call(is_enqueued)
        if is_enqueued or hasattr(error, _KNOWN):
            return
        assert error is not None, "nothing failed without one"
        if theirs := self.rings.fail(f"in {self.doing}: {_format_reason(error)}"):
            raise type(theirs)(f"{theirs}; so this rank cannot go on with {self.doing}") from error


def mark_known(error: Error) -> Error:
    """Return an error that all ranks raise or know, so that no rank reports it."""
    setattr(error, _KNOWN, True)
    return error


def _format_reason(error: BaseException) -> str:
    """Describe an error in printable ASCII, in 400 characters at most."""
    return "".join(
        c if c.isprintable() and c.isascii() else "?"
        for c in f"{type(error).__name__}: {error}"[:400]
    )


def _parse_line(line: bytes) -> dict[str, Any]:
    """Return the terms in a line. A line of another form counts as the rank's "doing"."""
    try:
        terms = json.loads(line)
    except ValueError:
        terms = None
    return (
        terms if isinstance(terms, dict) else {"doing": f"'{line.decode(errors='replace')[:200]}'"}
    )
