"""Half-open ranges (start, stop) of tokens, positions or indices. Plain numbers, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Span = tuple[int, int]


def length(span: Span) -> int:
    """Return the length of a span, 0 if it stops before it starts."""
    return max(span[1] - span[0], 0)


def overlap(a: Span, b: Span) -> Span:
    """Return the span that both have, (0, 0) if they have none."""
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else (0, 0)


def shifted(span: Span, by: int) -> Span:
    """Return a span moved by a distance."""
    return span[0] + by, span[1] + by


def in_turn(spans: Iterable[Span]) -> Iterator[tuple[Span, Span]]:
    """Yield each span with its place if the spans lie one after the other."""
    at = 0
    for span in spans:
        yield span, (at, at + length(span))
        at += length(span)


def hull(spans: Iterable[Span]) -> Span:
    """Return the span from the first start to the last stop, (0, 0) without spans."""
    spans = list(spans)
    return (min(start for start, _ in spans), max(stop for _, stop in spans)) if spans else (0, 0)


def merged(spans: Iterable[Span], gap: int = 0) -> tuple[Span, ...]:
    """Return the union of the spans, as rising spans with more than `gap` tokens between them.

    With a gap of -1, spans that only touch are not joined.
    """
    result: list[Span] = []
    for start, stop in sorted(spans):
        if result and start - result[-1][1] <= gap:
            if stop > result[-1][1]:
                result[-1] = result[-1][0], stop
        elif start < stop:
            result.append((start, stop))
    return tuple(result)
