"""A program: a rank's part in a call or its backward, without tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...base.streams import current_stream, send_to_device
from ...sequence.gathered_calls import GatheredCall
from ...sequence.span import length
from ...transport.packing import Packing
from .. import Problem
from ..problem import DENSE, Scoring
from .events import Event
from .payload import Payload
from .routes import Landings, Round


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
    calls          kernel calls of each stage by (round, stage). Stage -1 is the root of a round: it
                   was received from another host, before the stages, and lies in memory of its own.
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
    events: Sequence[Event]
    has_one_stage: bool = False

    def numbers(self, key: tuple[int, int] | None, device: torch.device) -> Tensor | None:
        """Return `Scoring.numbers` of a stage or a root, by the key of its calls, or of the own
        tokens for None.

        Return None if there are none, or no calls.
        """
        scoring = self.problem.scoring
        if scoring is DENSE:
            return None
        return _all_numbers(self, scoring, device, current_stream(device)).get(key)

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
        if event.do in ("compute", "open"):
            stage_number = event.stage if event.do == "compute" else -1
            return f"  {_describe(self.calls[event.round, stage_number])}"
        if event.do in ("fetch", "return"):
            stage = self.rounds[event.round].stages[event.stage]
            sends = stage.sends if event.do == "fetch" else stage.returns
            landing = stage.tokens if event.do == "fetch" else stage.gradient_tokens
            there = ", ".join(f"{length(out.span)} to {out.peer}" for out in sends) or "none"
            return f"  {there}; {landing} tokens land"
        return ""


@functools.lru_cache(maxsize=8)  # large on GPUs where every step has numbers of its own
def _all_numbers(
    program: Program, scoring: Scoring, device: torch.device, stream: torch.cuda.Stream | None
) -> dict[tuple[int, int] | None, Tensor]:
    """Return the result of `Program.numbers` for each key, in one allocation, for work on
    `stream`.
    """
    positions: dict[tuple[int, int] | None, Tensor] = {
        None: program.problem.layout.positions(program.rank)
    }
    positions |= {
        key: _find_positions(program, *key) for key, calls in program.calls.items() if calls
    }
    found = scoring.numbers(torch.cat([*positions.values()]))
    if found is None:
        return {}
    parts = torch.split(send_to_device(found, device), [len(x) for x in positions.values()], 1)
    return dict(zip(positions, parts, strict=True))


def _find_positions(program: Program, number: int, stage: int) -> Tensor:
    """Return the positions of the tokens of a stage, or for stage -1 of a root."""
    round_ = program.rounds[number]
    if stage < 0:
        return find_landing_positions(round_.landings, round_.held_tokens)
    return find_landing_positions(round_.stages[stage].landings, round_.stages[stage].tokens)


def find_landing_positions(landings: Landings, tokens: int) -> Tensor:
    """Return the positions (tokens,) of a stage or a root as its tokens lie in memory.

    Tokens that no query of this rank sees get 0.
    """
    positions = torch.zeros(tokens, dtype=torch.int64)
    for (start, step, _, span), _, at in landings:
        positions[slice(*at)] = torch.arange(start, start + step * length(span), step)
    return positions


def _describe(calls: Sequence[GatheredCall]) -> str:
    """Describe kernel calls in a few words."""
    sizes = [
        f"{gathered.call.q_tokens} x {gathered.call.kv_tokens} in {len(gathered.call.tiles)} tiles"
        for gathered in calls
    ]
    return f"{len(calls)} kernel calls: {', '.join(sizes)}" if calls else "nothing"
