"""Agreement of the ranks before they begin something together: see "What ranks agree on" in
docs/design.md.

Each rank sends a line of JSON. It names what the rank is "doing", and has a digest of the terms
that must be equal on all ranks, and the terms of this rank alone, or the "failure" that prevents
it. Ranks number their calls and also agree on the backward of each call. Otherwise ranks in
different backwards would silently add up wrong gradients.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from ..base.autograd import stops_recomputation
from ..base.ranges import in_range
from ..base.streams import refuse_capture
from ..errors import RankGone, RanksDisagree
from ..sequence.differences import layout_difference, mask_difference
from ..sequence.layout import Layout
from ..sequence.mask import Mask
from ..transport.messenger import MESSAGE_BYTES, Messenger
from .rings import Rings

Result = TypeVar("Result")
Given = TypeVar("Given")
Error = TypeVar("Error", bound=BaseException)

_RULE = (
    "two threads of this process called in the same group at once, so it is unusable now. A group "
    "is for one thread at a time: let threads take turns, or give each thread its own group"
)
_CAPTURED = "ranks agree on each call over the host, which a graph does not replay"
_KNOWN = "_known_to_all_ranks"  # attribute of errors


@dataclass(eq=False)
class Terms:
    """This rank's statement of what all ranks do next.

    doing   names it
    shared  the terms that must be equal on all ranks, as JSON takes them, and masks and layouts
    own     the terms that may differ, as JSON takes them
    of      ends the names of terms in errors
    """

    doing: str
    shared: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    of: str = ""

    @functools.cached_property
    def line(self) -> bytes:
        """The message about them. Raises ValueError if it is too long to send."""
        terms = {"doing": self.doing, **self.own}
        if self.shared:
            text = json.dumps(self.shared, default=describe_term).encode()
            terms["terms"] = hashlib.blake2b(text, digest_size=16).hexdigest()
        line = json.dumps(terms).encode()
        if len(line) > MESSAGE_BYTES:
            expected = f"at most {MESSAGE_BYTES} bytes to describe {self.doing}"
            raise ValueError(f"expected {expected}, got {len(line)}")
        return line


def run_agreed(
    rings: Rings,
    doing: str,
    check: Callable[[], tuple[Terms, Given]],
    run: Callable[[Given, tuple[bytes, ...]], Result],
    counts: bool = False,
) -> Result:
    """Return the result of `run`, once `check` has succeeded on all ranks and their terms agree.

    doing   names the call in errors
    check   returns this rank's terms, and what `run` takes
    run     also takes the lines of all ranks, for `read_own`. A rank alone has none
    counts  whether the call is numbered. A later backward names that number: `rings.history.calls`

    If `check` fails on a rank, its error is raised there and RanksDisagree on the others. They know
    the failure of a call inside `check` already: a backward may compute its forward again, which
    calls attention. All ranks raise RanksDisagree if they differ in terms or in what they do. A
    failure in `run` is reported to the others. In a capture of a CUDA graph, several ranks raise
    RuntimeError before they send anything.
    """
    if not rings.shared:
        _, given = check()
        rings.history.calls += counts
        return run(given, ())
    with admit_one_thread(rings, doing):
        given, lines = _meet(rings, doing, check)
        if counts:
            rings.history.calls += 1
            doing = f"call {rings.history.calls}"
        with report_failure(rings, doing):
            return run(given, lines)


def run_together(rings: Rings, doing: str, work: Callable[[], Result]) -> Result:
    """Return the result of `work`, once it has succeeded on all ranks. Raises as `run_agreed`."""
    with admit_one_thread(rings, doing):
        return _meet(rings, doing, lambda: (Terms(doing), work()))[0]


def agree(
    rings: Rings,
    name: str,
    find: Callable[[], Mapping[str, Any]],
    *,
    but: Sequence[str] = (),
    doing: str = "",
) -> list[dict[str, Any]]:
    """Return the terms of all ranks for a call of the function `name`, or for what they begin.

    `find` returns this rank's terms. Raises RanksDisagree on every rank if ranks differ in a term
    that is not in `but`.
    """
    of = "" if doing else f" of {name}"
    doing = doing or f"a call of {name}"

    def check() -> tuple[Terms, Terms]:
        found = find()
        shared = {term: x for term, x in found.items() if term not in but}
        terms = Terms(doing, shared, {term: found[term] for term in but}, of)
        return terms, terms

    with admit_one_thread(rings, doing):
        terms, lines = _meet(rings, doing, check)
    return [{**terms.shared, **theirs} for theirs in read_own(terms, lines)]


def gather_terms(
    rings: Rings, doing: str, terms: Callable[[], dict[str, Any]]
) -> tuple[bytes, ...]:
    """Return the lines of all ranks in rank order, for `read_terms`. Ranks may differ in all terms.
    If `terms` fails, this rank sends its failure to the others, and then raises it.
    """
    with admit_one_thread(rings, doing):
        return _meet(rings, doing, lambda: (Terms(doing, own=terms()), None))[1]


def refuse(rings: Rings, doing: str, error: Exception) -> NoReturn:
    """Raise `error` instead of the call `doing`. The other ranks raise RanksDisagree."""

    def fail() -> NoReturn:
        raise error

    gather_terms(rings, doing, fail)
    raise AssertionError("gather_terms returned although its terms failed")


def _meet(
    rings: Rings, doing: str, check: Callable[[], tuple[Terms, Given]]
) -> tuple[Given, tuple[bytes, ...]]:
    """Return what `check` does besides the terms, and the lines of all ranks, which agree."""
    if rings.shared:
        refuse_capture(doing, _CAPTURED)
    failure = None
    try:
        terms, given = check()
        line = terms.line
    except Exception as caught:
        if hasattr(caught, _KNOWN):
            raise  # the others do not wait for a second line about it
        failure, line = caught, Terms(doing, own={"failure": _format_reason(caught)}).line
    lines = _exchange(rings, doing, line)
    if failure:
        raise mark_known(failure)
    # equal lines agree, and so do lines for which a plan was made
    if lines.count(lines[0]) < len(lines) and lines not in rings.history.plans:
        _compare(rings, terms, lines)
    return given, lines


def _exchange(rings: Rings, doing: str, line: bytes) -> tuple[bytes, ...]:
    try:
        return tuple(in_range("agreement", rings.gather, line))
    except RankGone as gone:  # also RankLate
        raise mark_known(type(gone)(f"{doing}: {gone}")) from gone
    except Exception as lost:
        # reporting it would wait again for a rank that is gone
        mark_known(lost)
        raise


def read_terms(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the own terms of each rank, from the lines of all. Raises RanksDisagree on every rank
    if one failed or does something else.
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


def read_own(terms: Terms, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the own terms of each rank, from the lines that `run_agreed` passed on."""
    return read_terms(lines) if lines else [{**terms.own}]


