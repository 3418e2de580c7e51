"""The order of events of one rank: what it starts, waits for and computes, as data that can be
printed and checked.

All that begins an exchange stands before what it overlaps with is computed, and memory is given
back as soon as it was read. That is also what keeps streams from deadlock: what a rank waits for,
its peers enqueue before they wait for anything later (see transport/copy_engine.py).

    pack     p        the own block's part that others look at, of pass p, made contiguous
    cross    p n      starts bringing the root of round n from its host
    fetch    p n s    starts bringing in what this rank looks at in stage s, and sending others what
             they look at
    own               computes the own block
    begin    p        the sums of a pass begin
    open     p n      computes what this rank looks at of the root of round n
    land     p n s    waits for what was fetched
    compute  p n s    computes it
    return   p n s    starts sending its gradients home
    collect  p n s    waits for gradients of the root that others computed in the stage, and adds
             them up
    free     p n s    gives back the memory of what was fetched
    leave    p n      starts sending this host's share of the root's gradients to its owner
    receive  p n      waits for the share that another host has of the own gradients, and adds it
    arrive   p n      waits for the root of round n
    end      p (n s)  waits for the last gradients, those of stage s, and completes the sums of a
             pass
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Do = Literal[
    "pack",
    "cross",
    "fetch",
    "own",
    "begin",
    "open",
    "land",
    "compute",
    "return",
    "collect",
    "free",
    "leave",
    "receive",
    "arrive",
    "end",
]


class Event(NamedTuple):
    """Something that a rank does in pass `number` over the ring, round `round` and stage `stage`."""

    do: Do
    number: int = 0
    round: int = 0
    stage: int = 0

    def __str__(self) -> str:
        return f"{self.do:<8} {self.number} {self.round} {self.stage}"


def order_events(passes: int, stages: Sequence[int], returning: bool) -> Iterator[Event]:
    """The events of a rank in `passes` over a ring whose rounds have so many stages; `returning` if
    gradients do.

    What a pass needs first is on its way before the last stage of the pass before is computed, and
    what the first one needs before the own block is. Gradients of a stage come home while the next
    one is computed, those from another host while the next round is.
    """
    last = len(stages) - 1
    collect: list[Event] = []  # of the stage before
    receive: list[Event] = []  # of the round before
    end: list[Event] = []  # of the pass before
    if passes:
        yield from _begin(0, 0, stages)
    yield Event("own")
    for number in range(passes):
        following = [number + 1] if number + 1 < passes else []
        yield Event("begin", number)
        for round_, count in enumerate(stages):
            if round_ == last and not count:
                yield from _begin_next(following, stages)
            if round_:
                yield Event("open", number, round_)
                yield from _taken(collect)
            for stage in range(count):
                if stage + 1 < count:
                    yield Event("fetch", number, round_, stage + 1)
                elif round_ == last:
                    yield from _begin_next(following, stages)
                yield Event("land", number, round_, stage)
                yield Event("compute", number, round_, stage)
                if returning:
                    yield from _taken(collect)
                    if not last:
                        yield from _taken(end)
                    yield Event("return", number, round_, stage)
                    collect.append(Event("collect", number, round_, stage))
                yield Event("free", number, round_, stage)
            if returning and round_:
                yield from _taken(collect)
                yield from _taken(receive)
                yield from _taken(end)
                yield Event("leave", number, round_)
                receive.append(Event("receive", number, round_))
            if round_ < last:
                yield Event("arrive", number, round_ + 1)
                yield from _begin(number, round_ + 1, stages)
        if last or not collect:
            end.append(Event("end", number, last, -1))
        else:
            end.append(collect.pop()._replace(do="end"))
        if not returning:
            yield from _taken(end)
    yield from _taken(receive)
    yield from _taken(end)


def _taken(events: list[Event]) -> Iterator[Event]:
    """The events, which are no longer pending."""
    while events:
        yield events.pop(0)


def _begin_next(following: list[int], stages: Sequence[int]) -> Iterator[Event]:
    """What begins with the next pass, if there is one."""
    for number in following:
        yield from _begin(number, 0, stages)


def _begin(number: int, round_: int, stages: Sequence[int]) -> Iterator[Event]:
    """What begins with a round."""
    if not round_:
        yield Event("pack", number)
    if round_ + 1 < len(stages):
        yield Event("cross", number, round_ + 1)
    if stages[round_]:
        yield Event("fetch", number, round_, 0)
