"""A program: a rank's part in a call or its backward, and the order of its events, as data.

Each exchange starts before the computation that overlaps with it, and memory is released as soon as
it has been read. docs/design.md shows why streams do not deadlock.

    pack     p        copy the tokens of the own block that others need in pass p
    cross    p n      start to receive the root of round n from its host
    fetch    p n s    start to receive what this rank needs in stage s, and to send what others
                      need
    own               compute the own block
    begin    p        begin the sums of a pass
    land     p n s    wait for what was fetched
    compute  p n s    compute it. Stage -1 is the root of round n, which was received before the
                      stages, from another host, and lies in memory of its own
    return   p n s    start to return its results
    collect  p n s    wait for the results of the root that others computed in the stage, and add
                      them up
    free     p n s    release the memory of what was fetched
    leave    p n      start to send this host's share of the root's results to the root's owner
    receive  p n      wait for another host's share of the own results, and add it
    arrive   p n      wait for the root of round n
    end      p (n s)  wait for the last results (of stage s), and complete the sums of a pass

Results that return are gradients, or in a forward that sends queries their partial outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...sequence.gathered_calls import GatheredCall
from ...sequence.span import length
from ...transport.packing import Packing
from .. import Problem
from .payload import Payload
from .routes import Round


class Event(NamedTuple):
    """An action of a rank in pass `number` over the ring, round `round` and stage `stage`."""

    do: str
    number: int = 0
    round: int = 0
    stage: int = 0

    def __str__(self) -> str:
        return f"{self.do:<8} {self.number} {self.round} {self.stage}"


def order_events(passes: int, stages: Sequence[int], returning: bool) -> Iterator[Event]:
    """Yield the events of a rank in `passes` over a ring. `stages` counts the stages of each round.
    With `returning`, results are returned.

    The first exchanges of a pass start before the last stage of the previous pass is computed.
    The first two of all start before the own block is: there are two buffers, and under packed
    documents other ranks may be done with their own blocks much earlier. Results of a stage are
    returned while the next stage is computed, and those from another host while the next round is.
    """
    last = len(stages) - 1
    collect: list[Event] = []  # of the stage before
    receive: list[Event] = []  # of the round before
    end: list[Event] = []  # of the pass before
    if passes:
        yield from _begin_round(0, 0, stages)
    begin = [Event("own")]
    for number in range(passes):
        following = _begin_round(number + 1, 0, stages) if number + 1 < passes else ()
        begin.append(Event("begin", number))
        for round_, count in enumerate(stages):
            if round_ == last and not count:  # only the root is left to compute while they arrive
                yield from following
            if round_:
                yield Event("compute", number, round_, -1)
                yield from _take_all(collect)
            for stage in range(count):
                if stage + 1 < count:
                    yield Event("fetch", number, round_, stage + 1)
                elif round_ == last:
                    yield from following
                yield from _take_all(begin)
                yield Event("land", number, round_, stage)
                yield Event("compute", number, round_, stage)
                if returning:
                    yield from _take_all(collect)
                    if not last:  # in a double ring it follows the last `receive`, below
                        yield from _take_all(end)
                    yield Event("return", number, round_, stage)
                    collect.append(Event("collect", number, round_, stage))
                yield Event("free", number, round_, stage)
            yield from _take_all(begin)
            if returning and round_:
                yield from _take_all(collect)
                yield from _take_all(receive)
                yield from _take_all(end)
                yield Event("leave", number, round_)
                receive.append(Event("receive", number, round_))
            if round_ < last:
                yield Event("arrive", number, round_ + 1)
                yield from _begin_round(number, round_ + 1, stages)
        # In a single ring, `end` itself adds the last results: nothing is left to compute while
        # they return, so they are added up together with all others.
        if last or not collect:
            end.append(Event("end", number, last, -1))
        else:
            end.append(collect.pop()._replace(do="end"))
        if not returning:
            yield from _take_all(end)
    yield from _take_all(begin)
    yield from _take_all(receive)
    yield from _take_all(end)


def _take_all(events: list[Event]) -> Iterator[Event]:
    """Yield the events and remove them from the list."""
    while events:
        yield events.pop(0)


def _begin_round(number: int, round_: int, stages: Sequence[int]) -> Iterator[Event]:
    """Yield the events that start the first exchanges of a round."""
    if not round_:
        yield Event("pack", number)
    if round_ + 1 < len(stages):
        yield Event("cross", number, round_ + 1)
    if stages[round_]:
        yield Event("fetch", number, round_, 0)


@dataclass(frozen=True)
class Pass:
    """The heads that are sent together around the ring: slices of q's and k's heads, and how the
    tensors lie in memory.
    """

    q: slice
    kv: slice
    packing: Packing
    return_packing: Packing


@dataclass(frozen=True, eq=False)
class Program:
    """A rank's part in a call or its backward, without tensors.

    own            kernel calls of the own block
    calls          kernel calls of each stage by (round, stage); stage -1 is the root of a round
    has_one_stage  whether all is computed in one stage, the own block too. A single partial result
                   is the result then.
    """

    problem: Problem
    rank: int
    payload: Payload
    own: Sequence[GatheredCall]
    passes: Sequence[Pass]
    rounds: Sequence[Round]
    calls: Mapping[tuple[int, int], Sequence[GatheredCall]]
    has_one_stage: bool = False

    @functools.cached_property
    def events(self) -> tuple[Event, ...]:
        stages = [len(round_.stages) for round_ in self.rounds] or [0]
        return tuple(order_events(len(self.passes), stages, self.payload.returns))

    def __str__(self) -> str:
        """Show the events with the tokens that they move and the kernel calls that they make."""
        payload, passes = type(self.payload).__name__, len(self.passes)
        lines = [f"{payload} in {passes} pass{'es' * (passes != 1)}; pass, round, stage:"]
        for event in self.events:
            lines.append(f"  {event}{self._detail(event)}")
        return "\n".join(lines)

    def _detail(self, event: Event) -> str:
        if event.do == "own":
            return f"  {_describe(self.own)}"
        if event.do == "compute":
            return f"  {_describe(self.calls[event.round, event.stage])}"
        if event.do in ("fetch", "return"):
            stage = self.rounds[event.round].stages[event.stage]
            sends = stage.sends if event.do == "fetch" else stage.returns
            landing = stage.tokens if event.do == "fetch" else stage.returned_tokens
            there = ", ".join(f"{length(out.span)} to {out.peer}" for out in sends) or "none"
            return f"  {there}; {landing} tokens land"
        return ""


def _describe(gathered: Sequence[GatheredCall]) -> str:
    calls = [each.call for each in gathered]
    sizes = [f"{x.q_tokens} x {x.kv_tokens} in {len(x.tiles)} tiles" for x in calls]
    return f"{len(calls)} kernel calls: {', '.join(sizes)}" if calls else "nothing"