def _compare(rings: Rings, terms: Terms, lines: Sequence[bytes]) -> None:
    """Raise RanksDisagree on every rank if one failed, does something else or has other terms."""
    digests = [reply.get("terms") for reply in read_terms(lines)]
    if digests.count(digests[0]) == len(digests):
        return
    with report_failure(rings, terms.doing):
        everyone = _exchange_terms(rings, terms)
        rank, name = next(
            (rank, name)
            for rank, theirs in enumerate(everyone)
            for name in everyone[0] | theirs  # some terms are those of an extension
            if theirs.get(name) != everyone[0].get(name)
        )
        one, other = (theirs.get(name) for theirs in (everyone[0], everyone[rank]))
        unlike = f"rank 0 has {_show(one)!r}, rank {rank} has {_show(other)!r}"
        if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            details = "slices" if "slices" in one else "runs"
            find = mask_difference if details == "slices" else layout_difference
            unlike += f"; {find(one[details], other[details], (0, rank))}"
        raise mark_known(RanksDisagree(f"ranks differ in {name}{terms.of}: {unlike}"))


def _exchange_terms(rings: Rings, terms: Terms) -> list[dict[str, Any]]:
    """Return the shared terms of all ranks, with the slices of masks and the runs of layouts."""
    mine = json.dumps(terms.shared, default=_list_details).encode()
    whole = [b""] * rings.size
    for start in itertools.count(0, MESSAGE_BYTES):
        pieces = _exchange(rings, terms.doing, mine[start : start + MESSAGE_BYTES])
        whole = [x + piece for x, piece in zip(whole, pieces, strict=True)]
        if max(map(len, pieces)) < MESSAGE_BYTES:
            return [*map(json.loads, whole)]
    raise AssertionError("each message ends")


