"""Kinds of masks by the number of tokens, as functions that return a `bmt_burst.Mask`.

examples/masks.py draws all of `EXAMPLES`, and tests/conformance tests them: `pytest -k NAME` takes
a name without spaces.
"""

from __future__ import annotations

from collections.abc import Callable

from bmt_burst import Mask, Slice


def prefix(seq_len: int, length: int) -> Mask:
    """Return a causal mask in which all tokens also see the first `length` ones, as in prefix
    language models.
    """
    rest = (length, seq_len)
    return Mask(seq_len, (Slice((0, seq_len), (0, length)), Slice(rest, rest, low=0)))


def sliding_with_sink(seq_len: int, window: int, sink: int) -> Mask:
    """Return a causal window in which all tokens also see the first `sink` ones before them, as in
    StreamingLLM (arXiv 2309.17453).
    """
    every = (0, seq_len)
    windowed = Slice(every, (sink, seq_len), low=0, high=window)
    return Mask(seq_len, (Slice(every, (0, sink), low=0), windowed))


def completions(seq_len: int) -> Mask:
    """Return the mask of a prompt with two completions, one of which has two ends, or of fewer
    branches if there are few tokens.
    """
    lengths = [seq_len - 4 * (seq_len // 6), *[seq_len // 6] * 4]
    kept = [i for i, count in enumerate(lengths) if count]
    return Mask.tree([lengths[i] for i in kept], [(None, 0, 0, 2, 2)[i] for i in kept])


def _bounds(seq_len: int) -> list[int]:
    """Return cu_seqlens of three documents, or fewer if there are few tokens."""
    return sorted({0, seq_len // 5, seq_len // 2, seq_len})


EXAMPLES: dict[str, Callable[[int], Mask]] = {
    "causal": Mask.causal,
    "full": Mask.full,
    "window": lambda n: Mask.window(n, max(n // 4, 1)),
    "documents": lambda n: Mask.documents(_bounds(n)),
    "full-documents": lambda n: Mask.documents(_bounds(n), causal=False),
    "windows-in-documents": lambda n: Mask.documents(_bounds(n), window=max(n // 8, 1)),
    "window-to-both-sides": lambda n: Mask.documents((0, n), causal=False, window=max(n // 8, 1)),
    "prefix": lambda n: prefix(n, n // 3),
    "tree": completions,
    "window-with-sink": lambda n: sliding_with_sink(n, max(n // 5, 1), n // 8),
}
