"""A program: a rank's part in a call or its backward, without tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...sequence.gathered_calls import GatheredCall
from ...sequence.span import length
from ...transport.packing import Packing
from .. import Problem
from .events import Event, order_events
from .payload import Payload
from .routes import Round


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


def _describe(calls: Sequence[GatheredCall]) -> str:
    """Describe kernel calls in a few words."""
    sizes = [
        f"{gathered.call.q_tokens} x {gathered.call.kv_tokens} in {len(gathered.call.tiles)} tiles"
        for gathered in calls
    ]
    return f"{len(calls)} kernel calls: {', '.join(sizes)}" if calls else "nothing"
