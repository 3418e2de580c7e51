"""Work that goes on beside other work: on a GPU each track has a stream of its own.

Where one track waits for a peer, ends a kernel whose last tiles leave most SMs without work, or passes over memory, the
kernels of the other fill the GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Generator, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")
Work = Generator[None, None, Result]  # yields after every step


def finish(work: Work[Result]) -> Result:
    """Does all steps and returns the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def take_turns(tracks: Sequence[Sequence[Work[None]]], device: torch.device) -> None:
    """Does the works of each track one after the other, and the tracks in turns, a step of each.

    The first track is the current stream; the others begin after what is enqueued there, and it waits for their end. So
    memory from before may be used on all of them, and what a work allocates belongs to its track. If a step raises,
    all works are closed.
    """
    streams = [None, *(_stream(device, track) for track in range(1, len(tracks)))]
    left = [deque(works) for works in tracks]
    for stream in filter(None, streams):
        stream.wait_stream(torch.cuda.current_stream(device))
    try:
        while any(left):
            for works, stream in zip(left, streams, strict=True):
                with torch.cuda.stream(stream):
                    if works and next(works[0], _END) is _END:
                        works.popleft()
    finally:
        with contextlib.ExitStack() as closing:
            for works, stream in zip(left, streams, strict=True):
                closing.callback(_close, works, stream)
        for stream in filter(None, streams):
            torch.cuda.current_stream(device).wait_stream(stream)


_END = object()


def _close(works: deque[Work[None]], stream: torch.cuda.Stream | None) -> None:
    with torch.cuda.stream(stream):
        for work in works:
            work.close()


@functools.cache
def _stream(device: torch.device, track: int) -> torch.cuda.Stream | None:
    """The stream of a track other than the first; None where there are no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