def _list_details(value: Mask | Layout) -> dict[str, Any]:
    if isinstance(value, Mask):
        return {"tokens": [value.seq_len, value.kv_len], "slices": value.slices}
    runs = [[(r.start, r.stop, r.step) for r in ranges] for ranges in value.shards]
    return {"layout": [value.name, value.seq_len], "runs": runs}


def _show(value: Any) -> Any:
    """Return a term that ranks exchanged as an error shows it."""
    if not isinstance(value, dict):
        return value
    if "runs" in value:
        return "{} of {} tokens".format(*value["layout"])
    (tokens, keys), slices = value["tokens"], value["slices"]
    of_keys = f" and {keys} keys" * (keys != tokens)
    return f"{tokens} tokens{of_keys} in {len(slices)} slices"


def describe_term(value: Mask | Layout | str) -> str:
    """Return a text that is equal for equal masks and layouts, in every process.

    Raises TypeError for others, such as a tensor among the terms of an extension.
    """
    if isinstance(value, Mask):
        return value.digest
    if isinstance(value, str):
        return value
    if not isinstance(value, Layout):
        raise TypeError(
            "ranks compare text, numbers, lists, Masks and Layouts: expected one of these as a "
            f"term, got {type(value).__name__}"
        )
    return f"{value.term} of {value.seq_len} tokens on {value.size} ranks"


@contextlib.contextmanager
def admit_one_thread(rings: Rings, doing: str) -> Iterator[None]:
    """Return a context that keeps other threads of this process out of the rings, since two threads
    would receive each other's messages. This thread may enter again.

    Raises RuntimeError at once if another thread is inside. That thread raises it too when it is
    done, unless it fails anyway. The group is unusable from then on: on another rank the other
    thread may have been first, and no rank could know.
    """
    used, held, fails = [ring.messenger for ring in rings.shared], list[Messenger](), True
    try:
        for messenger in used:
            if messenger.in_use.acquire(blocking=False):
                held.append(messenger)
            else:
                messenger.contested = True
        if not any(messenger.contested for messenger in used):
            yield
        fails = False
    finally:
        for messenger in held:
            messenger.in_use.release()
        # after the release, so that one of two threads sees the ring contested and free
        if any(messenger.contested for messenger in used):
            _close_contested(used, doing)
            if not fails:
                raise mark_known(RuntimeError(f"{doing}: {_RULE}"))


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


@contextlib.contextmanager
def report_failure(rings: Rings, doing: str) -> Iterator[None]:
    """Return a context of a call that all agreed on. If this rank fails in it, the others get the
    reason, unless they know it. If another rank failed first, this one raises that rank's error.
    """
    # streams may wait for ranks of either ring
    watches = [ring.watch for ring in rings.shared if ring.watch]
    for watch in watches:
        watch.begin_call(doing)
    try:
        yield
    except BaseException as error:
        is_enqueued = stops_recomputation(error)
        for watch in watches:
            watch.end_call(is_enqueued)
        if is_enqueued or hasattr(error, _KNOWN):
            raise
        if theirs := rings.fail(f"in {doing}: {_format_reason(error)}"):
            raise type(theirs)(f"{theirs}; so this rank cannot go on with {doing}") from error
        raise
    for watch in watches:
        watch.end_call(True)


def mark_known(error: Error) -> Error:
    """Return an error that all ranks raise or know, so that no rank reports it."""
    setattr(error, _KNOWN, True)
    return error


def _format_reason(error: BaseException) -> str:
    """Describe an error in printable ASCII, in 400 characters at most."""
    text = f"{type(error).__name__}: {error}"[:400]
    return "".join(c if c.isprintable() and c.isascii() else "?" for c in text)


def _parse_line(line: bytes) -> dict[str, Any]:
    """Return the terms in a line. A line of another form counts as the rank's "doing"."""
    with contextlib.suppress(ValueError):
        terms = json.loads(line)
        if isinstance(terms, dict):
            return terms
    return {"doing": f"'{line.decode(errors='replace')[:200]}'"}
